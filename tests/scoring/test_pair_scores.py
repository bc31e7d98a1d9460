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
    rows = list(emb_by_id.values())
    emb_ND = np.array(rows, dtype=np.float32)
    return EmbeddingTable(list(emb_by_id), emb_ND, "ab" * 32)


def cosine_scores(enrol, test, trials):
    chain = build_chain("cosine", None)
    return chain.score(enrol, test, trials).scores_N


def random_case(num_enrol, num_test, num_trials, seed=0):
    rng = np.random.default_rng(seed)
    enrol = {}
    for number in range(num_enrol):
        enrol[f"e{number}"] = rng.normal(size=16)
    test = {}
    for number in range(num_test):
        test[f"t{number}"] = rng.normal(size=16)
    num_pairs = num_enrol * num_test
    cells = rng.choice(num_pairs, num_trials, replace=False)
    cells = cells.astype(np.int32)
    trials = Trials(
        # another order than the table's
        list(enrol)[::-1],
        list(test),
        cells // num_test,
        cells % num_test,
        rng.random(num_trials) < 0.5,
    )
    expected = []
    pairs = zip(trials.enrol_N, trials.test_N)
    for row, column in pairs:
        enrol_D = enrol[trials.enrol_ids[row]]
        test_D = test[trials.test_ids[column]]
        product = enrol_D @ test_D
        enrol_length = np.linalg.norm(enrol_D)
        test_length = np.linalg.norm(test_D)
        expected.append(product / enrol_length / test_length)
    return table(enrol), table(test), trials, np.array(expected)


def test_cosine_by_hand():
    emb = table(
        {
            "unused": [9, 9],
            "right": [2, 0],
            "up": [0, 5],
            "down": [0, -1],
            "both": [3, 4],
        }
    )
    trials = Trials(
        ["right", "both"],
        ["right", "up", "down", "both"],
        np.array([0, 0, 1, 1, 1], dtype=np.int32),
        np.array([0, 1, 1, 2, 3], dtype=np.int32),
        np.array([True, False, False, False, True]),
    )
    scores_N = cosine_scores(emb, emb, trials)
    expected = [1, 0, 0.8, -0.8, 1]
    np.testing.assert_allclose(scores_N, expected, atol=1e-6)


@pytest.mark.parametrize("values_at_once", [1, 100, 8_000_000])
# 0: always by pairs; 10**9: always by matrix
@pytest.mark.parametrize("cells_per_trial", [0, 10**9])
def test_every_route_gives_the_same_scores(
    monkeypatch, values_at_once, cells_per_trial
):
    monkeypatch.setattr(pair_scores, "VALUES_AT_ONCE", values_at_once)
    monkeypatch.setattr(pair_scores, "CELLS_PER_TRIAL", cells_per_trial)
    enrol, test, trials, expected = random_case(13, 29, 150)
    scores_N = cosine_scores(enrol, test, trials)
    np.testing.assert_allclose(scores_N, expected, atol=1e-6)


def test_pairwise_eer_scores_each_pair_once():
    emb_MD = np.array(
        [
            [1, 0],
            [3, 4],
            [0, 2],
            [0, 1],
        ],
        dtype=np.float32,
    )
    speaker_M = np.array([0, 0, 1, 1])
    eer, scores, is_target = pairwise_eer(emb_MD, speaker_M)

    # pairs 01 02 03 12 13 23
    expected_scores = [0.6, 0, 0, 0.8, 0.8, 1]
    np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
    expected_target = [True, False, False, False, False, True]
    assert is_target.tolist() == expected_target
    # at 0.8, 1 of 2 targets is missed and 2 of 4 non-targets are accepted
    assert eer == pytest.approx(0.5)


# 700 is all of the cohort
@pytest.mark.parametrize("top_n", [2, 100, 699, 700])
@pytest.mark.parametrize("values_at_once", [1, 2_100, 8_000_000])
def test_statistics_are_those_of_the_nearest_of_the_cohort(
    monkeypatch, top_n, values_at_once
):
    monkeypatch.setattr(pair_scores, "VALUES_AT_ONCE", values_at_once)
    rng = np.random.default_rng(0)
    side_RK = rng.normal(size=(7, 8))
    cohort_CK = rng.normal(size=(700, 8))
    cosine_RC = side_RK @ cohort_CK.T
    sorted_RC = np.sort(cosine_RC, axis=1)
    nearest_RN = sorted_RC[:, -top_n:]
    mean_R = nearest_RN.mean(axis=1)
    deviation_R = nearest_RN.std(axis=1)
    statistics = cohort_statistics(
        side_RK,
        cohort_CK,
        top_n=top_n,
        ids=[],
        where="x",
    )
    expected = (mean_R, deviation_R)
    np.testing.assert_allclose(statistics, expected, rtol=1e-9)


def test_a_row_that_is_alike_to_the_whole_cohort_is_refused_by_its_id():
    cohort_CK = np.tile([[0.6, 0.8]], (5, 1))
    row_RK = np.array([[0.0, 1.0]])
    with refuses("test embeddings", "b", "0.8"):
        cohort_statistics(
            row_RK,
            cohort_CK,
            top_n=5,
            ids=["b"],
            where="test embeddings",
        )
