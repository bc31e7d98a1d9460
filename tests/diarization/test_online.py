"""Speakers of a stream: windows of drawn conversations, one by one, and what a window changes."""

import numpy as np
from conversations import agreement, converse

from speakerlab.diarization.clustering import cluster, unit_rows
from speakerlab.diarization.local_speakers import MIN_ALONE_FRAMES, Tracks
from speakerlab.diarization.online import MAX_WAIT, OnlineSpeakers
from speakerlab.diarization.spectral import Spectral

AXES = np.eye(8)


def direction(degrees: float) -> np.ndarray:
    """Return a direction between the first two axes."""
    angle = np.radians(degrees)
    return np.cos(angle) * AXES[0] + np.sin(angle) * AXES[1]


def hear(emb_ND: np.ndarray, **options) -> tuple[OnlineSpeakers, np.ndarray]:
    """Add all windows; return the speakers, and the nearest one of each window when it came."""
    settings = {"threshold": 0.5, "max_speakers": 20, **options}
    speakers = OnlineSpeakers(**settings)
    nearest = []
    for unit_D in unit_rows(emb_ND):
        speakers.add(unit_D)
        cosine_K = speakers.direction_KD @ unit_D
        nearest.append(speakers.numbers[int(cosine_K.argmax())])
    return speakers, np.array(nearest)


def test_windows_of_conversations_get_their_speaker_at_once():
    """Nearly as many as clustering finds that has heard the whole conversation."""
    for seed in range(4):
        for num_speakers in (2, 4):
            talk = converse(seed, num_speakers)
            speakers, nearest_N = hear(talk.emb_ND)
            clusters = cluster(talk.emb_ND, Spectral())
            offline = agreement(clusters.speaker_N, talk.speaker_N)
            assert offline > 0.9
            assert agreement(nearest_N, talk.speaker_N) > offline - 0.05
            assert abs(len(speakers.numbers) - num_speakers) <= 1


def test_a_single_window_is_no_speaker():
    speakers = OnlineSpeakers(threshold=0.5, max_speakers=20)
    assert speakers.add(AXES[0]) == 0
    # Two windows that resemble neither the speaker nor each other.
    assert speakers.add(AXES[1]) is None
    assert speakers.add(AXES[2]) is None
    assert speakers.numbers == [0]
    # A second one of its voice: both are the new speaker's.
    assert speakers.add(AXES[1]) == 1
    np.testing.assert_allclose(speakers.direction_D(1), AXES[1])


def test_a_window_below_the_threshold_changes_no_speaker():
    speakers = OnlineSpeakers(threshold=0.75, max_speakers=20)
    speakers.add(AXES[0])
    assert speakers.add(direction(45)) == 0
    np.testing.assert_array_equal(speakers.direction_D(0), AXES[0])


def test_a_window_waits_for_a_bounded_number_of_others():
    for num_between, number in ((MAX_WAIT - 1, 1), (MAX_WAIT, None)):
        speakers = OnlineSpeakers(threshold=0.5, max_speakers=20)
        speakers.add(AXES[0])
        speakers.add(AXES[1])
        for _ in range(num_between):
            assert speakers.add(AXES[0]) == 0
        assert speakers.add(AXES[1]) == number


def test_two_speakers_of_one_voice_become_the_first():
    speakers = OnlineSpeakers(threshold=0.6, max_speakers=20)
    for degrees in (0, 90, 90):
        speakers.add(direction(degrees))
    assert speakers.numbers == [0, 1]
    # The second one comes nearer to the first, until both are one voice.
    for degrees in range(70, 20, -5):
        for _ in range(30):
            number = speakers.add(direction(degrees))
    assert number == 0
    assert speakers.numbers == [0]
    assert speakers.remaining(1) == 0
    np.testing.assert_array_equal(speakers.direction_D(1), speakers.direction_D(0))
    # Its number is not used again.
    for _ in range(2):
        number = speakers.add(AXES[5])
    assert number == 2


def test_more_speakers_than_allowed_are_the_nearest():
    speakers = OnlineSpeakers(threshold=0.5, max_speakers=1)
    speakers.add(AXES[0])
    for _ in range(5):
        assert speakers.add(AXES[1]) is None
    assert speakers.numbers == [0]
    np.testing.assert_array_equal(speakers.direction_KD, AXES[:1])


def tracks(*units: np.ndarray, alone: float = 50.0) -> Tracks:
    """Return the local speakers of one window."""
    num_tracks = len(units)
    return Tracks(
        window_M=np.zeros(num_tracks, dtype=np.int64),
        local_M=np.arange(num_tracks),
        unit_MD=np.stack(units),
        spoken_M=np.full(num_tracks, 100.0),
        alone_M=np.full(num_tracks, alone),
    )


# A window with a first speaker at 0 degrees and another voice. Alone, a voice at 55 degrees would
# belong to the first speaker (cosine 0.57), one at 40 degrees even more so (0.77).
BOTH = tracks(direction(5), direction(55))


def one_speaker(*, max_speakers: int = 20) -> OnlineSpeakers:
    speakers = OnlineSpeakers(threshold=0.5, max_speakers=max_speakers)
    speakers.add(direction(0))
    return speakers


def test_two_local_speakers_of_a_window_are_two_speakers():
    speakers = one_speaker()
    assert speakers.tell_apart(BOTH) == [1]
    np.testing.assert_allclose(speakers.direction_KD, [direction(0), direction(55)])
    # Now the two have different speakers.
    assert speakers.tell_apart(BOTH) == []


def test_local_speakers_with_too_little_speech_alone_do_not_count():
    speakers = one_speaker()
    short = tracks(direction(5), direction(55), alone=MIN_ALONE_FRAMES - 1)
    assert speakers.tell_apart(short) == []
    # A single one may be of any speaker.
    assert speakers.tell_apart(tracks(direction(55))) == []
    assert speakers.numbers == [0]


def test_a_voice_that_the_segmentation_model_has_divided_is_one_speaker():
    divided = tracks(direction(5), direction(40))
    assert one_speaker().tell_apart(divided) == []


def test_local_speakers_add_no_speaker_beyond_the_maximum():
    assert one_speaker(max_speakers=1).tell_apart(BOTH) == []


def test_local_speakers_add_nobody_before_the_first_embedding():
    speakers = OnlineSpeakers(threshold=0.5, max_speakers=2)
    assert speakers.tell_apart(BOTH) == []
