"""Whether EER and minDCF are those of the peers, on lists where the answer can be known.

In: sides that compute the rates of a file of scores. Out: a line for each kind of list, rows.

The definition here is as slow as it is plain: every threshold that makes a difference, the whole
list for each. A trial is accepted where score >= threshold.
Letters: N trials, K thresholds.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rows import lone_row
from sides import Process, say

CLOSE = 1e-9  # two figures that are the same but for rounding
NUM_LISTS = 20  # of random scores
NUM_ORDERS = 20  # of the same trials


class Case(NamedTuple):
    """Trials with an answer."""

    name: str
    scores_N: np.ndarray
    is_target_N: np.ndarray
    p_target: float = 0.01


def by_definition(case: Case) -> dict[str, float]:
    """EER, by the straight line between the two points around the crossing, and minDCF."""
    threshold_K = np.append(np.unique(case.scores_N), np.inf)
    accepted_KN = case.scores_N >= threshold_K[:, None]
    miss_K = 1 - accepted_KN[:, case.is_target_N].mean(axis=1)
    fa_K = accepted_KN[:, ~case.is_target_N].mean(axis=1)
    after = int(np.flatnonzero(miss_K >= fa_K)[0])
    above, below = fa_K[after - 1] - miss_K[after - 1], miss_K[after] - fa_K[after]
    share = above / (above + below)
    p = case.p_target
    return {
        "eer": float(miss_K[after - 1] + share * (miss_K[after] - miss_K[after - 1])),
        "min_dcf": float((p * miss_K + (1 - p) * fa_K).min() / min(p, 1 - p)),
    }


def random_case(seed: int, *, decimals: int | None = None, num: int = 2000) -> Case:
    """Two normal distributions; with `decimals` rounded, so that many scores are equal."""
    rng = np.random.default_rng(seed)
    is_target_N = rng.random(num) < 0.2
    scores_N = rng.standard_normal(num) + 1.5 * is_target_N
    return Case("random", scores_N if decimals is None else scores_N.round(decimals), is_target_N)


def edge_cases() -> Iterator[Case]:
    """Where the peers' operating points leave something out."""
    rising = np.arange(5.0)
    yield Case("all scores equal", np.zeros(8), np.arange(8) < 4)
    yield Case("one target, scored lowest", rising, rising == 0)
    yield Case("useless scores, prior 0.99", -rising, rising > 2, 0.99)
    yield Case("perfect scores", rising, rising > 2)


def compare(sides: Mapping[str, Process], folder: Path) -> list[dict[str, Any]]:
    """Print what is equal and what is not; a row for each peer and metric on random scores.

    `sides`: "ours" and the peers. Exits where ours is not what the definition says.
    """
    asked = Questions(sides, folder)
    rows = compare_random(asked)
    for decimals in (2, 1):
        compare_ties(asked, decimals)
    for case in edge_cases():
        answers = asked.ask(case)
        listed = ", ".join(f"{side} {told(answer)}" for side, answer in answers.items())
        say(f"{case.name}: {listed}")
    broken = Case("a score that is no number", np.array([0.1, np.nan, 0.3]), np.arange(3) > 0)
    answers = asked.ask(broken, known=False)
    say(f"{broken.name}: " + ", ".join(f"{side} {told(a)}" for side, a in answers.items()))
    for side, process in sides.items():
        if side != "ours":
            error = process.tell(do="histogram", path=str(asked.path))["error"]
            say(f"compute_pmiss_pfa of {side}, which it does not use: {error or 'works'}")
    return rows


class Questions:
    """Asks every side about the same trials, and holds ours to the definition."""

    def __init__(self, sides: Mapping[str, Process], folder: Path) -> None:
        self.sides, self.path = sides, folder / "case.npz"

    def ask(self, case: Case, *, known: bool = True) -> dict[str, dict[str, Any]]:
        """side -> {"eer", "min_dcf"} or {"error"}; with `known` the definition's, too."""
        np.savez(self.path, scores=case.scores_N, is_target=case.is_target_N)
        order = {"do": "rates", "path": str(self.path), "p_target": case.p_target}
        answers = {side: process.tell(**order) for side, process in self.sides.items()}
        if known:
            right = by_definition(case)
            if any(abs(answers["ours"][metric] - right[metric]) > CLOSE for metric in right):
                raise SystemExit(f"{case.name}: ours is wrong, got {answers['ours']}, not {right}")
        return answers


def compare_random(asked: Questions) -> list[dict[str, Any]]:
    """No two scores are equal: all must agree."""
    cases = [random_case(seed) for seed in range(NUM_LISTS)]
    answers = [asked.ask(case) for case in cases]
    rows = []
    for side in list(answers[0])[1:]:
        for metric in ("eer", "min_dcf"):
            furthest = max(abs(a["ours"][metric] - a[side][metric]) for a in answers)
            verdict = "equal" if furthest < CLOSE else "NOT EQUAL"
            say(f"{NUM_LISTS} random lists, {metric}: {verdict} to {side}, to {furthest:.0e}")
            ours, peer = answers[0]["ours"][metric], answers[0][side][metric]
            suffix = "" if side == "3dspeaker" else f".{side}"
            row = lone_row(f"score.{metric}{suffix}", ours, "fraction")
            rows.append({**row, "peer": peer})  # no ratio: equal, not faster or slower
    return rows


def compare_ties(asked: Questions, decimals: int) -> None:
    """Equal scores make one operating point: the order of the trials must not matter."""
    case = random_case(0, decimals=decimals)
    rng = np.random.default_rng(0)
    orders = [np.argsort(~case.is_target_N), np.argsort(case.is_target_N)]
    orders += [rng.permutation(len(case.scores_N)) for _ in range(NUM_ORDERS)]
    shuffled = [
        case._replace(scores_N=case.scores_N[o], is_target_N=case.is_target_N[o]) for o in orders
    ]
    answers = [asked.ask(one) for one in shuffled]
    ties = len(case.scores_N) - len(np.unique(case.scores_N))
    say(f"{ties} of {len(case.scores_N)} scores tied, the same trials in {len(orders)} orders:")
    for side in answers[0]:
        spans = []
        for metric in ("eer", "min_dcf"):
            values = sorted(answer[side][metric] for answer in answers)
            spans.append(f"{metric} {values[0]:.6f} to {values[-1]:.6f}")
        say(f"  {side:10s} {', '.join(spans)}")


def told(answer: Mapping[str, Any]) -> str:
    """An answer in a few words."""
    if "error" in answer:
        return f"'{answer['error']}'"
    return f"EER {answer['eer']:.4f} minDCF {answer['min_dcf']:.4f}"
