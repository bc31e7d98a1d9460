"""Calibration: from a score to a log-likelihood ratio, and the thresholds to decide by.

In: scores of trials with known answers, of speakers that the model was not trained on. Out: a
`Calibration`, stored with the model.
Letters: N trials, K operating points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speakerlab.core.reading import ONLY_FINITE
from speakerlab.scoring.linear import fit_linear
from speakerlab.scoring.metrics import checked, eer_of_points, operating_points

FALSE_ALARM_RATES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.001)  # stored where there are enough trials


@dataclass(frozen=True)
class Calibration:
    """The meaning of a model's scores. A trial is accepted if it scores at least the threshold."""

    __pydantic_config__ = ONLY_FINITE

    slope: float  # log-likelihood ratio = slope x score + intercept, natural logarithm
    intercept: float
    threshold: float  # of the score, where miss and false-alarm rate are equal
    threshold_at_far: Mapping[str, float]  # false-alarm rate -> threshold of the score
    eer: float  # of the trials it was learned from
    num_target: int
    num_nontarget: int
    source: str  # description of these trials

    def llr(self, scores: ArrayLike) -> NDArray[np.float64]:
        """Return the log-likelihood ratio of the same speaker against different speakers."""
        return self.slope * np.asarray(scores, dtype=np.float64) + self.intercept

    def threshold_at(self, far: float | None = None) -> float:
        """Return the threshold at the EER, or at one of the stored false-alarm rates."""
        if far is None:
            return self.threshold
        if f"{far:g}" not in self.threshold_at_far:
            known = ", ".join(self.threshold_at_far) or "none"
            raise ValueError(
                f"calibration: no threshold stored for false-alarm rate {far:g}, only for {known}; "
                "add it with `speakerlab calibrate --far`"
            )
        return self.threshold_at_far[f"{far:g}"]


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
    for rate in false_alarm_rates:
        if not 1 / num_nontarget <= rate < 1:
            raise ValueError(
                f"calibration: {num_nontarget} non-target trials allow false-alarm rates from "
                f"{1 / num_nontarget:.2g} to 1, got {rate:g}; use more speakers"
            )
    known = [rate for rate in FALSE_ALARM_RATES if rate >= 10 / num_nontarget]
    rates = sorted({*known, *false_alarm_rates}, reverse=True)
    return Calibration(
        slope=float(line.weights_F[0]),
        intercept=line.bias,
        threshold=_midway(threshold_K, int(np.searchsorted(p_miss_K - p_fa_K, 0.0))),
        threshold_at_far={
            f"{rate:g}": _midway(threshold_K, int(np.argmax(p_fa_K <= rate))) for rate in rates
        },
        eer=eer_of_points(p_miss_K, p_fa_K),
        num_target=num_target,
        num_nontarget=num_nontarget,
        source=source,
    )


def _midway(threshold_K: np.ndarray, k: int) -> float:
    """Return the middle between a point's lowest accepted score and the next, if finite."""
    lower = threshold_K[max(k - 1, 0)]
    upper = threshold_K[k] if np.isfinite(threshold_K[k]) else np.nextafter(lower, np.inf)
    return float((lower + upper) / 2) if k else float(upper)
