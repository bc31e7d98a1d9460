"""Simulated conversations for tables: turns, rooms and noise."""

from collections.abc import Iterable

import numpy as np
import pytest
from simulate import RATE, SNR_DB, add_room_and_noise, converse
from voices import write_voices

from speakerlab.data.manifest import read_manifest
from speakerlab.diarization.regions import Region
from speakerlab.inference.speech import find_speech


def samples_in(regions: Iterable[Region], num_samples: int) -> np.ndarray:
    """Return whether each sample is in one of the regions."""
    is_inside_S = np.zeros(num_samples, dtype=bool)
    for start, end in regions:
        first = round(start * RATE)
        stop = round(end * RATE)
        is_inside_S[first:stop] = True
    return is_inside_S


def test_turns_are_where_the_conversation_has_speech(tmp_path):
    write_voices(tmp_path / "data", speakers=range(5), seconds=(3.0, 2.0))
    manifest = read_manifest([tmp_path / "data"], sample_rate=RATE)
    wave_S, turns = converse(manifest, 0, seed=0)
    assert len(wave_S) == 40 * RATE
    assert len({turn.speaker for turn in turns}) == 2
    int16_S = np.round(32768 * wave_S).astype(np.int16)
    speech = find_speech(int16_S, sample_rate=RATE)
    is_found_S = samples_in(speech, len(wave_S))
    is_turn_S = samples_in([turn[:2] for turn in turns], len(wave_S))
    assert np.mean(is_turn_S == is_found_S) > 0.9

    again_S, again = converse(manifest, 0, seed=0)
    assert again == turns
    np.testing.assert_array_equal(again_S, wave_S)


def test_a_room_keeps_the_time_of_the_direct_sound():
    wave_S = np.zeros(RATE)
    wave_S[1000] = 1.0
    # An echo after 200 samples, and 500 samples before the direct sound.
    room_R = np.zeros(2000)
    room_R[500] = 1.0
    room_R[700] = 0.5
    silence_S = np.full(RATE, 1e-9)
    rng = np.random.default_rng(0)
    mixed_S = add_room_and_noise(wave_S, [room_R], [silence_S], rng)
    assert np.argmax(np.abs(mixed_S)) == 1000


def test_noise_has_the_level_of_a_draw():
    rng = np.random.default_rng(0)
    speech_S = np.sin(0.1 * np.arange(RATE))
    noise_S = rng.standard_normal(RATE)
    no_room_R = np.zeros(9)
    no_room_R[0] = 1.0
    mixed_S = add_room_and_noise(speech_S, [no_room_R], [noise_S], rng)
    # The mixture is scaled to a peak; the noise has no correlation with the speech.
    scale = (mixed_S @ speech_S) / (speech_S @ speech_S)
    rest_S = mixed_S / scale - speech_S
    snr = 10 * np.log10(np.mean(speech_S**2) / np.mean(rest_S**2))
    assert SNR_DB[0] - 0.5 <= snr <= SNR_DB[1] + 0.5
    assert np.abs(mixed_S).max() == pytest.approx(0.9)
