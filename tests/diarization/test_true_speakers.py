"""The truth in place of the clustering: which errors remain are those of the segmentation model."""

import numpy as np
import pytest
from test_local_speakers import local_speakers, windows_of
from true_speakers import find_true_speakers

from speakerlab.diarization.regions import Turn
from speakerlab.diarization.scoring import score
from speakerlab.inference.speech_windows import SpeechWindows

SECONDS = 40.0
# Start, end and speakers; between 21 and 24 s, two speak at once.
TURNS = [
    (1.0, 9.0, 0),
    (10.0, 21.0, 1),
    (21.0, 24.0, (1, 2)),
    (24.0, 38.0, 2),
]
REFERENCE = [
    Turn(1.0, 9.0, "ann"),
    Turn(10.0, 24.0, "ben"),
    Turn(21.0, 38.0, "cy"),
]


def speech_of(emb_ND=None) -> SpeechWindows:
    local = local_speakers(*TURNS, seconds=SECONDS)
    regions, windows, share_NK = windows_of(TURNS, SECONDS, regions=local.speech())
    if emb_ND is None:
        emb_ND = share_NK + 1e-3
    return SpeechWindows(SECONDS, regions, windows, emb_ND, local)


def test_a_perfect_segmentation_has_no_errors():
    turns = find_true_speakers(speech_of(), REFERENCE)
    errors = score(REFERENCE, turns, regions=[(0.0, SECONDS)])
    assert errors.der == pytest.approx(0, abs=0.01)
    assert errors.num_found == 3


def test_embeddings_that_cannot_tell_speakers_apart_do_little_harm():
    num_windows = len(speech_of().windows)
    equal_ND = np.ones((num_windows, 3))
    turns = find_true_speakers(speech_of(equal_ND), REFERENCE)
    errors = score(REFERENCE, turns, regions=[(0.0, SECONDS)])
    assert errors.der == pytest.approx(0, abs=0.01)


def test_a_speaker_whom_no_local_speaker_matches_is_left_out():
    # Dan speaks where the segmentation model hears nobody.
    with_dan = [*REFERENCE, Turn(38.5, 39.5, "dan")]
    turns = find_true_speakers(speech_of(), with_dan)
    assert len({turn.speaker for turn in turns}) == 3
    errors = score(with_dan, turns, regions=[(0.0, SECONDS)])
    assert errors.missed == pytest.approx(1.0, abs=0.1)


def test_without_speech_or_truth_nobody_speaks():
    assert find_true_speakers(speech_of(), []) == []
    silent = speech_of()._replace(windows=[], emb_ND=np.zeros((0, 3)))
    assert find_true_speakers(silent, REFERENCE) == []
