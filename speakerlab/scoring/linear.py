"""Logistic regression on features of trials: calibration, quality measures and fusion.

In: features of each trial (a score, the scores of several systems, durations) and the labels of the
trials. Out: a log-likelihood ratio per trial, natural logarithm.
Letters: N trials, F features, G = F + 1 (the last is the constant), S speakers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.core.counting import count_of
from speakerlab.scoring.metrics import checked
from speakerlab.scoring.minima import TooFewError, min_speakers

# Trials of either kind that cross-validation learns from: more do not change the fit.
MAX_OF_A_KIND = 200_000
NUM_FOLDS = 5
GRADIENT_AT_END = 1e-10  # the loss is of the order of 1


@dataclass(frozen=True, eq=False)
class Linear:
    """Linear model: log-likelihood ratio = features . weights + bias."""

    names: tuple[str, ...]
    weights_F: NDArray[np.float64]
    bias: float

    def llr(self, features_NF: ArrayLike) -> NDArray[np.float64]:
        """Return the log-likelihood ratio of every trial, (N)."""
        features_NF = np.asarray(features_NF, dtype=np.float64)
        return features_NF @ self.weights_F + self.bias

    def __str__(self) -> str:
        terms: list[str] = []
        for weight, name in zip(self.weights_F, self.names):
            terms.append(f"{weight:.4g} x {name}")
        return f"log-likelihood ratio = {' + '.join(terms)} {self.bias:+.4g}"


def fit_linear(
    features_NF: ArrayLike,
    is_target_N: ArrayLike,
    *,
    names: Sequence[str],
) -> Linear:
    """Learn the weights of F features from N trials. names: of the features.

    All targets together weigh as much as all non-targets, so the output is a log-likelihood ratio
    (Brummer and du Preez, "Application-independent evaluation of speaker detection", Computer
    Speech and Language 20, 2006). Separable trials would make the weights infinite; each kind
    therefore has one more trial with the other label, as Platt proposed ("Probabilistic outputs for
    support vector machines", 1999). Scaling or shifting a feature does not change the ratios. A
    constant feature has weight 0.

    Raises ValueError for a feature that is not finite, and if one kind of trial is missing or no
    feature varies.
    """
    features_NF, target_N = _checked(features_NF, is_target_N, names)
    mean_F = features_NF.mean(axis=0, dtype=np.float64)
    deviation_F = features_NF.std(axis=0, dtype=np.float64)
    # A smaller deviation is rounding error, so the feature must not be divided by it.
    varies_F = deviation_F > 1e-12 * np.abs(mean_F)
    if not varies_F.any():
        means = ", ".join(f"{mean:g}" for mean in mean_F)
        raise ValueError(
            f"calibration: all {' and '.join(names)} are equal, {means}; check the"
            " model"
        )

    # Standardise the features for Newton's method. An infinite scale makes constant features 0.
    scale_F = np.where(varies_F, deviation_F, np.inf)
    unit_NF = (features_NF - mean_F) / scale_F
    constant_N = np.ones(len(features_NF))
    unit_NG = np.column_stack([unit_NF, constant_N])
    solution_G = _logistic_regression(unit_NG, target_N)

    # Convert to the original features: w (x - mean) / scale + b.
    weights_F = solution_G[:-1] / scale_F
    bias = float(solution_G[-1] - weights_F @ mean_F)
    return Linear(tuple(names), weights_F, bias)


def cross_validated(
    features_NF: ArrayLike,
    is_target_N: ArrayLike,
    enrol_speaker_N: np.ndarray,
    test_speaker_N: np.ndarray,
    *,
    names: Sequence[str],
) -> NDArray[np.float64]:
    """Return log-likelihood ratios (N), each by a model that saw neither speaker of the trial.

    The speakers are split into folds. A trial of speakers in folds i and j is scored by a model
    fitted to the trials without speakers in i or j. A model is fitted to at most MAX_OF_A_KIND
    targets and as many non-targets, always the same ones; both kinds keep equal total weights.
    Raises TooFewError for fewer speakers than `min_speakers`, and if the remaining trials of a fit
    are all of one kind.
    """
    features_NF, target_N = _checked(features_NF, is_target_N, names)
    num_trials = len(target_N)
    fold_N2 = _folds(enrol_speaker_N, test_speaker_N, num_weights=len(names))
    assert len(fold_N2) == num_trials, (fold_N2.shape, num_trials)
    # The M trials to learn from.
    rows_M = _thinned(target_N)
    features_MF = features_NF[rows_M]
    target_M = target_N[rows_M]
    fold_M2 = fold_N2[rows_M]

    # A model for each pair of folds, in either order, as one number.
    low_N = fold_N2.min(axis=1)
    high_N = fold_N2.max(axis=1)
    fold_pair_N = low_N * NUM_FOLDS + high_N
    llr_N = np.full(num_trials, np.nan)
    for fold_pair in np.unique(fold_pair_N):
        held_out_folds = divmod(int(fold_pair), NUM_FOLDS)
        has_held_out_M2 = np.isin(fold_M2, held_out_folds)
        is_learned_M = ~has_held_out_M2.any(axis=1)
        learned_target = target_M[is_learned_M]
        has_both_kinds = learned_target.any() and not learned_target.all()
        if not has_both_kinds:
            raise TooFewError(
                f"calibration: cross-validation with {NUM_FOLDS} folds leaves only one"
                f" kind of trial to learn from, got"
                f" {count_of(len(learned_target), 'trial')};"
                " use trials of more speakers, or a development list"
            )
        model = fit_linear(features_MF[is_learned_M], learned_target, names=names)
        scored_rows = np.flatnonzero(fold_pair_N == fold_pair)
        llr_N[scored_rows] = model.llr(features_NF[scored_rows])
    return llr_N


def _checked(
    features: ArrayLike,
    is_target: ArrayLike,
    names: Sequence[str],
) -> tuple[np.ndarray, NDArray[np.bool_]]:
    """Return (features_NF, is_target_N) as arrays; ValueError if they cannot be fitted."""
    features_NF = np.asarray(features)
    target_N = np.asarray(is_target, dtype=np.bool_)
    expected_shape = len(target_N), len(names)
    assert features_NF.shape == expected_shape, (features_NF.shape, expected_shape)
    is_finite_NF = np.isfinite(features_NF)
    not_finite = np.argwhere(~is_finite_NF)
    if len(not_finite):
        trial, column = not_finite[0]
        value = features_NF[trial, column]
        raise ValueError(
            f"calibration: {names[column]} is {value} at trial {trial}; check the"
            " embeddings"
        )
    _, target_N = checked(features_NF[:, 0], target_N)
    return features_NF, target_N


def _logistic_regression(
    unit_NG: np.ndarray, target_N: np.ndarray
) -> NDArray[np.float64]:
    """Return weights (G), by Newton's method with a trust region."""
    # Imported here, because the imports take half a second.
    from scipy.optimize import minimize
    from scipy.special import expit

    num_target = np.count_nonzero(target_N)
    num_nontarget = len(target_N) - num_target
    # The number of trials of the same kind. The total weight of each kind is 1/2.
    count_N = np.where(target_N, num_target, num_nontarget)
    weight_N = 0.5 / count_N
    # Platt's labels: (n + 1) / (n + 2) instead of 1 and 1 / (n + 2) instead of 0.
    num_positive_N = np.where(target_N, count_N + 1.0, 1.0)
    label_N = num_positive_N / (count_N + 2.0)

    def loss(at_G: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss and its gradient."""
        logit_N = unit_NG @ at_G
        losses_N = np.logaddexp(0, logit_N) - label_N * logit_N
        slope_N = weight_N * (expit(logit_N) - label_N)
        return float(weight_N @ losses_N), slope_N @ unit_NG

    def curvature(at_G: np.ndarray) -> np.ndarray:
        """Return the second derivatives of the loss, (G, G)."""
        p_target_N = expit(unit_NG @ at_G)
        curvature_N = weight_N * p_target_N * (1.0 - p_target_N)
        return (unit_NG.T * curvature_N) @ unit_NG

    solution = minimize(
        loss,
        np.zeros(unit_NG.shape[1]),
        jac=True,  # `loss` returns the gradient, too
        hess=curvature,
        method="trust-ncg",
        options={"gtol": GRADIENT_AT_END},
    )
    return solution.x


def _folds(
    enrol_N: np.ndarray,
    test_N: np.ndarray,
    *,
    num_weights: int,
) -> NDArray[np.int64]:
    """Return the fold of the enrolment and of the test speaker of each trial, (N, 2)."""
    speakers_S, code_2N = np.unique([enrol_N, test_N], return_inverse=True)
    if len(speakers_S) < min_speakers(num_weights):
        raise TooFewError(
            f"calibration: cross-validation needs at least {min_speakers(num_weights)}"
            f" speakers here, got {len(speakers_S)}; use trials of more speakers, or"
            " learn from other trials"
        )
    # The folds depend only on the number of speakers, so that results are repeatable.
    num_speakers = len(speakers_S)
    rng = np.random.default_rng([0, num_speakers])
    fold_S = rng.permutation(num_speakers) % NUM_FOLDS
    # Before NumPy 2.0, `unique` returns the numbers flat.
    fold_2N = fold_S[code_2N.reshape(2, -1)]
    return fold_2N.T


def _thinned(target_N: np.ndarray) -> NDArray[np.int64]:
    """Return rows of at most MAX_OF_A_KIND targets and as many non-targets, ascending."""
    rng = np.random.default_rng([0, len(target_N)])
    chosen: list[np.ndarray] = []
    target_rows = np.flatnonzero(target_N)
    nontarget_rows = np.flatnonzero(~target_N)
    for rows in (target_rows, nontarget_rows):
        if len(rows) > MAX_OF_A_KIND:
            rows = rng.choice(rows, MAX_OF_A_KIND, replace=False, shuffle=False)
        chosen.append(rows)
    return np.sort(np.concatenate(chosen))
