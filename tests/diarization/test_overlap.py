"""Overlapped speech: local speakers of windows become the found ones, a second one is added."""

import numpy as np
import pytest

from speakerlab.diarization.overlap import (
    FIRST_SECONDS,
    FRAME_SECONDS,
    SPEAKERS_CL,
    LocalSpeakers,
    add_overlap,
)
from speakerlab.diarization.resegmentation import find_segments
from speakerlab.diarization.windows import cut_windows

FRAMES = 589
STEP = 148
NOBODY = 0
BOTH = (0, 1)


def local_speakers(
    *turns: tuple[float, float, object],
    seconds: float,
    seed: int = 0,
):
    """Windows whose local speakers are permuted, of turns of speakers 0 to 2, or of two of them."""
    num_frames = max(round(seconds / FRAME_SECONDS), FRAMES)
    active_TL = np.zeros((num_frames, 3), dtype=bool)
    for start, end, speakers in turns:
        first_frame = round(start / FRAME_SECONDS)
        end_frame = round(end / FRAME_SECONDS)
        frames = slice(first_frame, end_frame)
        active_TL[frames, np.atleast_1d(speakers)] = True
    last = num_frames - FRAMES
    starts = [*range(0, last, STEP), last]
    start_W = np.array(starts)
    rng = np.random.default_rng(seed)
    prob_WFC = np.zeros((len(start_W), FRAMES, 7))
    class_CL = SPEAKERS_CL.astype(bool)
    for prob_FC, start in zip(prob_WFC, start_W):
        order = rng.permutation(3)
        active_FL = active_TL[start : start + FRAMES, order]
        is_local_FCL = active_FL[:, None] == class_CL
        is_class_FC = is_local_FCL.all(axis=2)
        prob_FC[is_class_FC] = 1.0
    return LocalSpeakers(prob_WFC, start_W)


def embedded(turns, seconds, num_speakers=3, overlap=()):
    """Regions, windows and cosines that agree with the turns (start, end, speaker)."""
    regions = [(0.0, seconds)]
    windows = cut_windows(regions)
    cosine_NK = np.zeros((len(windows), num_speakers))
    for row, (low, high) in zip(cosine_NK, windows):
        for start, end, speaker in [*turns, *overlap]:
            common = min(end, high) - max(start, low)
            share = max(common, 0.0) / (high - low)
            # the second speaker of an overlap is weaker in the embedding
            is_turn = (start, end, speaker) in turns
            row[speaker] += share if is_turn else share / 4
    return regions, windows, cosine_NK


def test_classes_are_sets_of_at_most_two_speakers():
    sets = [set(np.flatnonzero(row)) for row in SPEAKERS_CL]
    alone = [{0}, {1}, {2}]
    pairs = [{0, 1}, {0, 2}, {1, 2}]
    assert sets == [set(), *alone, *pairs]


def test_speech_is_where_anybody_speaks():
    turns = [
        (1.0, 4.0, 1),
        (4.1, 9.0, BOTH),
        (20.0, 24.0, 2),
    ]
    local = local_speakers(*turns, seconds=25.0)
    # a pause of 0.1 s is part of the speech
    expected = [(1.0, 9.0), (20.0, 24.0)]
    np.testing.assert_allclose(local.speech(), expected, atol=0.04)

    silent = local_speakers(seconds=25.0)
    assert silent.speech() == []


@pytest.mark.parametrize("seed", range(4))
def test_permuted_local_speakers_are_one_second_speaker(seed):
    turns = [
        (0.0, 8.0, 0),
        (8.0, 16.0, 1),
        (16.0, 30.0, 2),
    ]
    overlap = [
        (3.0, 5.0, 2),
        (10.0, 11.0, 0),
        (18.0, 19.0, 1),
        (26.0, 27.5, 0),
    ]
    local = local_speakers(*turns, *overlap, seconds=30.0, seed=seed)
    regions, windows, cosine_NK = embedded(turns, 30.0, overlap=overlap)
    single = find_segments(regions, windows, cosine_NK)
    segments = add_overlap(single, windows, cosine_NK, local)

    expected = sorted(turns + overlap)
    speakers = [f"speaker{number + 1}" for _, _, number in expected]
    assert [segment.speaker for segment in segments] == speakers
    bounds = [segment[:2] for segment in segments]
    expected_bounds = [turn[:2] for turn in expected]
    np.testing.assert_allclose(bounds, expected_bounds, atol=0.05)
    for segment in segments:
        if segment.end - segment.start < 3:
            assert 0.9 < segment.confidence <= 1.0


def test_overlap_around_a_change_lengthens_both_turns():
    regions, windows, cosine_NK = embedded(
        [(0.0, 8.0, 0), (8.0, 16.0, 1)],
        16.0,
        num_speakers=2,
    )
    local = local_speakers(
        (0.0, 9.0, 0),
        (7.0, 16.0, 1),
        seconds=16.0,
    )
    single = find_segments(regions, windows, cosine_NK)
    first, second = add_overlap(single, windows, cosine_NK, local)
    assert first.speaker == "speaker1"
    np.testing.assert_allclose(first[:2], (0.0, 9.0), atol=0.05)
    assert second.speaker == "speaker2"
    np.testing.assert_allclose(second[:2], (7.0, 16.0), atol=0.05)


def test_without_overlap_the_turns_stay():
    turns = [
        (0.0, 8.0, 0),
        (8.0, 16.0, 1),
        (16.0, 30.0, 2),
    ]
    regions, windows, cosine_NK = embedded(turns, 30.0)
    segments = find_segments(regions, windows, cosine_NK)
    local = local_speakers(*turns, seconds=30.0)
    assert add_overlap(segments, windows, cosine_NK, local) == segments


def test_one_speaker_has_no_second():
    turns = [(0.0, 12.0, 0)]
    regions, windows, cosine_NK = embedded(turns, 12.0, num_speakers=1)
    segments = find_segments(regions, windows, cosine_NK)
    local = local_speakers((0.0, 12.0, BOTH), seconds=12.0)
    assert add_overlap(segments, windows, cosine_NK, local) == segments


def test_overlap_outside_the_turns_is_left_out():
    regions = [(1.0, 2.003), (4.0, 5.0)]
    windows = list(regions)
    cosine_NK = np.eye(2)
    turns = [
        (0.0, 1.5, 0),
        (1.5, 4.5, BOTH),
        (4.5, 9.0, 1),
    ]
    local = local_speakers(*turns, seconds=5.0)
    single = find_segments(regions, windows, cosine_NK)
    segments = add_overlap(single, windows, cosine_NK, local)

    bounds = sorted(segment[:2] for segment in segments)
    expected = [
        (1.0, 2.003),
        (1.5, 2.003),
        (4.0, 4.5),
        (4.0, 5.0),
    ]
    np.testing.assert_allclose(bounds, expected, atol=FIRST_SECONDS + 0.02)
    assert set(bounds) > set(regions)
