"""Cosine scores by hand and by every route; statistics of the cohort by sorting."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.scoring import pair_scores
from speakerlab.scoring.chain import build_chain
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.pair_scores import cohort_statistics, pairwise_eer
from speakerlab.scoring.trials import Trials


def table(emb_by_id):
    emb_ND = np.array(list(emb_by_id.values()), dtype=np.float32)
    return EmbeddingTable(list(emb_by_id), emb_ND, "ab" * 32)


def cosine_scores(enrol, test, trials):
    return build_chain("cosine", None).score(enrol, test, trials).scores_N


def random_case(num_enrol, num_test, num_trials, seed=0):
    rng = np.random.default_rng(seed)
    enrol = {f"e{i}": rng.normal(size=16) for i in range(num_enrol)}
    test = {f"t{i}": rng.normal(size=16) for i in range(num_test)}
    cells = rng.choice(num_enrol * num_test, num_trials, replace=False).astype(np.int32)
    trials = Trials(
        list(enrol)[::-1],  # another order than the table's
        list(test),
        cells // num_test,
        cells % num_test,
        rng.random(num_trials) < 0.5,
    )
    expected = [
        enrol[e] @ test[t] / np.linalg.norm(enrol[e]) / np.linalg.norm(test[t])
        for e, t in (
            (trials.enrol_ids[i], trials.test_ids[j]) for i, j in zip(trials.enrol_N, trials.test_N)
        )
    ]
    return table(enrol), table(test), trials, np.array(expected)


def test_cosine_by_hand():
    emb = table({"unused": [9, 9], "right": [2, 0], "up": [0, 5], "down": [0, -1], "both": [3, 4]})
    trials = Trials(
        ["right", "both"],
        ["right", "up", "down", "both"],
        np.array([0, 0, 1, 1, 1], dtype=np.int32),
        np.array([0, 1, 1, 2, 3], dtype=np.int32),
        np.array([True, False, False, False, True]),
    )
    scores_N = cosine_scores(emb, emb, trials)
    np.testing.assert_allclose(scores_N, [1, 0, 0.8, -0.8, 1], atol=1e-6)


@pytest.mark.parametrize("values_at_once", [1, 100, 8_000_000])
@pytest.mark.parametrize("cells_per_trial", [0, 10**9])  # always by pairs, always by matrix
def test_every_route_gives_the_same_scores(monkeypatch, values_at_once, cells_per_trial):
    monkeypatch.setattr(pair_scores, "VALUES_AT_ONCE", values_at_once)
    monkeypatch.setattr(pair_scores, "CELLS_PER_TRIAL", cells_per_trial)
    enrol, test, trials, expected = random_case(13, 29, 150)
    np.testing.assert_allclose(cosine_scores(enrol, test, trials), expected, atol=1e-6)


def test_pairwise_eer_scores_each_pair_once():
    emb_MD = np.array([[1, 0], [3, 4], [0, 2], [0, 1]], dtype=np.float32)
    eer, scores, is_target = pairwise_eer(emb_MD, np.array([0, 0, 1, 1]))
    # pairs 01 02 03 12 13 23
    np.testing.assert_allclose(scores, [0.6, 0, 0, 0.8, 0.8, 1], atol=1e-6)
    assert is_target.tolist() == [True, False, False, False, False, True]
    assert eer == pytest.approx(0.5)  # at 0.8: 1 of 2 targets missed, 2 of 4 non-targets accepted


@pytest.mark.parametrize("top_n", [2, 100, 699, 700])  # the last is all of the cohort
@pytest.mark.parametrize("values_at_once", [1, 2_100, 8_000_000])
def test_statistics_are_those_of_the_nearest_of_the_cohort(monkeypatch, top_n, values_at_once):
    monkeypatch.setattr(pair_scores, "VALUES_AT_ONCE", values_at_once)
    rng = np.random.default_rng(0)
    side_RK, cohort_CK = rng.normal(size=(7, 8)), rng.normal(size=(700, 8))
    nearest_RN = np.sort(side_RK @ cohort_CK.T, axis=1)[:, -top_n:]
    expected = nearest_RN.mean(axis=1), nearest_RN.std(axis=1)
    found = cohort_statistics(side_RK, cohort_CK, top_n=top_n, ids=[], where="x")
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_row_that_is_alike_to_the_whole_cohort_is_refused_by_its_id():
    cohort_CK = np.tile([[0.6, 0.8]], (5, 1))
    with refuses("test embeddings", "b", "0.8"):
        cohort_statistics(
            np.array([[0.0, 1.0]]), cohort_CK, top_n=5, ids=["b"], where="test embeddings"
        )
