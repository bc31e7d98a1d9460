"""Quality measures: named, ordered, and worth something where they should be."""

import numpy as np
import pytest
from gaussian_speakers import all_pairs, draw

from speakerlab.scoring.chain import Scored, build_chain
from speakerlab.scoring.linear import fit_linear
from speakerlab.scoring.metrics import cllr
from speakerlab.scoring.quality import quality_features


def scored(**sides):
    return Scored(
        np.array([0.5, 0.25], dtype=np.float32),
        {name: np.array(enrol) for name, (enrol, _) in sides.items()},
        {name: np.array(test) for name, (_, test) in sides.items()},
    )


def test_features_by_hand():
    features_NF, names = quality_features(scored(norm=([3, 4], [5, 1])), [1.0, 8.0], [4.0, 2.0])
    assert names == (
        "score",
        "lower_norm",
        "higher_norm",
        "lower_log_seconds",
        "higher_log_seconds",
    )
    expected = [[0.5, 3, 5, 0, np.log(4)], [0.25, 1, 4, np.log(2), np.log(8)]]
    np.testing.assert_allclose(features_NF, expected, rtol=1e-6)
    assert quality_features(scored())[1] == ("score",)


def test_a_duration_of_nothing_is_refused():
    with pytest.raises(ValueError, match="durations: 1 are not above 0 seconds, got 0 at trial 1"):
        quality_features(scored(), [1.0, 0.0], [1.0, 1.0])


def test_a_chain_gives_norms_and_cohort_means():
    development, test = draw(20, 4, 5, name="d"), draw(5, 2, 5, seed=3)
    chain = build_chain("mean+cosine+asnorm", development, top_n=5)
    found = chain.score(test.table, test.table, all_pairs(test, test))
    sides = ("lower_norm", "higher_norm", "lower_cohort_mean", "higher_cohort_mean")
    assert quality_features(found)[1] == ("score", *sides)


def test_durations_help_where_short_recordings_score_lower():
    rng = np.random.default_rng(0)
    target_N = np.arange(20_000) % 4 == 0
    seconds_N = np.exp(rng.uniform(0, 4, 20_000))
    scores_N = np.where(target_N, 2.0, 0.0) + np.log(seconds_N) + rng.normal(size=20_000)
    found = Scored(scores_N.astype(np.float32), {}, {})
    costs = []
    for seconds in ((None, None), (seconds_N, np.full(20_000, 100.0))):
        features_NF, names = quality_features(found, *seconds)
        learned = fit_linear(features_NF, target_N, names=names)
        costs.append(cllr(learned.llr(features_NF), target_N))
    assert costs[1] < 0.8 * costs[0]
