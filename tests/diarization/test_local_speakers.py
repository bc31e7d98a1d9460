"""Local speakers of windows: their embeddings, how many people they are, and who speaks when."""

import numpy as np
import pytest
from conversations import embed

from speakerlab.diarization.ahc import Ahc
from speakerlab.diarization.clustering import cluster, unit_rows
from speakerlab.diarization.local_speakers import (
    FIRST_SECONDS,
    FRAME_SECONDS,
    SPEAKERS_CL,
    LocalSpeakers,
    cluster_tracks,
    find_activity,
    find_tracks,
    match_tracks,
)
from speakerlab.diarization.resegmentation import find_segments
from speakerlab.diarization.spectral import Spectral
from speakerlab.diarization.windows import cut_windows

FRAMES = 589
STEP = 148
BOTH = (0, 1)
BOUNDS = {"min_speakers": 1, "max_speakers": 20}


def local_speakers(
    *turns: tuple[float, float, int | tuple[int, ...]],
    seconds: float,
    seed: int = 0,
):
    """Windows whose local speakers are permuted, of turns of speakers 0 to 2, or of two of them."""
    num_frames = max(round(seconds / FRAME_SECONDS), FRAMES)
    active_TL = np.zeros((num_frames, 3), dtype=bool)
    for start, end, speakers in turns:
        first_frame = round((start - FIRST_SECONDS) / FRAME_SECONDS)
        end_frame = round((end - FIRST_SECONDS) / FRAME_SECONDS)
        frames = slice(max(first_frame, 0), end_frame)
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


def windows_of(turns, seconds, num_speakers=3, regions=None):
    """Regions, windows, and share_NK: how much of each window each speaker speaks."""
    if regions is None:
        regions = [(0.0, seconds)]
    windows = cut_windows(regions)
    share_NK = np.zeros((len(windows), num_speakers))
    for row, (low, high) in zip(share_NK, windows):
        for start, end, speakers in turns:
            common_seconds = min(end, high) - max(start, low)
            row[np.atleast_1d(speakers)] += max(common_seconds, 0.0)
    total_N1 = share_NK.sum(axis=1, keepdims=True)
    share_NK /= np.maximum(total_N1, 1e-9)
    return regions, windows, share_NK


def diarized(turns, seconds, *, seed=0, num_speakers=3, emb_ND=None, **bounds):
    """Turns of a recording with such local speakers; by default, each voice is an axis."""
    regions, windows, share_NK = windows_of(turns, seconds, num_speakers)
    if emb_ND is None:
        emb_ND = share_NK + 1e-3
    local = local_speakers(*turns, seconds=seconds, seed=seed)
    tracks = find_tracks(local, windows, emb_ND)
    clusters = cluster_tracks(emb_ND, tracks, Spectral(), **(BOUNDS | bounds))
    speaker_M = match_tracks(clusters.centre_KD, tracks)
    num_found = len(clusters.centre_KD)
    activity = find_activity(local, tracks, speaker_M, num_found)
    return find_segments(regions, windows, clusters.cosine_NK, activity)


def test_classes_are_sets_of_at_most_two_speakers():
    sets = [set(np.flatnonzero(row)) for row in SPEAKERS_CL]
    expected = [
        set(),
        {0},
        {1},
        {2},
        {0, 1},
        {0, 2},
        {1, 2},
    ]
    assert sets == expected


def test_speech_is_where_anybody_speaks():
    turns = [
        (1.0, 4.0, 1),
        (4.1, 9.0, BOTH),
        (20.0, 24.0, 2),
    ]
    local = local_speakers(*turns, seconds=25.0)
    # a pause of 0.1 s is part of the speech
    expected = [(1.0, 9.0), (20.0, 24.0)]
    np.testing.assert_allclose(local.speech(), expected, atol=0.02)

    silent = local_speakers(seconds=25.0)
    assert silent.speech() == []


@pytest.mark.parametrize("seed", range(4))
def test_tracks_have_the_voice_of_their_speaker(seed):
    turns = [(0.0, 7.4, 0), (5.4, 16.0, 1), (16.0, 30.0, 2)]
    _, windows, share_NK = windows_of(turns, 30.0)
    rng = np.random.default_rng(seed)
    voice_KD = rng.normal(size=(3, 64))
    local = local_speakers(*turns, seconds=30.0, seed=seed)
    tracks = find_tracks(local, windows, share_NK @ voice_KD)

    cosine_MK = tracks.unit_MD @ unit_rows(voice_KD).T
    nearest_M = cosine_MK.argmax(axis=1)
    highest_M = cosine_MK.max(axis=1)
    assert (highest_M > 0.9).all()
    # Windows of the model start every 2.5 s; the last one ends with the recording.
    rows_by_window = tracks.rows_by_window()
    speakers_by_window = [nearest_M[rows].tolist() for rows in rows_by_window]
    sorted_speakers = [sorted(speakers) for speakers in speakers_by_window]
    assert sorted_speakers == [
        *[[0, 1]] * 3,  # from 0, 2.5 and 5 s
        *[[1, 2]] * 4,  # from 7.5 s, after the end of the first speaker, to 15 s
        *[[2]] * 3,  # from 17.5, 20 and 20.1 s
    ]

    # In the first window, from 0 to 10 s: 5.4 s and 2.6 s alone, 2 s together.
    first_rows = rows_by_window[0]
    speakers = speakers_by_window[0]
    spoken_seconds = tracks.spoken_M[first_rows] * FRAME_SECONDS
    alone_seconds = tracks.alone_M[first_rows] * FRAME_SECONDS
    spoken = dict(zip(speakers, spoken_seconds))
    alone = dict(zip(speakers, alone_seconds))
    assert spoken == pytest.approx({0: 7.4, 1: 4.6}, abs=0.1)
    assert alone == pytest.approx({0: 5.4, 1: 2.6}, abs=0.1)


def two_similar_voices(turns, seconds):
    """Windows of two voices with a cosine of 0.9: alone, they would be one."""
    _, windows, share_NK = windows_of(turns, seconds, num_speakers=2)
    voice_KD = np.array([[1.0, 0.0], [0.9, np.sqrt(1 - 0.9**2)]])
    return windows, share_NK @ voice_KD


@pytest.mark.parametrize("method", [Spectral(), Ahc(threshold=0.4)])
def test_two_speakers_of_one_window_are_never_merged(method):
    turns = [(0.0, 12.0, 0), (10.0, 20.0, 1)]
    windows, emb_ND = two_similar_voices(turns, 20.0)
    merged = cluster(emb_ND, Ahc(threshold=0.4))
    assert len(merged.centre_KD) == 1

    local = local_speakers(*turns, seconds=20.0)
    tracks = find_tracks(local, windows, emb_ND)
    clusters = cluster_tracks(emb_ND, tracks, method, **BOUNDS)
    assert len(clusters.centre_KD) == 2
    speaker_M = match_tracks(clusters.centre_KD, tracks)
    # The windows from 5 and from 7.5 s have more than 0.5 s of each alone.
    pairs_P2 = tracks.pairs()
    assert len(pairs_P2) == 2
    for speakers in speaker_M[pairs_P2].tolist():
        assert sorted(speakers) == [0, 1]

    # The user's number has priority.
    one = cluster_tracks(emb_ND, tracks, method, min_speakers=1, max_speakers=1)
    assert len(one.centre_KD) == 1
    assert set(match_tracks(one.centre_KD, tracks)) == {0}


def test_local_speakers_who_take_turns_add_nobody():
    # Without a window that has both, nothing says that similar voices differ.
    turns = [(0.0, 10.0, 0), (30.0, 40.0, 1)]
    windows, emb_ND = two_similar_voices(turns, 40.0)
    rows_of_speech = []
    for row, (start, end) in enumerate(windows):
        if end <= 10 or start >= 30:
            rows_of_speech.append(row)
    windows = [windows[row] for row in rows_of_speech]
    emb_ND = emb_ND[rows_of_speech]
    local = local_speakers(*turns, seconds=40.0)
    tracks = find_tracks(local, windows, emb_ND)
    assert len(tracks.pairs()) == 0
    clusters = cluster_tracks(emb_ND, tracks, Ahc(threshold=0.4), **BOUNDS)
    assert len(clusters.centre_KD) == 1


@pytest.mark.parametrize("seed", range(4))
def test_permuted_local_speakers_are_one_speaker_each(seed):
    turns = [
        (0.0, 8.0, 0),
        (3.0, 5.0, 2),
        (8.0, 16.0, 1),
        (10.0, 11.0, 0),
        (16.0, 30.0, 2),
        (18.0, 19.0, 1),
        (26.0, 27.5, 0),
    ]
    segments = diarized(turns, 30.0, seed=seed, min_speakers=3)
    speakers = [f"speaker{turn[2] + 1}" for turn in turns]
    assert [segment.speaker for segment in segments] == speakers
    bounds = [segment[:2] for segment in segments]
    expected_bounds = [turn[:2] for turn in turns]
    np.testing.assert_allclose(bounds, expected_bounds, atol=0.05)
    for segment in segments:
        assert 0.5 < segment.confidence <= 1.0


def test_nobody_one_or_two_speak_in_a_frame():
    turns = [(0.0, 9.0, 0), (7.0, 16.0, 1)]
    first, second = diarized(turns, 16.0, num_speakers=2)
    assert first.speaker == "speaker1"
    np.testing.assert_allclose(first[:2], (0.0, 9.0), atol=0.05)
    assert second.speaker == "speaker2"
    np.testing.assert_allclose(second[:2], (7.0, 16.0), atol=0.05)


def test_regions_of_the_user_decide_where_anybody_speaks_to_the_millisecond():
    turns = [(0.0, 9.0, 0), (7.0, 16.0, 1)]
    regions = [(1.0, 2.003), (4.0, 12.005)]
    local = local_speakers(*turns, seconds=16.0)
    windows = cut_windows(regions)
    emb_ND = np.tile([1.0, 0.1], (len(windows), 1))
    tracks = find_tracks(local, windows, emb_ND)
    speaker_M = np.zeros_like(tracks.window_M)
    activity = find_activity(local, tracks, speaker_M, num_speakers=2)
    # No window is nearer to one of the two speakers.
    cosine_NK = np.zeros((len(windows), 2))
    segments = find_segments(regions, windows, cosine_NK, activity)
    starts = [segment.start for segment in segments]
    ends = [segment.end for segment in segments]
    assert min(starts) == 1.0
    assert 2.003 in ends
    assert 4.0 in starts
    assert max(ends) == 12.005


def test_a_second_speaker_whom_no_window_has_is_not_made_up():
    turns = [(0.0, 12.0, BOTH)]
    regions, windows, _ = windows_of(turns, 12.0)
    local = local_speakers(*turns, seconds=12.0)
    # Two clusters, but all tracks are of the first one.
    cosine_NK = np.tile([0.9, 0.1], (len(windows), 1))
    tracks = find_tracks(local, windows, emb_ND=cosine_NK)
    speaker_M = np.zeros_like(tracks.window_M)
    activity = find_activity(local, tracks, speaker_M, num_speakers=2)
    (segment,) = find_segments(regions, windows, cosine_NK, activity)
    assert segment[:3] == (0.0, 12.0, "speaker1")


def test_one_speaker_has_no_second():
    turns = [(0.0, 12.0, BOTH)]
    (segment,) = diarized(turns, 12.0, num_speakers=2, max_speakers=1)
    assert segment[:3] == (0.0, 12.0, "speaker1")
    assert segment.confidence == pytest.approx(1.0)


def test_more_local_speakers_than_speakers_go_to_the_nearest():
    turns = [(0.0, 3.0, 0), (3.0, 6.0, 1), (6.0, 9.0, 2)]
    _, _, share_NK = windows_of(turns, 9.0)
    # The third voice is nearly the first.
    voice_KD = np.array(
        [
            [1.0, 0.0, 0.0],
            [0.0, 1.0, 0.0],
            [0.9, 0.0, 0.1],
        ]
    )
    segments = diarized(
        turns,
        9.0,
        emb_ND=share_NK @ voice_KD,
        min_speakers=2,
        max_speakers=2,
    )
    speakers = [segment.speaker for segment in segments]
    assert speakers == ["speaker1", "speaker2", "speaker1"]
    bounds = [segment[:2] for segment in segments]
    expected_bounds = [turn[:2] for turn in turns]
    np.testing.assert_allclose(bounds, expected_bounds, atol=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_a_speaker_who_appears_once(seed):
    turns = [
        (0.0, 10.0, 0),
        (10.0, 18.0, 1),
        (18.0, 20.5, 2),
        (20.5, 32.0, 0),
        (32.0, 40.0, 1),
    ]
    _, _, share_NK = windows_of(turns, 40.0)
    emb_ND = embed(np.random.default_rng(seed), share_NK)
    segments = diarized(turns, 40.0, seed=seed, emb_ND=emb_ND)
    numbers = [segment.speaker for segment in segments]
    assert numbers == ["speaker1", "speaker2", "speaker3", "speaker1", "speaker2"]
    bounds = [segment[:2] for segment in segments]
    np.testing.assert_allclose(bounds, [turn[:2] for turn in turns], atol=0.1)


def test_a_recording_shorter_than_a_window():
    turns = [(0.0, 1.5, 0), (1.5, 4.0, 1)]
    first, second = diarized(turns, 4.0, num_speakers=2)
    assert first.speaker == "speaker1"
    np.testing.assert_allclose(first[:2], (0.0, 1.5), atol=0.05)
    assert second.speaker == "speaker2"
    assert second.end == 4.0


def test_silence_has_no_tracks():
    # Speech of the user's regions that the model does not hear.
    regions, windows, share_NK = windows_of([(0.0, 12.0, 0)], 12.0)
    silent = local_speakers(seconds=12.0)
    tracks = find_tracks(silent, windows, share_NK)
    assert len(tracks.window_M) == 0
    assert tracks.rows_by_window() == []
    clusters = cluster_tracks(share_NK, tracks, Spectral(), **BOUNDS)
    speaker_M = match_tracks(clusters.centre_KD, tracks)
    activity = find_activity(silent, tracks, speaker_M, 1)
    (segment,) = find_segments(regions, windows, clusters.cosine_NK, activity)
    assert segment == (0.0, 12.0, "speaker1", 0.5)
