"""Enrolment models by hand."""

import numpy as np
from refusals import refuses

from speakerlab.experiments.trial_list import average_models, speaker_of_models
from speakerlab.scoring.embeddings import EmbeddingTable

TABLE = EmbeddingTable(
    ["u", "v", "w"],
    np.array([[1, 2], [3, 6], [5, 0]], np.float32),
    "sha",
)


def test_what_is_missing_is_named():
    with refuses("enrolment", "x"):
        models = {"m": ["u", "x"]}
        average_models(TABLE, models)


def test_a_model_is_one_speaker():
    spoken_by = {"u": "a", "v": "a", "w": "b"}
    models = {"m": ["u", "v"], "n": ["w"]}
    speakers = speaker_of_models(models, spoken_by, where="x")
    assert speakers == {"m": "a", "n": "b"}

    two_speakers = {"m": ["u", "w"]}
    with refuses("enroll.map", "m", "a, b"):
        speaker_of_models(two_speakers, spoken_by, where="enroll.map")
    nobody = {"m": []}
    with refuses("enroll.map", "m", "no utterance"):
        speaker_of_models(nobody, spoken_by, where="enroll.map")
