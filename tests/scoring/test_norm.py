"""S-Norm and AS-Norm equal a plain loop, in blocks of any size."""

import numpy as np
import pytest
from gaussian_speakers import all_pairs, draw

from speakerlab.scoring import backend
from speakerlab.scoring.norm import cohort_statistics, normalised


def case(top_n):
    """Scores of 7 x 11 trials, normalised by a cohort of 700."""
    enrol, test, cohort = (draw(num, 1, 8, seed=num) for num in (7, 11, 700))
    trials = all_pairs(enrol, test)
    embeddings = (drawn.table.emb_ND.astype(float) for drawn in (enrol, test, cohort))
    rows = [emb / np.linalg.norm(emb, axis=1, keepdims=True) for emb in embeddings]
    scores_N = np.array([rows[0][e] @ rows[1][t] for e, t in zip(trials.enrol_N, trials.test_N)])
    sides = [
        cohort_statistics(own, rows[2], top_n=top_n, ids=d.table.ids, where="x")
        for own, d in zip(rows, (enrol, test))
    ]
    return normalised(scores_N, trials, *sides), (rows, trials, scores_N)


def by_loop(rows, trials, scores_N, top_n):
    expected = []
    for e, t, score in zip(trials.enrol_N, trials.test_N, scores_N):
        halves = []
        for own in (rows[0][e], rows[1][t]):
            nearest = sorted((float(own @ other) for other in rows[2]), reverse=True)[:top_n]
            halves.append((score - np.mean(nearest)) / np.std(nearest))
        expected.append(sum(halves) / 2)
    return expected


@pytest.mark.parametrize("top_n", [2, 100, 699, 700])  # the last is S-Norm
@pytest.mark.parametrize("values_at_once", [1, 2_100, 8_000_000])
def test_normalised_scores_equal_a_loop(monkeypatch, top_n, values_at_once):
    monkeypatch.setattr(backend, "VALUES_AT_ONCE", values_at_once)
    found_N, rest = case(top_n)
    assert found_N.shape == (77,) and found_N.dtype == np.float32
    np.testing.assert_allclose(found_N, by_loop(*rest, top_n), rtol=1e-5, atol=1e-5)


def test_a_row_that_is_alike_to_the_whole_cohort_is_refused_by_its_id():
    cohort_CK = np.tile([[0.6, 0.8]], (5, 1))
    with pytest.raises(ValueError, match="test embeddings: b scores the same .* got 0.8; use"):
        cohort_statistics(
            np.array([[0.0, 1.0]]), cohort_CK, top_n=5, ids=["b"], where="test embeddings"
        )
