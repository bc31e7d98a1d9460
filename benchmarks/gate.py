"""Whether a row has lost speed. In: rows, and those that were stored (stored.py). Out: losses.

A row is held to its ratio to a peer or, measured without one, to its share of the machine's
convolution rate. Rates change with what else the machine does, ratios of sides that take turns far
less; what they still do between two runs stands in RESULTS.md. A row in doubt is measured again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rows import Row

ALLOWED_LOSS = 0.15
HELD = ("ratio", "share")  # the first that both the row and the store have
LESS_IS_BETTER = ("s", "ms", "MiB", "GB")  # units

Stored = Mapping[str, Row]  # by name


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


def judge(row: Row, stored: Row) -> Loss | None:
    """The row's loss, if it is more than allowed."""
    what = next((key for key in HELD if stored.get(key) and row.get(key) is not None), None)
    if what is None:
        return None
    found, allowed = row[what], 1 - ALLOWED_LOSS
    less_is_better = what == "ratio" and row["unit"] in LESS_IS_BETTER
    worst = stored[what] / allowed if less_is_better else stored[what] * allowed
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
        any(stored.get(row["name"], {}).get(key) and row.get(key) is not None for key in HELD)
        for row in rows
    )
