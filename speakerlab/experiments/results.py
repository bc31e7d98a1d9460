"""Rows of results: results.json, and tables for the console.

A row is a plain dict; `evaluate` makes those of trial lists, `speakerlab classify` those of an
identification (`"task": "identification"`).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from speakerlab.core.atomic import write_text
from speakerlab.core.reading import keys, read_json

Row = dict[str, Any]
Cell = tuple[str, list[str]]
LOCK = ".results.lock"  # in the experiment, held from reading results.json to writing the report
KEY = ("task", "trials", "data", "system", "backend")  # rows that agree in these replace each other
MAX_CLASSES_SHOWN = 20  # in a confusion table; of more, only the most frequent confusions
MAX_CONFUSIONS_SHOWN = 10
# What rows have, of trial lists and of identifications.
TEXTS = dict.fromkeys(("system", "protocol"), str)
CONDITION = keys(condition=str, value=str, eer=float | None, eer_ci95=list[float] | None)
MEASURED = keys(
    {
        **{"intervals": dict[str, list[float] | None], "min_cllr": float | None},
        **{"conditions": list[CONDITION], "num_speakers": int | None, "primary": bool},
        **dict.fromkeys(("at_threshold", "compared"), dict[str, Any] | None),
    },
    **TEXTS,
    **dict.fromkeys(("trials", "backend", "model_sha256"), str),
    **dict.fromkeys(("num_target", "num_nontarget"), int),
    **dict.fromkeys(("eer_untrained", "cllr", "act_dcf"), float | None),
    eer=float,
    eer_ci95=list[float] | None,
    min_dcf=dict[str, float],
)
IDENTIFIED = keys(
    **TEXTS,
    **dict.fromkeys(("task", "data"), str),
    **dict.fromkeys(("accuracy", "balanced_accuracy"), float),
    **dict.fromkeys(("num", "num_classes"), int),
    accuracy_ci95=list[float] | None,
    confusion=dict[str, dict[str, int]],
)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a results.json, none if there is no such file; ValueError for others."""
    if not path.is_file():
        return []
    fix = "move it away and run the command again"
    return read_json(path, list[Row], like=list[IDENTIFIED | MEASURED], fix=fix)


def update_results(path: Path, new: Sequence[Row], asked: Sequence[str] = ()) -> list[Row]:
    """Put the rows of a list into results.json, each in place of one of the same KEY.

    If one is the primary row, no other of the list is. Old rows of a back end that was asked for
    and skipped, so that it has no new row, are removed. Return all rows of the task.
    """
    rows = read_rows(path)
    skipped = {*asked} - {_steps(row) for row in new}
    has_primary = any(row.get("primary") for row in new)
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        *of_list, _ = key = tuple(row.get(name) for name in KEY)
        if of_list == [new[0].get(name) for name in KEY[:-1]]:
            if _steps(row) in skipped:
                continue
            if has_primary:
                row["primary"] = False
        kept[key] = row
    kept |= {tuple(row.get(name) for name in KEY): row for row in new}
    write_text(path, json.dumps([*kept.values()], indent=1) + "\n")
    return [row for row in kept.values() if row.get("task") == new[0].get("task")]


def _steps(row: Row) -> str:
    return row.get("backend", "").partition(",")[0]  # without options such as top-n=20


def columns_of(rows: Sequence[Row]) -> dict[str, list[Cell]]:
    """Return header -> the cell of each row of trial lists; columns that no row fills are left out.

    A cell is text, and its details: interval, comparison.
    """
    columns = {
        "EER %": [(percent(row["eer"]), [bounds(row["eer_ci95"], row, percent)]) for row in rows],
        "EER difference": [_compared(row) for row in rows],
        **{
            f"minDCF({p})": [_cell(row, row["min_dcf"].get(p), f"min_dcf_{p}") for row in rows]
            for p in priors_of(rows)
        },
        "actDCF(0.01)": [_cell(row, row["act_dcf"], "act_dcf_0.01") for row in rows],
        "Cllr": [_cell(row, row["cllr"], "cllr") for row in rows],
        "minCllr": [(number(row.get("min_cllr")), []) for row in rows],
        "at threshold %": [(percent(at_threshold(row)), []) for row in rows],
    }
    return {name: cells for name, cells in columns.items() if any(text for text, _ in cells)}


def format_table(rows: Sequence[Row]) -> str:
    """Format results of trial lists as aligned text."""
    names = {"trials": "trials", "system": "system", "back end": "backend"}
    columns = {name: [row[key] for row in rows] for name, key in names.items()}
    for name, cells in columns_of(rows).items():
        in_full = name.startswith("EER")
        columns[name] = [
            f"{text} ({', '.join(details)})" if in_full and details else text
            for text, details in cells
        ]
    columns["untrained %"] = [percent(row["eer_untrained"]) for row in rows]
    columns["targets"] = [f"{row['num_target']:,}" for row in rows]
    columns["non-targets"] = [f"{row['num_nontarget']:,}" for row in rows]
    filled = {name: texts for name, texts in columns.items() if any(texts)}
    return aligned([list(filled), *map(list, zip(*filled.values()))], num_left=3)


def format_conditions(rows: Sequence[Row], conditions: Collection[str]) -> str:
    """Format results by the values of these conditions, for each list and back end with them."""
    header = ["trials", "system", "back end", "condition", "value", "EER %", "95 % interval"]
    lines = [
        [
            *(row["trials"], row["system"], row["backend"], part["condition"], part["value"]),
            *(percent(part["eer"]), bounds(part["eer_ci95"], part, percent)),
        ]
        for row in rows
        for part in row.get("conditions", ())
        if part["condition"] in conditions
    ]
    return aligned([header, *lines], num_left=5)


def format_identification(rows: Sequence[Row]) -> str:
    header = ["data", "system", "accuracy %", "95 % interval", "balanced %", "classes", "number"]
    lines = [
        [
            *(row["data"], row["system"], percent(row["accuracy"])),
            bounds(row["accuracy_ci95"], row, percent),
            *(percent(row["balanced_accuracy"]), str(row["num_classes"]), f"{row['num']:,}"),
        ]
        for row in rows
    ]
    return aligned([header, *lines], num_left=2)


def format_confusion(row: Row) -> str:
    """Format the confusion table, true classes in rows; of many classes the most frequent."""
    table = confusion_table(row)
    if table is not None:
        return aligned([["true \\ found", *table[0]], *([n, *map(str, c)] for n, c in table[1])])
    worst = [[true, found, str(count)] for true, found, count in frequent_confusions(row)]
    return aligned([["true", "found", "number"], *worst], num_left=2)


def confusion_table(row: Row) -> tuple[list[str], list[tuple[str, list[int]]]] | None:
    """Return (names of columns, (true class, counts) of each row); None if it is too large."""
    counts_of: Mapping[str, Mapping[str, int]] = row["confusion"]
    names = sorted({*counts_of, *(found for counts in counts_of.values() for found in counts)})
    if len(names) > MAX_CLASSES_SHOWN:
        return None
    return names, [(true, [counts_of[true].get(n, 0) for n in names]) for true in sorted(counts_of)]


def frequent_confusions(row: Row) -> list[tuple[str, str, int]]:
    """Return (true class, found class, count), most frequent first."""
    wrong = [
        (true, found, count)
        for true, counts in row["confusion"].items()
        for found, count in counts.items()
        if true != found
    ]
    return sorted(wrong, key=lambda one: (-one[2], one))[:MAX_CONFUSIONS_SHOWN]


def priors_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the priors at which the rows have a minDCF, each once."""
    return list(dict.fromkeys(prior for row in rows for prior in row.get("min_dcf") or ()))


def at_threshold(row: Row) -> float | None:
    """Return the mean of miss and false-alarm rate at the threshold stored with the model."""
    rates = row.get("at_threshold")
    return None if rates is None else (rates["p_miss"] + rates["p_fa"]) / 2


def percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.2f}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def bounds(
    ci95: Sequence[float] | None, row: Mapping[str, Any], show: Callable[[float], str] = number
) -> str:
    """Return an interval, or the reason why the row has none."""
    if ci95 is None:
        num_speakers = row["num_speakers"]
        drawn = f"{row['num']} utterances" if num_speakers is None else f"{num_speakers} speakers"
        return f"n/a ({drawn})"
    return " to ".join(map(show, ci95))


def _cell(row: Row, value: float | None, metric: str) -> Cell:
    intervals = row.get("intervals", {}) if value is not None else {}
    return number(value), [bounds(intervals[metric], row)] if metric in intervals else []


def _compared(row: Row) -> Cell:
    """Format a difference in percentage points, its interval, p-value and the other back end."""
    compared = row.get("compared")
    if compared is None:
        return "", []

    def show(rate: float) -> str:
        return f"{100 * rate:+.2f}"

    p = compared["p_value"]  # None with too few speakers
    p_value = "p n/a" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
    details = [bounds(compared["ci95"], row, show), p_value, f"to {compared['with']}"]
    return show(compared["eer_difference"]), details


def aligned(lines: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """Align a header and rows of cells as text; num_left columns are flush left."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = [
        "  ".join(
            text.ljust(width) if i < num_left else text.rjust(width)
            for i, (text, width) in enumerate(zip(texts, widths))
        ).rstrip()
        for texts in lines
    ]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]])
