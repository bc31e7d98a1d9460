"""The suite's table as markdown: facts, the rows that had something to reach, all rows.

In: facts (suite_facts.py) and rows (rows.py), as measured or as stored. Out: text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rows import Row
from targets import is_reached, target

RATIO = ("name", "ours", "peer", "unit", "ratio", "quartiles")
AIMED = (*RATIO, "to be reached", "reached", "share")
HEADINGS = (*RATIO, "share", "peak MiB", "peer's", "commit")


def table(facts: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Markdown: the facts, the rows that had something to reach, then a line for each row."""
    aimed = [row for row in rows if target(row) is not None and facts["device"] == "cpu"]
    lines = [*about(facts, rows), ""]
    if aimed:
        lines += ["What was to be reached on two cores:", ""]
        lines += [*markdown(AIMED, map(aimed_cells, aimed)), "", "All rows:", ""]
    return "\n".join([*lines, *markdown(HEADINGS, map(cells, rows)), ""])


def about(facts: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    """Where, when, with which versions."""
    versions = ", ".join(f"{key} {facts[key]}" for key in ("python", "torch", "numpy"))
    gpu = f", CUDA {facts['cuda']}, driver {facts['driver']}" if "cuda" in facts["device"] else ""
    settings = "not told by what was read"
    if facts["settings"] is not None:
        settings = " ".join(f"{key}={value}" for key, value in facts["settings"].items())
    peers = "; ".join(f"{name} ({found})" for name, found in facts["peers"].items())
    dates = sorted(row["date"] for row in rows if "date" in row) or [facts["date"]]
    commits = dict.fromkeys(short(row) for row in rows if "commit" in row) or [facts["commit"]]
    yield (
        f"From {dates[0]} to {dates[-1]}, commit {', '.join(commits)}; {facts['machine']}, "
        f"{facts['cores']} cores, on {facts['device']}; {versions}{gpu}."
    )
    yield (
        f"Set for both sides: {settings or 'nothing'}. Peers: {peers or 'none'}. Recordings: "
        f"{facts.get('audio') or 'not told'}."
    )
    yield f"`{facts['command']}`" if facts["command"] else "Measured in pieces."


def short(row: Row) -> str:
    """The row's commit, seven digits of it."""
    digits, _, state = row.get("commit", "").partition("-")
    return digits[:7] + (f"-{state}" if state else "")


def markdown(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|" + "---|" * len(headings)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def ratio_cells(row: Row) -> Iterator[str]:
    """What both tables begin with: name, ours, peer, unit, ratio, quartiles."""
    quartiles = row.get("quartiles")
    yield row["name"]
    yield from (figure(row[side]) for side in ("ours", "peer"))
    yield row["unit"]
    yield "" if row["ratio"] is None else f"**{times(row['ratio'])}**"
    yield "" if quartiles is None else " - ".join(map(times, quartiles))


def times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.2f}"


def share_cell(row: Row) -> str:
    return f"{row['share']:.0%}" if row.get("share") is not None else ""


def aimed_cells(row: Row) -> Iterator[str]:
    """In the order of AIMED."""
    yield from ratio_cells(row)
    yield from (target(row) or "", "yes" if is_reached(row) else "NO", share_cell(row))


def cells(row: Row) -> Iterator[str]:
    """In the order of HEADINGS; empty where the row has nothing."""
    yield from ratio_cells(row)
    yield share_cell(row)
    yield from (figure(row.get(side)) for side in ("peak_mib", "peer_peak_mib"))
    yield short(row)


def figure(value: float | None) -> str:
    """Four digits that count."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
