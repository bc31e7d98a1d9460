"""Rows of the benchmarks: a measurement beside that of a peer, and their table."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from speakerlab.bench import stopwatch
from speakerlab.bench.stopwatch import number

# Fields that a file has for every row, also where they are None.
ALWAYS = ("name", "ours", "peer", "ratio", "unit")
HEADINGS = ("name", "ours", "peer", "unit", "ratio", "quartiles", "MiB", "peer's MiB")


@dataclass(frozen=True, kw_only=True)
class Row(stopwatch.Row):
    """One measurement; `peer`, `ratio` and `quartiles` where a peer took turns."""

    peer: float | None = None
    ratio: float | None = None  # ours / peer
    quartiles: tuple[float, float] | None = None  # of the ratios of the turns
    peak_mib: float | None = None
    peer_peak_mib: float | None = None

    def line(self) -> str:
        """Return one line of text with every value that the row has."""
        cells = [f"{self.name:34}{number(self.ours):>12} {self.unit:12}"]
        if self.peer is not None:
            cells.append(f"peer {number(self.peer):>8}")
        if self.ratio is not None:
            cells.append(f"ratio {self.ratio:8.2f}")
        if self.quartiles is not None:
            low, high = self.quartiles
            cells.append(f"(quartiles {low:.2f} - {high:.2f})")
        if self.peak_mib is not None:
            cells.append(f"{self.peak_mib:8,.0f} MiB")
        cells.append(self.note)
        return " ".join(cells).rstrip()

    def to_json(self) -> dict[str, Any]:
        """Return the fields that have a value, and always those of `ALWAYS`."""
        fields = asdict(self)
        values = {name: fields.pop(name) for name in ALWAYS}
        for name, value in fields.items():
            if value not in (None, ""):
                values[name] = value
        return values


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows, as a file has them, as a Markdown table."""
    lines = [HEADINGS, ["---"] * len(HEADINGS)]
    lines += [list(cells(row)) for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of HEADINGS; a missing value is an empty cell."""
    yield row["name"]
    yield number(row["ours"])
    yield number(row["peer"])
    yield row["unit"]
    yield "" if row["ratio"] is None else f"**{ratio(row['ratio'])}**"
    yield " - ".join(ratio(value) for value in row.get("quartiles", ()))
    yield number(row.get("peak_mib"))
    yield number(row.get("peer_peak_mib"))


def ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
