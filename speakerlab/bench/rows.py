"""Rows of measurements, as `speakerlab bench` prints them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    name: str
    ours: float
    unit: str
    note: str = ""

    def line(self) -> str:
        return f"{self.name:34}{number(self.ours):>12} {self.unit:12} {self.note}".rstrip()


def number(value: float | None) -> str:
    """Format a number with four significant digits, a count with all; None is empty."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"
