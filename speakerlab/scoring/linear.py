"""Logistic regression on features of trials: calibration, quality measures and fusion.

In: features of each trial (a score, the scores of several systems, durations), and which trials are
targets. Out: a log-likelihood ratio per trial, natural logarithm.
Letters: N trials, F features, G = F + 1 (the last is the constant), S speakers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.scoring.metrics import checked
from speakerlab.scoring.minima import TooFewError, min_speakers

MAX_OF_A_KIND = 200_000  # trials of either kind that a fold is fitted to: more do not change it
NUM_FOLDS = 5
GRADIENT_AT_END = 1e-10  # of a loss of the order of 1


@dataclass(frozen=True, eq=False)
class Linear:
    """log-likelihood ratio = features . weights + bias."""

    names: tuple[str, ...]
    weights_F: NDArray[np.float64]
    bias: float

    def llr(self, features_NF: ArrayLike) -> NDArray[np.float64]:
        """Return the log-likelihood ratio of every trial, (N)."""
        return np.asarray(features_NF, dtype=np.float64) @ self.weights_F + self.bias

    def __str__(self) -> str:
        parts = [f"{weight:.4g} x {name}" for weight, name in zip(self.weights_F, self.names)]
        return f"log-likelihood ratio = {' + '.join(parts)} {self.bias:+.4g}"


def fit_linear(features_NF: ArrayLike, is_target_N: ArrayLike, *, names: Sequence[str]) -> Linear:
    """Learn the weights of F features, called `names`, from N trials.

    All targets together weigh as much as all non-targets, so the output is a log-likelihood ratio
    (Brummer and du Preez, "Application-independent evaluation of speaker detection", Computer
    Speech and Language 20, 2006). Separable trials would make the weights infinite; each kind is
    therefore given one more trial with the other label, as Platt proposed ("Probabilistic outputs
    for support vector machines", 1999). Scaling or shifting a feature does not change the ratios. A
    constant feature gets weight 0.

    Raises ValueError for a feature that is not finite, and if one kind of trial is missing or no
    feature varies.
    """
    features_NF, target_N = _checked(features_NF, is_target_N, names)
    mean_F = features_NF.mean(axis=0, dtype=np.float64)
    deviation_F = features_NF.std(axis=0, dtype=np.float64)
    varies_F = deviation_F > 1e-12 * np.abs(mean_F)
    if not varies_F.any():
        raise ValueError(
            f"calibration: all {' and '.join(names)} are equal, "
            f"{', '.join(f'{mean:g}' for mean in mean_F)}; check the model"
        )
    scale_F = np.where(varies_F, deviation_F, np.inf)
    unit_NG = np.column_stack([(features_NF - mean_F) / scale_F, np.ones(len(features_NF))])
    solution_G = _logistic_regression(unit_NG, target_N)
    weights_F = solution_G[:-1] / scale_F
    return Linear(tuple(names), weights_F, float(solution_G[-1] - weights_F @ mean_F))


def cross_validated(
    features_NF: ArrayLike,
    is_target_N: ArrayLike,
    enrol_speaker_N: np.ndarray,
    test_speaker_N: np.ndarray,
    *,
    names: Sequence[str],
) -> NDArray[np.float64]:
    """Return log-likelihood ratios (N), each by a model that saw neither speaker of the trial.

    The speakers are split into folds. A trial of speakers in folds i and j is scored by a model of
    the trials that have no speaker in i or j. A model is fitted to at most MAX_OF_A_KIND targets
    and as many non-targets, always the same; the weight of either kind does not change. Raises
    TooFewError for fewer speakers than `min_speakers`, and if the trials left to learn from lack a
    kind.
    """
    features_NF, target_N = _checked(features_NF, is_target_N, names)
    fold_N2 = _folds(enrol_speaker_N, test_speaker_N, num_weights=len(names))
    assert len(fold_N2) == len(target_N), (fold_N2.shape, target_N.shape)
    learned_M = _thinned(target_N)
    features_MF, target_M, fold_M2 = features_NF[learned_M], target_N[learned_M], fold_N2[learned_M]
    low_N, high_N = fold_N2.min(axis=1), fold_N2.max(axis=1)
    pair_N = low_N * NUM_FOLDS + high_N
    llr_N = np.full(len(target_N), np.nan)
    for pair in np.unique(pair_N):
        held_out = divmod(int(pair), NUM_FOLDS)
        seen_M = ~np.isin(fold_M2, held_out).any(axis=1)
        if not target_M[seen_M].any() or target_M[seen_M].all():
            raise TooFewError(
                f"calibration: cross-validation with {NUM_FOLDS} folds leaves only one kind of "
                f"trial to learn from, got {np.count_nonzero(seen_M)} trials; use trials of more "
                "speakers, or a development list"
            )
        model = fit_linear(features_MF[seen_M], target_M[seen_M], names=names)
        scored = np.flatnonzero(pair_N == pair)
        llr_N[scored] = model.llr(features_NF[scored])
    return llr_N


def _checked(
    features: ArrayLike, is_target: ArrayLike, names: Sequence[str]
) -> tuple[np.ndarray, NDArray[np.bool_]]:
    features_NF = np.asarray(features)
    target_N = np.asarray(is_target, dtype=np.bool_)
    assert features_NF.shape == (len(target_N), len(names)), (features_NF.shape, target_N.shape)
    for n, f in np.argwhere(~np.isfinite(features_NF))[:1]:
        problem = f"{names[f]} is {features_NF[n, f]} at trial {n}; check the embeddings"
        raise ValueError(f"calibration: {problem}")
    return features_NF, checked(features_NF[:, 0], target_N)[1]


def _logistic_regression(unit_NG: np.ndarray, target_N: np.ndarray) -> NDArray[np.float64]:
    """Return weights (G), by Newton's method with a trust region."""
    from scipy.optimize import minimize  # here: they take half a second to import
    from scipy.special import expit

    num_target = np.count_nonzero(target_N)
    counts_N = np.where(target_N, num_target, len(target_N) - num_target)
    weight_N = 0.5 / counts_N
    answer_N = np.where(target_N, counts_N + 1.0, 1.0) / (counts_N + 2.0)

    def loss(at_G: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss and its gradient."""
        logit_N = unit_NG @ at_G
        losses_N = np.logaddexp(0, logit_N) - answer_N * logit_N
        return float(weight_N @ losses_N), (weight_N * (expit(logit_N) - answer_N)) @ unit_NG

    def curvature(at_G: np.ndarray) -> np.ndarray:
        chance_N = expit(unit_NG @ at_G)
        return (unit_NG.T * (weight_N * chance_N * (1.0 - chance_N))) @ unit_NG

    start_G, options = np.zeros(unit_NG.shape[1]), {"gtol": GRADIENT_AT_END}
    found = minimize(loss, start_G, jac=True, hess=curvature, method="trust-ncg", options=options)
    return found.x


def _folds(enrol_N: np.ndarray, test_N: np.ndarray, *, num_weights: int) -> NDArray[np.int64]:
    """Return the fold of the enrolment and of the test speaker of each trial, (N, 2)."""
    speakers_S, code_2N = np.unique([enrol_N, test_N], return_inverse=True)
    if len(speakers_S) < min_speakers(num_weights):
        raise TooFewError(
            f"calibration: cross-validation needs at least {min_speakers(num_weights)} speakers "
            f"here, got {len(speakers_S)}; use trials of more speakers, or learn from other trials"
        )
    order_S = np.random.default_rng([0, len(speakers_S)]).permutation(len(speakers_S))
    return (order_S % NUM_FOLDS)[code_2N.reshape(2, -1)].T


def _thinned(target_N: np.ndarray) -> NDArray[np.int64]:
    """Return rows of at most MAX_OF_A_KIND targets and as many non-targets, ascending."""
    rng = np.random.default_rng([0, len(target_N)])
    kept: list[np.ndarray] = []
    for rows in (np.flatnonzero(target_N), np.flatnonzero(~target_N)):
        few = len(rows) <= MAX_OF_A_KIND
        kept.append(rows if few else rng.choice(rows, MAX_OF_A_KIND, replace=False, shuffle=False))
    return np.sort(np.concatenate(kept))
