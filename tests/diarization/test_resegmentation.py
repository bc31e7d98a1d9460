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
    # from 2.0, 2.75, 3.5
    windows = cut_windows(regions)
    cosine_NK = np.array(
        [
            [0.8, 0.0],
            [0.4, 0.4],
            [0.0, 0.8],
        ]
    )
    first, second = find_segments(regions, windows, cosine_NK)
    assert first.speaker == "speaker1"
    assert first.start == 2.0
    assert first.end == pytest.approx(3.5, abs=FRAME_SECONDS)
    assert second.speaker == "speaker2"
    assert second.start == first.end
    assert second.end == 5.0
    assert first.confidence == pytest.approx(second.confidence)


def test_every_moment_of_speech_has_one_speaker_and_regions_are_kept_apart():
    regions = [(0.0, 1.003), (1.503, 9.0)]
    windows = cut_windows(regions)
    rng = np.random.default_rng(0)
    cosine_NK = rng.uniform(size=(len(windows), 3))
    segments = find_segments(regions, windows, cosine_NK)
    first, *others = segments
    assert first[:2] == (0.0, 1.003)
    assert others[0].start == 1.503
    assert others[-1].end == 9.0
    for segment, following in zip(others, others[1:]):
        assert segment.end == following.start
        assert segment.speaker != following.speaker
    for segment in segments:
        assert 0 <= segment.confidence <= 1


def test_missing_windows():
    regions = [(0.0, 6.0), (7.0, 8.0)]
    windows = [(0.0, 1.5), (4.5, 6.0)]
    cosine_NK = np.eye(2)
    segments = find_segments(regions, windows, cosine_NK)
    assert segments == [
        (0.0, 3.0, "speaker1", 1.0),
        (3.0, 6.0, "speaker2", 1.0),
    ]
    no_cosine_NK = np.zeros((0, 1))
    assert find_segments(regions, [], no_cosine_NK) == []


def test_one_speaker_is_certain():
    regions = [(0.0, 4.0)]
    cosine_NK = np.full((5, 1), 0.3)
    (segment,) = find_segments(regions, cut_windows(regions), cosine_NK)
    assert segment == (0.0, 4.0, "speaker1", 1.0)


def test_turns_are_more_exact_than_windows():
    talk = converse(4, 3)
    label_N = cluster(talk.emb_ND, Spectral())
    segments = find_segments(
        talk.regions,
        talk.windows,
        label_N.cosine_NK,
    )
    seconds_KK = np.zeros((3, 3))
    for segment in segments:
        for start, end, name in talk.turns:
            first = max(segment.start, start)
            overlap = min(segment.end, end) - first
            label = int(segment.speaker[-1]) - 1
            seconds_KK[int(name), label] += max(overlap, 0.0)
    right_seconds = seconds_KK.max(axis=1).sum()
    assert right_seconds / seconds_KK.sum() > 0.97
