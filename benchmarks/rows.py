"""Rows of what was measured, as every part writes them, and tables of growth.

A row: {"name", "ours", "peer", "ratio", "unit"}, peer and ratio None where there is no peer; where
they are known "quartiles" (of the ratio), "share", "peak_mib", "peer_peak_mib". In a file each has
the "date" and the "commit" at which it was measured, too.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sides import ROOT, Measured, say

sys.path.insert(0, str(ROOT))
from speakerlab.checkpoints import provenance

Row = Mapping[str, Any]
Figure = tuple[str, float, str]  # name, value, unit


# When a script began and of which source: `-dirty` behind a commit, any file was changed since.
STARTED = {
    "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    "commit": provenance.commit(),
}


def lone_row(name: str, value: float, unit: str) -> dict[str, Any]:
    """Of a figure that has no peer."""
    return {"name": name, "ours": value, "peer": None, "ratio": None, "unit": unit}


def report(name: str, measured: Measured, *, unit: str = "utt/s", **more: Any) -> dict[str, Any]:
    """Print a line; the row for the file. `more`: further columns, those that are None left out."""
    line = f"{name:32s} ours {measured.rate:8.2f}"
    if measured.quartiles is not None:
        low, high = measured.quartiles
        line += f"   peer {measured.peer_rate:8.2f}   ratio {measured.ratio:5.2f}"
        line += f"   (half of the pairs in {low:.2f} - {high:.2f})"
    row = lone_row(name, measured.rate, unit)
    row |= {"peer": measured.peer_rate, "ratio": measured.ratio}
    more["quartiles"] = measured.quartiles
    row |= {column: value for column, value in more.items() if value is not None}
    told = [f"{column} {value:.3g}" for column, value in more.items() if isinstance(value, float)]
    say("   ".join([f"{line}   {unit}", *told]))
    return row


def write_rows(path: Path | None, rows: Sequence[Row]) -> None:
    """Each with date and commit; nothing where `path` is None."""
    if path is not None:
        stamped = [{**row, **STARTED} for row in rows]
        path.write_text(json.dumps(stamped, indent=1) + "\n", encoding="utf-8")


def growth_lines(of: str, figures: Mapping[int, Sequence[Figure]]) -> Iterator[str]:
    """Markdown: a line a figure, a column for each size of what grows, after date and commit."""
    yield "{date}, commit {commit}".format(**STARTED)
    yield ""
    yield f"| {of} | " + " | ".join(f"{size:,}" for size in figures) + " |"
    yield "|---|" + "---|" * len(figures)
    for figures_of_name in zip(*figures.values(), strict=True):
        cells = [f"{value:,.3f} {unit}" for _, value, unit in figures_of_name]
        if figures_of_name[0][2] != "s":
            cells = [f"{value:,.4g} {unit}" for _, value, unit in figures_of_name]
        yield f"| {figures_of_name[0][0]} | {' | '.join(cells)} |"
