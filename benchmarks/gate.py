"""Whether a row is worse than what is stored (stored.py).

A row's ratio to a peer is compared or, without a peer, its share of the machine's convolution rate;
of an EER and a count, which do not depend on the load of the machine, the value. A count may not
grow at all.
Rates change with the load of the machine; ratios of sides that take turns change far less. A row
whose quartiles reach the limit is measured again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]  # as in a file: name, ours, peer, ratio, unit and optional fields
ALLOWED_LOSS = 0.15
COMPARED = ("ratio", "share")  # the first that both the row and the store have
LESS_IS_BETTER = ("s", "ms", "MiB", "GB", "EER %", "DER %", "launches")  # units
BY_VALUE = ("EER %", "launches")  # units
EXACT = ("launches",)  # units


@dataclass(frozen=True)
class Loss:
    """A row that lost more than is allowed."""

    name: str
    what: str  # of COMPARED, or "ours"
    stored: float
    found: float
    is_certain: bool  # false: its quartiles reach what is allowed, or are not known

    def __str__(self) -> str:
        change = self.found / self.stored - 1
        return (
            f"{self.name}: {self.what} {self.found:.5g}, stored {self.stored:.5g} ({change:+.0%})"
        )


def compared(row: Row, stored: Row) -> str | None:
    """Return which of COMPARED both rows have, or "ours" for units compared by value."""
    keys = ("ours",) if row["unit"] in BY_VALUE else COMPARED
    return next((key for key in keys if stored.get(key) and row.get(key) is not None), None)


def judge(row: Row, stored: Row) -> Loss | None:
    """Return the row's loss, if it is more than allowed."""
    what = compared(row, stored)
    if what is None:
        return None
    is_exact = row["unit"] in EXACT
    found, allowed = row[what], 1.0 if is_exact else 1 - ALLOWED_LOSS
    quartiles = row.get("quartiles") if what == "ratio" else None
    if what != "share" and row["unit"] in LESS_IS_BETTER:
        limit = stored[what] / allowed
        is_lost = found > limit
        reaches = not is_exact and (quartiles is None or quartiles[0] <= limit)
    else:
        limit = stored[what] * allowed
        is_lost, reaches = found < limit, quartiles is None or quartiles[1] >= limit
    return Loss(row["name"], what, stored[what], found, not reaches) if is_lost else None


def losses(rows: Iterable[Row], stored: Mapping[str, Row]) -> list[Loss]:
    """Return the losses of the rows that are stored, by name; others are not judged."""
    found = (judge(row, stored[row["name"]]) for row in rows if row["name"] in stored)
    return [loss for loss in found if loss is not None]


def num_judged(rows: Iterable[Row], stored: Mapping[str, Row]) -> int:
    """Return how many rows have a stored value to be compared with."""
    return sum(compared(row, stored.get(row["name"], {})) is not None for row in rows)
