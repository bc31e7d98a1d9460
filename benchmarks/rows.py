"""Rows of the benchmarks: a measurement beside that of a peer, and tables of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from speakerlab.bench import stopwatch
from speakerlab.bench.stopwatch import number

ALWAYS = ("name", "ours", "peer", "ratio", "unit")  # in a file, also where they are None


@dataclass(frozen=True, kw_only=True)
class Row(stopwatch.Row):
    """One measurement; `peer`, `ratio` and `quartiles` (of the ratio) where a peer took turns."""

    peer: float | None = None
    ratio: float | None = None  # ours / peer
    quartiles: tuple[float, float] | None = None
    share: float | None = None  # time of convolutions and linear layers alone / time of the step
    peak_mib: float | None = None
    peer_peak_mib: float | None = None

    def line(self) -> str:
        """Return one line of text with every value that is known."""
        more = (
            ("peer {:>8}", number(self.peer) or None),
            ("ratio {:8.2f}", self.ratio),
            ("(quartiles {0[0]:.2f} - {0[1]:.2f})", self.quartiles),
            ("{:6.0%} of its convolutions' rate", self.share),
            ("{:8,.0f} MiB", self.peak_mib),
        )
        parts = [form.format(value) for form, value in more if value is not None]
        first = f"{self.name:34}{number(self.ours):>12} {self.unit:12}"
        return " ".join([first, *parts, self.note]).rstrip()

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known, and always those of `ALWAYS`."""
        known = asdict(self)
        always = {key: known.pop(key) for key in ALWAYS}
        return always | {key: value for key, value in known.items() if value not in (None, "")}


def markdown(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(row)} |"
