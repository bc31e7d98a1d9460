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
    noise = rng.normal(size=(2, dim, dim))
    # near to diagonal matrices, with a larger variance between speakers than within
    scale = [[[1.0]], [[0.7]]]
    roots = noise / np.sqrt(dim) + np.eye(dim) * scale
    between_root, within_root = roots
    return between_root @ between_root.T, within_root @ within_root.T


def draw(num_speakers, per_speaker, dim, *, seed=0, mean=0.0, name="s"):
    """Development: `per_speaker` utterances of each; a number or one number a speaker."""
    between, within = covariances(dim)
    rng = np.random.default_rng([seed, 1])
    mean_D = np.full(dim, mean)
    voice_SD = rng.multivariate_normal(mean_D, between, num_speakers)
    speaker_N = np.repeat(np.arange(num_speakers), per_speaker)
    zeros_D = np.zeros(dim)
    noise_ND = rng.multivariate_normal(zeros_D, within, len(speaker_N))
    emb_ND = voice_SD[speaker_N] + noise_ND

    names = [f"{name}{speaker}" for speaker in speaker_N]
    ids = [f"{speaker}-{i}" for i, speaker in enumerate(names)]
    table = EmbeddingTable(ids, emb_ND.astype(np.float32), MODEL)
    return Development(table, names)


def all_pairs(enrol, test):
    """Every utterance of one set with every one of another."""
    num_enrol = len(enrol.table.ids)
    num_test = len(test.table.ids)
    rows = np.arange(num_enrol, dtype=np.int32)
    columns = np.arange(num_test, dtype=np.int32)
    enrol_N = np.repeat(rows, num_test)
    test_N = np.tile(columns, num_enrol)
    enrol_speaker_N = np.asarray(enrol.speaker_M)[enrol_N]
    test_speaker_N = np.asarray(test.speaker_M)[test_N]
    return Trials(
        enrol_ids=enrol.table.ids,
        test_ids=test.table.ids,
        enrol_N=enrol_N,
        test_N=test_N,
        is_target_N=enrol_speaker_N == test_speaker_N,
    )
