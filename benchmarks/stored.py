"""Stored rows, by kind of machine in baseline.json, and their tables in RESULTS.md.

    python benchmarks/stored.py     # write the tables of RESULTS.md from baseline.json

baseline.json: {kind of machine: {"facts": {...}, "rows": [...]}}; counts of launches depend on no
machine, only on torch. A row has its own date and commit; a fact (suite_facts.py) is of the newest
run that has it. The tables are made of this file alone.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gate import EXACT, Row
from suite_table import table

BASELINE = Path(__file__).with_name("baseline.json")
RESULTS = Path(__file__).with_name("RESULTS.md")
DIGITS = 5
BEGINS, ENDS = "<!-- stored for {kind} -->", "<!-- end of what is stored -->"

Kinds = dict[str, dict[str, Any]]


def kind_of(row: Row, facts: Mapping[str, Any]) -> str:
    """Return the kind of machine that a row is stored for."""
    return f"any, torch {facts['torch']}" if row["unit"] in EXACT else facts["machine"]


def read(kind: str, path: Path = BASELINE) -> dict[str, Row]:
    """Return the rows of a kind of machine by name. Raises ValueError if there are none."""
    kinds = read_all(path)
    if kind not in kinds:
        known = "; ".join(kinds) or "none"
        raise ValueError(f"{path}: no rows of '{kind}', only of: {known}; store some with --store")
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
) -> int:
    """Add or replace rows by name and rewrite the tables; return how many rows were stored.

    A row without a ratio, which ran without its peer, does not replace one with a ratio.
    """
    kinds = read_all(path)
    old = kinds.get(kind, {"facts": {}, "rows": []})
    kept = {row["name"]: row for row in old["rows"]}
    now = {key: facts[key] for key in ("date", "commit")}
    new = {
        row["name"]: {**now, **rounded(row)}
        for row in rows
        if row["ratio"] is not None or kept.get(row["name"], row)["ratio"] is None
    }
    known = {key: value for key, value in facts.items() if value is not None}
    known["peers"] = {**old["facts"].get("peers", {}), **facts["peers"]}
    # Only a command that measured all rows is kept.
    known["command"] = facts["command"] if kept.keys() <= new.keys() else None
    merged = list({**kept, **new}.values())
    kinds[kind] = {"facts": {**dict.fromkeys(facts), **old["facts"], **known}, "rows": merged}
    tables = None if results is None else with_tables(results.read_text(encoding="utf-8"), kinds)
    path.write_text("\n".join(lines_of(kinds)) + "\n", encoding="utf-8")
    if results is not None and tables is not None:
        results.write_text(tables, encoding="utf-8")
    return len(new)


def rounded(row: Row) -> dict[str, Any]:
    """Round numbers to DIGITS significant digits."""

    def short(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [short(one) for one in value]
        if not isinstance(value, float) or not math.isfinite(value):
            return value
        return float(f"{value:.{DIGITS}g}")

    return {key: short(value) for key, value in row.items()}


def lines_of(kinds: Kinds) -> Iterator[str]:
    """Yield JSON with a line for each row, so that a diff shows which rows changed."""
    yield "{"
    for i, (kind, kept) in enumerate(kinds.items(), start=1):
        yield f" {json.dumps(kind)}: {{"
        yield f'  "facts": {json.dumps(kept["facts"])},'
        yield '  "rows": ['
        yield ",\n".join(f"   {json.dumps(row)}" for row in kept["rows"])
        yield "  ]"
        yield " }" + ("," if i < len(kinds) else "")
    yield "}"


def with_tables(text: str, kinds: Kinds) -> str:
    """Return the text with each kind's table replaced, or added after the last one.

    Raises ValueError where a table has no end.
    """
    for kind, kept in kinds.items():
        begins = BEGINS.format(kind=kind)
        block = f"{begins}\n\n{table(kept['facts'], kept['rows'])}\n{ENDS}"
        before, found, after = text.partition(begins)
        if found:
            _, ended, after = after.partition(ENDS)
            if not ended:
                raise ValueError(
                    f"{RESULTS}: the table of '{kind}' has no end; add '{ENDS}' after it"
                )
            text = before + block + after
        elif ENDS in text:
            before, last, after = text.rpartition(ENDS)
            text = f"{before}{last}\n\n{block}{after}"
        else:
            text = f"{text.rstrip()}\n\n{block}\n"
    return text


if __name__ == "__main__":
    RESULTS.write_text(with_tables(RESULTS.read_text(encoding="utf-8"), read_all()))
