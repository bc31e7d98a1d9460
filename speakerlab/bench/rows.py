"""Rows of measurements and tables of them, for `speakerlab bench` and `benchmarks/`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ALWAYS = ("name", "ours", "peer", "ratio", "unit")  # in a file, also where they are None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; `peer`, `ratio` and `quartiles` (of the ratio) where a peer took turns."""

    name: str
    ours: float
    peer: float | None = None
    ratio: float | None = None  # ours / peer
    unit: str
    quartiles: tuple[float, float] | None = None
    gflops: float | None = None  # 10^9 operations a second in convolutions and linear layers
    share: float | None = None  # time of these layers alone / time of the step
    peak_mib: float | None = None
    peer_peak_mib: float | None = None
    note: str = ""

    def line(self) -> str:
        """Return one line of text with every value that is known."""
        more = (
            ("peer {:>8}", number(self.peer) or None),
            ("ratio {:8.2f}", self.ratio),
            ("(quartiles {0[0]:.2f} - {0[1]:.2f})", self.quartiles),
            ("{:9,.0f} GFLOP/s", self.gflops),
            ("{:6.0%} of its convolutions' rate", self.share),
            ("{:8,.0f} MiB", self.peak_mib),
        )
        parts = [form.format(value) for form, value in more if value is not None]
        first = f"{self.name:34}{number(self.ours):>12} {self.unit:12}"
        return " ".join([first, *parts, self.note]).rstrip()

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known, and always those of `ALWAYS`."""
        known = asdict(self).items()
        return {key: value for key, value in known if key in ALWAYS or value not in (None, "")}


def number(value: float | None) -> str:
    """Format a number with four significant digits, a count with all; None is empty."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def markdown(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(row)} |"
