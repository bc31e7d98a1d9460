"""Cross-talk is removed from the channels of a call; speech at the same time stays."""

import numpy as np
import pytest
from voices import RATE, make_wave

from speakerlab.diarization.channels import remove_cross_talk

SECONDS = 12


def make_speaker(seed: int, *turns: tuple[float, float]) -> np.ndarray:
    """White noise with syllables, in the turns: the sound of one speaker has no other's."""
    rng = np.random.default_rng(seed)
    noise_S = 3000 * rng.standard_normal(SECONDS * RATE)
    time_S = np.arange(len(noise_S)) / RATE
    is_turn_S = np.zeros(len(noise_S), dtype=bool)
    for start, end in turns:
        is_turn_S |= (time_S >= start) & (time_S < end)
    # Four syllables in a second.
    syllables_S = 0.6 + 0.4 * np.sin(2 * np.pi * 4 * time_S)
    return noise_S * syllables_S * is_turn_S


def leak(wave_S: np.ndarray, gain: float) -> np.ndarray:
    """Return the sound of a channel in another one: later, quieter and filtered."""
    # The direct sound, 120 samples later, and two echoes.
    response_S = np.zeros(200)
    response_S[120] = gain
    response_S[140] = gain / 2
    response_S[199] = -gain / 3
    return np.convolve(wave_S, response_S)[: len(wave_S)]


def own_regions(first_S, second_S, first_regions, second_regions):
    """Return the regions without cross-talk of two channels, with some noise."""
    rng = np.random.default_rng(9)
    waves = []
    for wave_S in (first_S, second_S):
        noisy_S = wave_S + 5 * rng.standard_normal(len(wave_S))
        waves.append(np.clip(noisy_S, -32768, 32767).astype(np.int16))
    return remove_cross_talk(
        waves,
        [first_regions, second_regions],
        sample_rate=RATE,
    )


def test_a_copy_of_the_other_channel_is_removed():
    caller_S = make_speaker(0, (0, 4), (8, 12))
    agent_S = make_speaker(1, (4, 8))
    heard_S = agent_S + leak(caller_S, 0.1)
    # The energy of the agent's channel is that of both speakers.
    caller_regions = [(0.0, 4.0), (8.0, 12.0)]
    first, second = own_regions(caller_S, heard_S, caller_regions, [(0.0, 12.0)])
    assert first == caller_regions
    np.testing.assert_allclose(second, [(4.0, 8.0)], atol=0.25)


def test_a_channel_that_hears_only_the_other_one_has_no_speech():
    caller_S = make_speaker(0, (0, 4), (8, 12))
    regions = [(0.0, 4.0)]
    first, second = own_regions(caller_S, leak(caller_S, 0.1), regions, regions)
    assert first == regions
    assert second == []


def test_both_channels_at_the_same_time_have_speech():
    caller_S = make_speaker(0, (0, 12))
    # Quieter than the other channel, but no copy of it.
    agent_S = 0.2 * make_speaker(1, (3, 6))
    first, second = own_regions(caller_S, agent_S, [(0.0, 12.0)], [(3.0, 6.0)])
    assert first == [(0.0, 12.0)]
    assert second == [(3.0, 6.0)]


def test_cross_talk_below_the_speech_of_a_channel_leaves_that_speech():
    caller_S = make_speaker(0, (0, 12))
    agent_S = 0.2 * make_speaker(1, (3, 6))
    heard_S = agent_S + leak(caller_S, 0.03)
    whole = [(0.0, 12.0)]
    _, second = own_regions(caller_S, heard_S, whole, whole)
    np.testing.assert_allclose(second, [(3.0, 6.0)], atol=0.25)


def test_of_equal_channels_the_first_has_the_speech():
    wave_S = make_wave(0, 0, 3.0)
    regions = [(0.0, 3.0)]
    waves = [wave_S, wave_S.copy()]
    kept = remove_cross_talk(waves, [regions, regions], sample_rate=RATE)
    assert kept == [[(0.0, 3.0)], []]


def test_silent_channels_and_short_regions():
    wave_S = make_wave(0, 0, 1.0)
    silent_S = np.zeros_like(wave_S)
    kept = remove_cross_talk(
        [wave_S, silent_S],
        [[(0.0, 0.1), (0.5, 1.0)], []],
        sample_rate=RATE,
    )
    assert kept == [[(0.0, 0.1), (0.5, 1.0)], []]


def test_a_line_may_be_quieter_than_its_cross_talk():
    """The agent's line has 3 % of the level: the caller's channel has more of the agent's voice."""
    caller_S = make_speaker(0, (0, 5))
    agent_S = make_speaker(1, (4, 12))
    left_S = caller_S + leak(agent_S, 0.1)
    right_S = agent_S + leak(caller_S, 0.1)
    right_S *= 0.03
    first, second = own_regions(left_S, right_S, [(0.0, 12.0)], [(0.0, 12.0)])
    np.testing.assert_allclose(first, [(0.0, 5.0)], atol=0.15)
    np.testing.assert_allclose(second, [(4.0, 12.0)], atol=0.15)


def test_two_speakers_of_a_channel_are_heard_at_two_levels_in_the_other_one():
    near_S = make_speaker(0, (0, 4), (8, 12))
    far_S = make_speaker(1, (4, 8))
    left_S = near_S + far_S
    right_S = leak(near_S, 0.2) + leak(far_S, 0.05)
    first, second = own_regions(left_S, right_S, [(0.0, 12.0)], [(0.0, 12.0)])
    assert first == [(0.0, 12.0)]
    assert second == []


@pytest.mark.parametrize("num_samples", [0, 10, 330, RATE])
@pytest.mark.parametrize("regions_of", [[[], []], [[(0.0, 0.5)], [(0.0, 2.0)]]])
def test_waves_that_are_too_short_or_silent_keep_their_regions(num_samples, regions_of):
    silent_S = np.zeros(num_samples, dtype=np.int16)
    kept = remove_cross_talk([silent_S, silent_S], regions_of, sample_rate=RATE)
    assert kept == regions_of


def test_a_single_channel_keeps_its_regions():
    wave_S = make_wave(0, 0, 1.0)
    regions_of = [[(0.2, 0.4)]]
    assert remove_cross_talk([wave_S], regions_of, sample_rate=RATE) == regions_of
