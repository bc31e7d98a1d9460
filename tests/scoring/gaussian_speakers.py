"""Embeddings of made-up speakers whose covariances are known.

Letters: S speakers, N utterances, D dimensions.
"""

import numpy as np

from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.transforms import Development
from speakerlab.scoring.trials import Trials

MODEL = "ab" * 32


def covariances(dim, seed=0):
    """Two symmetric positive definite matrices."""
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(2, dim, dim)) / np.sqrt(dim) + np.eye(dim) * [[[1.0]], [[0.7]]]
    return roots[0] @ roots[0].T, roots[1] @ roots[1].T


def draw(num_speakers, per_speaker, dim, *, seed=0, mean=0.0, name="s"):
    """Development: `per_speaker` utterances of each; a number or one number a speaker."""
    between, within = covariances(dim)
    rng = np.random.default_rng([seed, 1])
    voice_SD = rng.multivariate_normal(np.full(dim, mean), between, num_speakers)
    who_N = np.repeat(np.arange(num_speakers), per_speaker)
    emb_ND = voice_SD[who_N] + rng.multivariate_normal(np.zeros(dim), within, len(who_N))
    ids = [f"{name}{speaker}-{i}" for i, speaker in enumerate(who_N)]
    table = EmbeddingTable(ids, emb_ND.astype(np.float32), MODEL)
    return Development(table, [f"{name}{speaker}" for speaker in who_N])


def all_pairs(enrol, test):
    """Every utterance of one set with every one of another."""
    num_enrol, num_test = len(enrol.table.ids), len(test.table.ids)
    enrol_N = np.repeat(np.arange(num_enrol, dtype=np.int32), num_test)
    test_N = np.tile(np.arange(num_test, dtype=np.int32), num_enrol)
    same_N = np.asarray(enrol.speaker_M)[enrol_N] == np.asarray(test.speaker_M)[test_N]
    return Trials(enrol.table.ids, test.table.ids, enrol_N, test_N, same_N)
