"""Calibration: from a score to a log-likelihood ratio, and thresholds for decisions.

In: scores of labelled trials, of speakers outside the model's training data. Out: a
`Calibration`, stored with the model.
Letters: N trials, K operating points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.core.counting import count_of
from speakerlab.core.reading import ONLY_FINITE
from speakerlab.scoring.linear import fit_linear
from speakerlab.scoring.metrics import checked, eer_of_points, operating_points

# Thresholds at these rates are stored if there are enough trials.
FALSE_ALARM_RATES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.001)


@dataclass(frozen=True)
class Calibration:
    """Map from a model's scores to ratios, and thresholds: accept if score >= threshold."""

    __pydantic_config__ = ONLY_FINITE

    slope: float  # log-likelihood ratio = slope x score + intercept, natural logarithm
    intercept: float
    threshold: float  # of the score, where miss and false-alarm rate are equal
    threshold_at_far: Mapping[str, float]  # false-alarm rate -> threshold of the score
    eer: float  # of the calibration trials
    num_target: int
    num_nontarget: int
    source: str  # description of these trials
    # Of the model that gave the scores; None: older files do not have it.
    model_sha256: str | None = None

    def llr(self, scores: ArrayLike) -> NDArray[np.float64]:
        """Return the log-likelihood ratio of the same speaker against different speakers."""
        scores = np.asarray(scores, dtype=np.float64)
        return self.slope * scores + self.intercept

    def threshold_at(self, far: float | None = None) -> float:
        """Return the threshold at the EER, or at one of the stored false-alarm rates."""
        if far is None:
            return self.threshold
        _check_rate(far)
        if f"{far:g}" not in self.threshold_at_far:
            stored_rates = ", ".join(self.threshold_at_far) or "none"
            raise ValueError(
                f"calibration: no threshold stored for false-alarm rate {far:g}, only"
                f" for {stored_rates}; add it with `speakerlab calibrate --far`"
            )
        return self.threshold_at_far[f"{far:g}"]


def _check_rate(rate: float) -> None:
    """Raise ValueError unless the rate is a share; a user may write 1 for 1 %."""
    if not 0 < rate < 1:
        raise ValueError(
            f"calibration: a false-alarm rate is a share between 0 and 1, got {rate:g};"
            " 1 % is 0.01"
        )


def fit_calibration(
    scores: ArrayLike,
    is_target: ArrayLike,
    *,
    source: str,
    false_alarm_rates: Sequence[float] = (),
) -> Calibration:
    """Learn from N scores and whether each is a target trial, by `linear.fit_linear`.

    Thresholds are stored for `false_alarm_rates` besides the usual ones. Raises ValueError for a
    rate that is too low for the number of trials.
    """
    scores_N, target_N = checked(scores, is_target)
    p_miss_K, p_fa_K, threshold_K = operating_points(scores_N, target_N)
    num_target = int(np.count_nonzero(target_N))
    num_nontarget = len(scores_N) - num_target
    line = fit_linear(scores_N[:, None], target_N, names=["scores"])
    threshold_at_far: dict[str, float] = {}
    for rate in _rates_to_store(false_alarm_rates, num_nontarget):
        # The lowest threshold with few enough false alarms; p_fa_K descends.
        point = int(np.argmax(p_fa_K <= rate))
        threshold_at_far[f"{rate:g}"] = _midway(threshold_K, point)

    # The first point with at least as many misses as false alarms; the difference ascends.
    eer_point = int(np.searchsorted(p_miss_K - p_fa_K, 0.0))
    return Calibration(
        slope=float(line.weights_F[0]),
        intercept=line.bias,
        threshold=_midway(threshold_K, eer_point),
        threshold_at_far=threshold_at_far,
        eer=eer_of_points(p_miss_K, p_fa_K),
        num_target=num_target,
        num_nontarget=num_nontarget,
        source=source,
    )


def _rates_to_store(requested: Sequence[float], num_nontarget: int) -> list[float]:
    """Return the requested false-alarm rates and the usual ones, descending.

    Raises ValueError for a requested rate that is too low for the number of non-target trials.
    """
    lowest_rate = 1 / num_nontarget  # a single false alarm
    for rate in requested:
        _check_rate(rate)
        if rate < lowest_rate:
            raise ValueError(
                f"calibration: with {count_of(num_nontarget, 'non-target trial')},"
                f" false-alarm rates may be from {lowest_rate:.2g} on, got {rate:g};"
                " use more speakers"
            )
    rates = set(requested)
    for rate in FALSE_ALARM_RATES:
        # With fewer than 10 false alarms, a threshold is unreliable.
        if rate >= 10 / num_nontarget:
            rates.add(rate)
    return sorted(rates, reverse=True)


def _midway(threshold_K: np.ndarray, point: int) -> float:
    """Return the middle between a point's threshold and the next lower score.

    All thresholds in between give the same decisions. If the point accepts no trial, its threshold
    is infinite, so the smallest number above the highest score is used instead.
    """
    lower = threshold_K[max(point - 1, 0)]
    upper = threshold_K[point]
    if not np.isfinite(upper):
        upper = np.nextafter(lower, np.inf)
    # The lowest score has no next lower score.
    if point == 0:
        return float(upper)
    return float((lower + upper) / 2)
