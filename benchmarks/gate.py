"""Whether a row has lost speed. In: rows, and what was stored for this kind of machine. Out: names.

`benchmarks/baseline.json`: {kind of machine: {"commit", "date", "rows": {name: {"ratio": r} or
{"share": s}}}}. A row is held to its ratio to a peer or, measured without one, to its share of the
machine's convolution rate: both are about the same on every day of one machine, rates are not.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).with_name("baseline.json")
ALLOWED_LOSS = 0.15
HELD = ("ratio", "share")  # the first that both the row and the store have
LESS_IS_BETTER = ("s", "ms", "MiB", "GB")  # units

Row = Mapping[str, Any]
Stored = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Loss:
    """A row that lost more than is allowed."""

    name: str
    what: str  # of HELD
    stored: float
    found: float
    is_certain: bool  # false: its quartiles reach what is allowed, or are not known

    def __str__(self) -> str:
        change = abs(self.found / self.stored - 1)
        worse = "less" if self.found < self.stored else "more"
        return (
            f"{self.name}: {self.what} must be within {ALLOWED_LOSS:.0%} of {self.stored:.3g}, got "
            f"{self.found:.3g}, {change:.0%} {worse}"
        )


def limit(stored: float, unit: str) -> float:
    """The worst value that is allowed."""
    return stored / (1 - ALLOWED_LOSS) if unit in LESS_IS_BETTER else stored * (1 - ALLOWED_LOSS)


def judge(row: Row, stored: Mapping[str, float]) -> Loss | None:
    """The row's loss, if it is more than allowed."""
    what = next((key for key in HELD if key in stored and row.get(key) is not None), None)
    if what is None:
        return None
    found, worst, unit = row[what], limit(stored[what], row["unit"]), row["unit"]
    less_is_better = what == "ratio" and unit in LESS_IS_BETTER
    if what == "share":
        worst = limit(stored[what], "")
    if found <= worst if less_is_better else found >= worst:
        return None
    quartiles = row.get("quartiles") if what == "ratio" else None
    reaches = quartiles is None or (
        quartiles[0] <= worst if less_is_better else quartiles[1] >= worst
    )
    return Loss(row["name"], what, stored[what], found, is_certain=not reaches)


def losses(rows: Iterable[Row], stored: Stored) -> list[Loss]:
    """Of the rows that are stored; what is in one of the two only is not judged."""
    found = (judge(row, stored[row["name"]]) for row in rows if row["name"] in stored)
    return [loss for loss in found if loss is not None]


def num_judged(rows: Iterable[Row], stored: Stored) -> int:
    """How many rows have something to be held to."""
    return sum(
        any(key in stored.get(row["name"], {}) and row.get(key) is not None for key in HELD)
        for row in rows
    )


def read(kind: str, path: Path = BASELINE) -> Stored:
    """What is stored for a kind of machine. Raises ValueError if nothing is."""
    kinds = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if kind not in kinds:
        known = "; ".join(kinds) or "nothing"
        raise ValueError(
            f"{path}: must have ratios of this kind of machine, '{kind}', got {known}; store them "
            "with --store"
        )
    return kinds[kind]["rows"]


def store(kind: str, rows: Sequence[Row], *, facts: Mapping[str, str], path: Path) -> int:
    """Add the rows, or put them in the place of those of their names; how many there were."""
    kinds = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    new = {
        row["name"]: {key: round(row[key], 4) for key in HELD if row.get(key) is not None}
        for row in rows
    }
    old = kinds.get(kind, {}).get("rows", {})
    new = {name: kept for name, kept in new.items() if kept}
    kinds[kind] = {**facts, "rows": dict(sorted({**old, **new}.items()))}
    path.write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
    return len(new)
