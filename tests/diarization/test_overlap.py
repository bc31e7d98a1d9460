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

FRAMES, STEP = 589, 148
NOBODY, BOTH = 0, (0, 1)


def local_speakers(*turns: tuple[float, float, object], seconds: float, seed: int = 0):
    """Windows whose local speakers are permuted, of turns of speakers 0 to 2, or of two of them."""
    num_frames = max(round(seconds / FRAME_SECONDS), FRAMES)
    active_TL = np.zeros((num_frames, 3), dtype=bool)
    for start, end, speakers in turns:
        frames = slice(round(start / FRAME_SECONDS), round(end / FRAME_SECONDS))
        active_TL[frames, np.atleast_1d(speakers)] = True
    last = num_frames - FRAMES
    start_W = np.array([*range(0, last, STEP), last])
    rng = np.random.default_rng(seed)
    prob_WFC = np.zeros((len(start_W), FRAMES, 7))
    for prob_FC, start in zip(prob_WFC, start_W):
        active_FL = active_TL[start : start + FRAMES, rng.permutation(3)]
        prob_FC[(active_FL[:, None] == SPEAKERS_CL.astype(bool)).all(axis=2)] = 1.0
    return LocalSpeakers(prob_WFC, start_W)


def found(turns, seconds, num_speakers=3, overlap=()):
    """Regions, windows and cosines that agree with the turns (start, end, speaker)."""
    regions = [(0.0, seconds)]
    windows = cut_windows(regions)
    cosine_NK = np.zeros((len(windows), num_speakers))
    for row, (low, high) in zip(cosine_NK, windows):
        for start, end, speaker in [*turns, *overlap]:
            share = max(min(end, high) - max(start, low), 0.0) / (high - low)
            row[speaker] += share if (start, end, speaker) in turns else share / 4
    return regions, windows, cosine_NK


def test_classes_are_sets_of_at_most_two_speakers():
    sets = [frozenset(np.flatnonzero(row)) for row in SPEAKERS_CL]
    assert sets == [frozenset(s) for s in ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))]


def test_speech_is_where_anybody_speaks():
    local = local_speakers((1.0, 4.0, 1), (4.1, 9.0, BOTH), (20.0, 24.0, 2), seconds=25.0)
    regions = local.speech()  # a pause of 0.1 s is part of the speech
    np.testing.assert_allclose(regions, [(1.0, 9.0), (20.0, 24.0)], atol=0.04)
    assert local_speakers(seconds=25.0).speech() == []


@pytest.mark.parametrize("seed", range(4))
def test_permuted_local_speakers_are_one_second_speaker(seed):
    turns = [(0.0, 8.0, 0), (8.0, 16.0, 1), (16.0, 30.0, 2)]
    overlap = [(3.0, 5.0, 2), (10.0, 11.0, 0), (18.0, 19.0, 1), (26.0, 27.5, 0)]
    local = local_speakers(*turns, *overlap, seconds=30.0, seed=seed)
    regions, windows, cosine_NK = found(turns, 30.0, overlap=overlap)
    segments = add_overlap(find_segments(regions, windows, cosine_NK), windows, cosine_NK, local)
    wanted = sorted((a, b, f"speaker{k + 1}") for a, b, k in turns + overlap)
    assert [segment.speaker for segment in segments] == [name for *_, name in wanted]
    bounds = [segment[:2] for segment in segments]
    np.testing.assert_allclose(bounds, [turn[:2] for turn in wanted], atol=0.05)
    assert all(0.9 < s.confidence <= 1.0 for s in segments if s.end - s.start < 3)


def test_overlap_around_a_change_lengthens_both_turns():
    regions, windows, cosine_NK = found([(0.0, 8.0, 0), (8.0, 16.0, 1)], 16.0, num_speakers=2)
    local = local_speakers((0.0, 9.0, 0), (7.0, 16.0, 1), seconds=16.0)
    first, second = add_overlap(
        find_segments(regions, windows, cosine_NK), windows, cosine_NK, local
    )
    np.testing.assert_allclose(first[:2], (0.0, 9.0), atol=0.05)
    np.testing.assert_allclose(second[:2], (7.0, 16.0), atol=0.05)
    assert (first.speaker, second.speaker) == ("speaker1", "speaker2")


def test_without_overlap_the_turns_stay():
    turns = [(0.0, 8.0, 0), (8.0, 16.0, 1), (16.0, 30.0, 2)]
    regions, windows, cosine_NK = found(turns, 30.0)
    segments = find_segments(regions, windows, cosine_NK)
    local = local_speakers(*turns, seconds=30.0)
    assert add_overlap(segments, windows, cosine_NK, local) == segments


def test_one_speaker_has_no_second():
    regions, windows, cosine_NK = found([(0.0, 12.0, 0)], 12.0, num_speakers=1)
    segments = find_segments(regions, windows, cosine_NK)
    local = local_speakers((0.0, 12.0, BOTH), seconds=12.0)
    assert add_overlap(segments, windows, cosine_NK, local) == segments


def test_overlap_outside_the_turns_is_left_out():
    regions, windows = [(1.0, 2.003), (4.0, 5.0)], [(1.0, 2.003), (4.0, 5.0)]
    cosine_NK = np.array([[1.0, 0.0], [0.0, 1.0]])
    local = local_speakers((0.0, 1.5, 0), (1.5, 4.5, BOTH), (4.5, 9.0, 1), seconds=5.0)
    segments = add_overlap(find_segments(regions, windows, cosine_NK), windows, cosine_NK, local)
    bounds = [(1.0, 2.003), (1.5, 2.003), (4.0, 4.5), (4.0, 5.0)]
    np.testing.assert_allclose(sorted(s[:2] for s in segments), bounds, atol=FIRST_SECONDS + 0.02)
    assert {(s.start, s.end) for s in segments} > set(regions)
