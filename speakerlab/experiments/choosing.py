"""Which of several models suits a set of voices: EERs, tests of differences, a recommendation.

In: embeddings of the same utterances by each model and condition. Out: rows, and lines of text.
A model is better than another if the p-value of the difference of their EERs, corrected for the
number of pairs of models by Holm's method, is below 5 %. docs/choosing.md states how often such
statements are wrong.
Letters: I utterances, N trials, D dimensions of an embedding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from speakerlab.core.counting import count_of
from speakerlab.experiments.results import aligned, bounds, percent
from speakerlab.experiments.run_table import holm
from speakerlab.scoring.eer_intervals import (
    LEVEL,
    Difference,
    EerEstimate,
    compare_eers,
    estimate_eer,
)
from speakerlab.scoring.metrics import error_rates, threshold_at
from speakerlab.scoring.pair_scores import unit_rows

AS_RECORDED = "as recorded"
POWER = 0.8  # chance that as many speakers as `more_speakers` names decide
MAX_MORE_SPEAKERS = 100_000
MIN_ALARMS = 10  # pairs of different speakers above a threshold; fewer are unreliable
Condition = tuple[str, str]  # name and value, such as ("codec of the test side", "gsm")
RECORDED: Condition = ("", AS_RECORDED)


@dataclass(frozen=True)
class TrialPairs:
    """All pairs of utterances: the first enrols as recorded, the second is tested."""

    enrol_N: NDArray[np.intp]
    test_N: NDArray[np.intp]
    enrol_speaker_N: NDArray[np.int64]
    test_speaker_N: NDArray[np.int64]
    num_repeats: int  # utterances without the first of each speaker

    @classmethod
    def of_speakers(cls, speaker_I: np.ndarray) -> "TrialPairs":
        """Pair all utterances, given the speaker of each."""
        enrol_N, test_N = np.triu_indices(len(speaker_I), k=1)
        return cls(
            enrol_N=enrol_N,
            test_N=test_N,
            enrol_speaker_N=speaker_I[enrol_N],
            test_speaker_N=speaker_I[test_N],
            num_repeats=len(speaker_I) - len(np.unique(speaker_I)),
        )

    @property
    def is_target_N(self) -> NDArray[np.bool_]:
        return self.enrol_speaker_N == self.test_speaker_N

    def scores(
        self, enrol_ID: np.ndarray, test_ID: np.ndarray, ids: Sequence[str]
    ) -> NDArray[np.float32]:
        """Return the cosine of each pair, given embeddings of any length."""
        cosine_II = unit_rows(enrol_ID, ids) @ unit_rows(test_ID, ids).T
        return cosine_II[self.enrol_N, self.test_N]

    def estimate(self, scores_N: np.ndarray) -> EerEstimate:
        return estimate_eer(
            scores_N,
            self.is_target_N,
            self.enrol_speaker_N,
            self.test_speaker_N,
            num_repeats=self.num_repeats,
        )


@dataclass(frozen=True)
class Candidate:
    """Model with its results."""

    name: str
    sha256: str
    sample_rate: int
    megabytes: float  # of its weights
    ms_per_second: float  # of audio, with one thread
    # Speakers of these recordings that it was trained on; None: unknown.
    num_trained: int | None
    training_data: str  # as its card states them
    estimates: Mapping[Condition, EerEstimate]
    threshold: float | None  # None: no score has so few false alarms
    p_miss: float | None  # at the threshold, on the same recordings
    num_others: int  # pairs of different speakers, which the threshold depends on

    @property
    def eer(self) -> float:
        return self.estimates[RECORDED].eer


@dataclass(frozen=True)
class Comparison:
    """Two models in one condition."""

    condition: Condition
    first: Candidate
    second: Candidate
    result: Difference  # the first minus the second
    corrected_p: float | None
    more_speakers: int | None  # that would decide; None: decided, unknown or too many

    @property
    def better(self) -> Candidate | None:
        """Return the better model, None if the difference is not significant."""
        if self.corrected_p is None or self.corrected_p >= LEVEL:
            return None
        return self.first if self.result.difference < 0 else self.second

    def has(self, candidate: Candidate) -> bool:
        return candidate is self.first or candidate is self.second

    def other(self, candidate: Candidate) -> Candidate:
        return self.second if candidate is self.first else self.first


def find_threshold(
    scores_N: np.ndarray, is_target_N: np.ndarray, *, far: float
) -> tuple[float | None, float | None]:
    """Return the threshold at a false-accept rate, and the miss rate there; None for none."""
    threshold = threshold_at(scores_N, is_target_N, far=far)
    if not math.isfinite(threshold):
        return None, None
    p_miss, _ = error_rates(scores_N, is_target_N, threshold=threshold)
    return threshold, p_miss


def compare_all(candidates: Sequence[Candidate]) -> list[Comparison]:
    """Compare each pair of models in each condition.

    The p-values of a condition are corrected for its number of pairs.
    """
    pairs = list(combinations(candidates, 2))
    comparisons: list[Comparison] = []
    for condition, estimate in candidates[0].estimates.items():
        results: list[Difference] = []
        for first, second in pairs:
            result = compare_eers(
                first.estimates[condition],
                second.estimates[condition],
            )
            results.append(result)
        p_values = [result.p_value for result in results if result.p_value is not None]
        # All models have the same speakers, so all pairs are tested, or none.
        corrected: Sequence[float | None] = holm(p_values) or [None] * len(pairs)
        for (first, second), result, corrected_p in zip(pairs, results, corrected):
            num_missing: int | None = None
            if corrected_p is not None and corrected_p >= LEVEL:
                num_missing = more_speakers(
                    result,
                    estimate.num_speakers,
                    num_pairs=len(pairs),
                )
            comparison = Comparison(
                condition=condition,
                first=first,
                second=second,
                result=result,
                corrected_p=corrected_p,
                more_speakers=num_missing,
            )
            comparisons.append(comparison)
    return comparisons


def more_speakers(
    result: Difference, num_speakers: int, *, num_pairs: int
) -> int | None:
    """Return how many more speakers decide with a chance of 80 %.

    None if they are too many, or if no number decides. The difference is taken as it was measured,
    and its standard error as proportional to 1 / sqrt(speakers). num_pairs: pairs of models that
    are compared, for the correction of p-values.
    """
    if result.standard_error == 0 or result.difference == 0:
        return None
    # The two-sided test has this power for a difference of so many standard errors.
    pair_level = LEVEL / num_pairs
    num_errors = float(ndtri(1 - pair_level / 2) + ndtri(POWER))
    # The factor by which the standard error must fall.
    factor = num_errors * result.standard_error / abs(result.difference)
    needed_speakers = num_speakers * factor**2
    if needed_speakers > MAX_MORE_SPEAKERS:
        return None
    return max(math.ceil(needed_speakers) - num_speakers, 1)


def recommend(candidates: Sequence[Candidate]) -> Candidate:
    """Return the model with the lowest EER as recorded, of equal ones the fastest."""
    return min(candidates, key=lambda model: (model.eer, model.ms_per_second))


def tied_with(best: Candidate, comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons, as recorded, of the recommended model with no better one."""
    tied: list[Comparison] = []
    for comparison in comparisons:
        is_of_best = comparison.condition == RECORDED and comparison.has(best)
        if is_of_best and comparison.better is None:
            tied.append(comparison)
    return tied


def describe(
    candidates: Sequence[Candidate],
    comparisons: Sequence[Comparison],
    *,
    far: float,
) -> list[str]:
    """Return the recommendation as lines of text. far: false-accept rate of the thresholds."""
    best = recommend(candidates)
    estimate = best.estimates[RECORDED]
    interval = _interval(estimate)
    lines = [
        f"recommended: {best.name}, which has the lowest EER, {percent(best.eer)} %"
        f" ({interval})"
    ]
    if len(candidates) == 1:
        return [*lines, *_notes(candidates, far)]

    beaten: list[str] = []
    for comparison in comparisons:
        if comparison.condition == RECORDED and comparison.better is best:
            other = comparison.other(best)
            beaten.append(f"{other.name} ({_p_value(comparison.corrected_p)})")
    if beaten:
        lines.append(f"better than: {', '.join(beaten)}")
    lines += _describe_ties(best, tied_with(best, comparisons), estimate.num_speakers)
    lines += _describe_conditions(best, comparisons)
    return [*lines, *_notes(candidates, far)]


def _describe_ties(
    best: Candidate, ties: Sequence[Comparison], num_speakers: int
) -> list[str]:
    """Return lines about models that are not significantly worse than the recommended one."""
    lines: list[str] = []
    for tie in ties:
        lines.append(_describe_tie(best, tie, num_speakers))
    if any(tie.more_speakers is not None for tie in ties):
        lines.append(
            f"  (so many decide with a chance of {POWER:.0%} if the difference is as"
            " measured, and its standard error falls with the square root of the number"
            " of speakers; a smaller true difference needs more)"
        )
    equals = [best, *(tie.other(best) for tie in ties)]
    fastest = min(equals, key=lambda model: model.ms_per_second)
    if fastest is not best:
        lines.append(
            f"the fastest of these: {fastest.name}, {fastest.ms_per_second:.1f} instead"
            f" of {best.ms_per_second:.1f} ms per second of audio"
        )
    return lines


def _describe_tie(best: Candidate, tie: Comparison, num_speakers: int) -> str:
    """Return a line about a model that is not significantly worse than the recommended one."""
    name = tie.other(best).name
    speakers = count_of(num_speakers, "speaker")
    if tie.corrected_p is None:
        return f"not compared with {name}: {speakers}, five are needed"

    # The EER of the recommended model minus that of the other one.
    sign = 1 if tie.first is best else -1
    points = 100 * sign * tie.result.difference
    ends = sorted(100 * sign * end for end in tie.result.ci95 or ())
    interval = " to ".join(f"{end:+.2f}" for end in ends)
    text = (
        f"not significantly different from {name} with {speakers}: difference"
        f" {points:+.2f} points ({interval})"
    )
    if tie.more_speakers is None:
        return f"{text}; even {MAX_MORE_SPEAKERS:,} more speakers may not decide"
    return f"{text}; at least {tie.more_speakers:,} more are needed to decide"


def _describe_conditions(
    best: Candidate, comparisons: Sequence[Comparison]
) -> list[str]:
    """Return a line for each condition in which another model is better."""
    lines: list[str] = []
    for comparison in comparisons:
        condition = comparison.condition
        if condition == RECORDED or not comparison.has(best):
            continue
        if comparison.better not in (None, best):
            lines.append(
                f"but with {condition[0]} {condition[1]}:"
                f" {comparison.other(best).name} is better"
                f" ({_p_value(comparison.corrected_p)})"
            )
    return lines


def _notes(candidates: Sequence[Candidate], far: float) -> list[str]:
    """Return lines about results that are better than those of new speakers, or unreliable."""
    lines: list[str] = []
    num_alarms = round(far * candidates[0].num_others)
    if num_alarms < MIN_ALARMS:
        lines.append(
            f"thresholds: are unreliable, a false-accept rate of {100 * far:g} % is"
            f" {count_of(num_alarms, 'pair')} of {candidates[0].num_others:,}"
        )
    for candidate in candidates:
        if candidate.num_trained:
            lines.append(
                f"{candidate.name}: was trained on"
                f" {count_of(candidate.num_trained, 'speaker')} of these, so its EER is"
                " too low"
            )
        elif candidate.num_trained is None:
            lines.append(
                f"{candidate.name}: the speakers of its training are unknown (training"
                f" data: {candidate.training_data}); if it was trained on some of these, its"
                " EER is too low"
            )
    return lines


def format_candidates(
    candidates: Sequence[Candidate], *, far: float, width: int | None = None
) -> str:
    """Format the models as aligned text, the lowest EER first; width: see `results.aligned`."""
    conditions = list(candidates[0].estimates)
    header = ["model"]
    for name, value in conditions:
        header.append(f"EER % {value}" if name else "EER %")
    header += ["ms/s", "MB", f"threshold at FAR {100 * far:g} %", "misses %"]
    lines: list[Sequence[str]] = [header]
    for model in sorted(candidates, key=lambda model: model.eer):
        cells = [model.name]
        for condition in conditions:
            estimate = model.estimates[condition]
            cells.append(f"{percent(estimate.eer)} ({_interval(estimate)})")
        cells.append(f"{model.ms_per_second:.1f}")
        cells.append(f"{model.megabytes:.1f}")
        cells.append("" if model.threshold is None else f"{model.threshold:.3f}")
        cells.append(percent(model.p_miss))
        lines.append(cells)
    return aligned(lines, width=width)


def _interval(estimate: EerEstimate) -> str:
    row = {"num_speakers": estimate.num_speakers}
    return bounds(estimate.interval(), row, percent)


def _p_value(p_value: float | None) -> str:
    if p_value is None:
        return "p n/a"
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def json_values(
    candidates: Sequence[Candidate],
    comparisons: Sequence[Comparison],
) -> dict[str, Any]:
    """Return the results as values of JSON; rates are fractions."""
    models: list[dict[str, Any]] = []
    for candidate in candidates:
        conditions: list[dict[str, Any]] = []
        for (name, value), estimate in candidate.estimates.items():
            conditions.append(
                {
                    "condition": name,
                    "value": value,
                    "eer": estimate.eer,
                    "eer_ci95": estimate.interval(),
                    "num_speakers": estimate.num_speakers,
                }
            )
        models.append(
            {
                "model": candidate.name,
                "model_sha256": candidate.sha256,
                "sample_rate": candidate.sample_rate,
                "megabytes": candidate.megabytes,
                "ms_per_second": candidate.ms_per_second,
                "trained_on_speakers": candidate.num_trained,
                "training_data": candidate.training_data,
                "conditions": conditions,
                "threshold": candidate.threshold,
                "p_miss": candidate.p_miss,
            }
        )
    compared: list[dict[str, Any]] = []
    for comparison in comparisons:
        better = comparison.better
        compared.append(
            {
                "condition": comparison.condition[0],
                "value": comparison.condition[1],
                "models": [comparison.first.name, comparison.second.name],
                "eer_difference": comparison.result.difference,
                "ci95": comparison.result.ci95,
                "p_value": comparison.result.p_value,
                "corrected_p": comparison.corrected_p,
                "better": None if better is None else better.name,
                "more_speakers": comparison.more_speakers,
            }
        )
    best = recommend(candidates)
    return {
        "recommended": best.name,
        "not_told_apart": [
            tie.other(best).name for tie in tied_with(best, comparisons)
        ],
        "models": models,
        "comparisons": compared,
    }
