"""What the suite keeps: rows by kind of machine in baseline.json, their table in RESULTS.md.

baseline.json: {kind of machine: {"facts": {...}, "rows": [...]}}; a fact is of the newest run
that tells it (joined files tell no peers), a row has its own date and commit. The table of
RESULTS.md is made of this file alone.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import Row
from suite_table import table

BASELINE = Path(__file__).with_name("baseline.json")
RESULTS = Path(__file__).with_name("RESULTS.md")
DIGITS = 5
BEGINS, ENDS = "<!-- stored for {kind} -->", "<!-- end of what is stored -->"

Kinds = dict[str, dict[str, Any]]


def read(kind: str, path: Path = BASELINE) -> dict[str, Row]:
    """The rows of a kind of machine, by name. Raises ValueError if there are none."""
    kinds = read_all(path)
    if kind not in kinds:
        known = "; ".join(kinds) or "nothing"
        raise ValueError(
            f"{path}: must have ratios of this kind of machine, '{kind}', got {known}; store them "
            "with --store"
        )
    return {row["name"]: row for row in kinds[kind]["rows"]}


def read_all(path: Path = BASELINE) -> Kinds:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store(
    kind: str,
    rows: Sequence[Row],
    *,
    facts: Mapping[str, Any],
    path: Path = BASELINE,
    results: Path | None = RESULTS,
) -> None:
    """Add the rows, or put them in the place of those of their names; make the table anew."""
    kinds = read_all(path)
    old = kinds.get(kind, {"facts": {}, "rows": []})
    now = {key: facts[key] for key in ("date", "commit")}
    merged = {row["name"]: row for row in old["rows"]}
    merged |= {row["name"]: {**now, **rounded(row)} for row in rows}
    told = {key: value for key, value in facts.items() if value or key not in old["facts"]}
    told["peers"] = {**old["facts"].get("peers", {}), **facts["peers"]}
    kinds[kind] = {"facts": {**old["facts"], **told}, "rows": list(merged.values())}
    path.write_text("\n".join(lines_of(kinds)) + "\n", encoding="utf-8")
    if results is not None:
        text = results.read_text(encoding="utf-8")
        results.write_text(with_table(text, kind, kinds[kind]), encoding="utf-8")


def rounded(row: Row) -> dict[str, Any]:
    """Numbers to DIGITS digits that count."""

    def short(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [short(one) for one in value]
        if not isinstance(value, float) or not math.isfinite(value):
            return value
        return float(f"{value:.{DIGITS}g}")

    return {key: short(value) for key, value in row.items()}


def lines_of(kinds: Kinds) -> Iterator[str]:
    """JSON, a line a row, so that a change of one is a change of one line."""
    yield "{"
    for i, (kind, kept) in enumerate(kinds.items(), start=1):
        yield f" {json.dumps(kind)}: {{"
        yield f'  "facts": {json.dumps(kept["facts"])},'
        yield '  "rows": ['
        rows = [f"   {json.dumps(row)}" for row in kept["rows"]]
        yield ",\n".join(rows)
        yield "  ]"
        yield " }" + ("," if i < len(kinds) else "")
    yield "}"


def with_table(text: str, kind: str, kept: Mapping[str, Any]) -> str:
    """The text with the table of this kind of machine in its place, or behind the last one."""
    begins = BEGINS.format(kind=kind)
    block = f"{begins}\n\n{table(kept['facts'], kept['rows'])}\n{ENDS}"
    before, found, after = text.partition(begins)
    if found:
        return before + block + after.partition(ENDS)[2]
    before, last, after = text.rpartition(ENDS) if ENDS in text else (text.rstrip(), "", "\n")
    return f"{before}{last}\n\n{block}{after}"
