"""Turns from windows: bounds between speakers, gaps, confidence."""

import numpy as np
import pytest
from conversations import converse

from speakerlab.diarization.clustering import cluster
from speakerlab.diarization.resegmentation import FRAME_SECONDS, find_segments
from speakerlab.diarization.spectral import Spectral
from speakerlab.diarization.windows import cut_windows


def test_a_change_lies_between_the_middles_of_two_windows():
    regions = [(2.0, 5.0)]
    windows = cut_windows(regions)  # from 2.0, 2.75, 3.5
    cosine_NK = np.array([[0.8, 0.0], [0.4, 0.4], [0.0, 0.8]])
    first, second = find_segments(regions, windows, cosine_NK)
    assert (first.start, first.speaker) == (2.0, "speaker1")
    assert (second.end, second.speaker) == (5.0, "speaker2")
    assert first.end == second.start == pytest.approx(3.5, abs=FRAME_SECONDS)
    assert first.confidence == pytest.approx(second.confidence)


def test_every_moment_of_speech_has_one_speaker_and_regions_are_kept_apart():
    regions = [(0.0, 1.003), (1.503, 9.0)]
    windows = cut_windows(regions)
    cosine_NK = np.random.default_rng(0).uniform(size=(len(windows), 3))
    found = find_segments(regions, windows, cosine_NK)
    assert (found[0].start, found[0].end) == (0.0, 1.003)
    assert (found[1].start, found[-1].end) == (1.503, 9.0)
    for left, right in zip(found[1:], found[2:]):
        assert left.end == right.start
        assert left.speaker != right.speaker
    assert all(0 <= segment.confidence <= 1 for segment in found)


def test_missing_windows():
    regions = [(0.0, 6.0), (7.0, 8.0)]
    windows = [(0.0, 1.5), (4.5, 6.0)]
    found = find_segments(regions, windows, np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert found == [(0.0, 3.0, "speaker1", 1.0), (3.0, 6.0, "speaker2", 1.0)]
    assert find_segments(regions, [], np.zeros((0, 1))) == []


def test_one_speaker_is_certain():
    found = find_segments([(0.0, 4.0)], cut_windows([(0.0, 4.0)]), np.full((5, 1), 0.3))
    assert found == [(0.0, 4.0, "speaker1", 1.0)]


def test_turns_are_more_exact_than_windows():
    talk = converse(4, 3)
    cosine_NK = cluster(talk.emb_ND, Spectral()).cosine_NK
    found = find_segments(talk.regions, talk.windows, cosine_NK)
    seconds_KK = np.zeros((3, 3))
    for segment in found:
        for start, end, name in talk.turns:
            overlap = max(min(segment.end, end) - max(segment.start, start), 0.0)
            seconds_KK[int(name), int(segment.speaker[-1]) - 1] += overlap
    assert seconds_KK.max(axis=1).sum() / seconds_KK.sum() > 0.97
