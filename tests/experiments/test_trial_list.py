"""Enrolment models by hand."""

import numpy as np
from refusals import refuses

from speakerlab.experiments.trial_list import average_models, speaker_of_models
from speakerlab.scoring.embeddings import EmbeddingTable

TABLE = EmbeddingTable(["u", "v", "w"], np.array([[1, 2], [3, 6], [5, 0]], np.float32), "sha")


def test_what_is_missing_is_named():
    with refuses("enrolment", "x"):
        average_models(TABLE, {"m": ["u", "x"]})


def test_a_model_is_one_speaker():
    spoken_by = {"u": "a", "v": "a", "w": "b"}
    assert speaker_of_models({"m": ["u", "v"], "n": ["w"]}, spoken_by, where="x") == {
        "m": "a",
        "n": "b",
    }
    for names, got in ((["u", "w"], "a, b"), ([], "no utterance")):
        with refuses("enroll.map", "m", got):
            speaker_of_models({"m": names}, spoken_by, where="enroll.map")
