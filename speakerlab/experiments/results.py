"""Rows of results: results.json, and tables for the console.

A row is a plain dict; `evaluate` makes the rows of trial lists, `speakerlab classify` the rows of
an identification (`"task": "identification"`).
"""

import json
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from speakerlab.core.atomic import write_text
from speakerlab.core.counting import count_of
from speakerlab.core.reading import keys, read_json

Row = dict[str, Any]
Key = tuple[Any, ...]  # values of a row
Cell = tuple[str, list[str]]  # text and its details
Confusion = tuple[str, str, int]  # true class, found class, number of utterances
# Names of the columns, then (name, counts) of each row, which is a true class.
ConfusionTable = tuple[list[str], list[tuple[str, list[int]]]]

# Lock in the experiment, held from reading results.json until the report is written.
LOCK = ".results.lock"
# A new row replaces an old row with equal values of these keys. The back end comes last: the key
# without it identifies a list.
KEY = ("task", "trials", "data", "system", "backend")
# A larger confusion table does not fit on a page; the most frequent confusions are shown instead.
MAX_CLASSES_SHOWN = 20
MAX_CONFUSIONS_SHOWN = 10
# Of a terminal's width: longer names are not repeated in each part of a table.
MAX_NAMES_SHARE = 0.4
# Names of the weights that a training began with: random, or of --init.
UNTRAINED = "untrained"
BEFORE_TUNING = "before fine-tuning"

# Required keys of a row, then optional keys. Rows of former versions have fewer keys.
CONDITION = keys(
    condition=str,
    value=str,
    eer=float | None,
    eer_ci95=list[float] | None,
)
MEASURED = keys(
    system=str,
    protocol=str,
    trials=str,
    backend=str,
    model_sha256=str,
    num_target=int,
    num_nontarget=int,
    eer_untrained=float | None,
    cllr=float | None,
    act_dcf=float | None,
    eer=float,
    eer_ci95=list[float] | None,
    min_dcf=dict[str, float],
    may={
        "intervals": dict[str, list[float] | None],
        "min_cllr": float | None,
        "conditions": list[CONDITION],
        "num_speakers": int | None,
        "primary": bool,
        "fine_tuned": bool,
        "at_threshold": dict[str, Any] | None,
        "compared": dict[str, Any] | None,
    },
)
IDENTIFIED = keys(
    system=str,
    protocol=str,
    task=str,
    data=str,
    accuracy=float,
    balanced_accuracy=float,
    num=int,
    num_classes=int,
    accuracy_ci95=list[float] | None,
    confusion=dict[str, dict[str, int]],
)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a results.json, [] if it is missing; ValueError for other content."""
    if not path.is_file():
        return []
    return read_json(
        path,
        list[Row],
        like=list[IDENTIFIED | MEASURED],
        fix="move it away and run the command again",
    )


def update_results(
    path: Path,
    new: Sequence[Row],
    asked: Sequence[str] = (),
) -> list[Row]:
    """Put the rows of a list into results.json, each in place of an old row with the same KEY.

    If a new row is primary, the list's other rows are not. Old rows of a back end in `asked` that
    was skipped, and so has no new row, are removed. Return all rows of the task.
    """
    first_key = _key(new[0])
    scored_back_ends = {_back_end(row) for row in new}
    skipped = set(asked) - scored_back_ends
    has_primary = any(row.get("primary") for row in new)

    # A new row takes the place of the old row, so that the order of a report does not change.
    rows_by_key: dict[Key, Row] = {}
    for row in read_rows(path):
        key = _key(row)
        is_same_list = key[:-1] == first_key[:-1]
        if is_same_list:
            # The back end now has too little to learn from, so its old row is out of date.
            if _back_end(row) in skipped:
                continue
            if has_primary:
                row["primary"] = False
        rows_by_key[key] = row
    for row in new:
        rows_by_key[_key(row)] = row

    rows = list(rows_by_key.values())
    text = json.dumps(rows, indent=1)
    write_text(path, f"{text}\n")
    task = new[0].get("task")
    return [row for row in rows if row.get("task") == task]


def _key(row: Row) -> Key:
    return tuple(row.get(name) for name in KEY)


def _back_end(row: Row) -> str:
    """Return the name of a back end without its options, such as top-n=20."""
    name, _, _ = row.get("backend", "").partition(",")
    return name


def columns_of(rows: Sequence[Row]) -> dict[str, list[Cell]]:
    """Return header -> the cell of each row of trial lists; empty columns are left out.

    A cell is text, and its details: interval, comparison.
    """
    # `_cells_of` returns the same headers for all rows, so cell i of a column belongs to row i.
    priors = priors_of(rows)
    columns: dict[str, list[Cell]] = {}
    for row in rows:
        for header, cell in _cells_of(row, priors).items():
            columns.setdefault(header, []).append(cell)

    for header, cells in list(columns.items()):
        is_filled = any(text for text, _ in cells)
        if not is_filled:
            del columns[header]
    return columns


def _cells_of(row: Row, priors: Sequence[str]) -> dict[str, Cell]:
    """Return header -> cell of a row; the text of a missing metric is empty."""
    eer_interval = bounds(row["eer_ci95"], row, percent)
    cells: dict[str, Cell] = {
        "EER %": (percent(row["eer"]), [eer_interval]),
        "EER difference": _compared(row),
    }
    for prior in priors:
        min_dcf = row["min_dcf"].get(prior)
        cells[f"minDCF({prior})"] = _cell(row, min_dcf, f"min_dcf_{prior}")
    cells |= {
        "actDCF(0.01)": _cell(row, row["act_dcf"], "act_dcf_0.01"),
        "Cllr": _cell(row, row["cllr"], "cllr"),
        "minCllr": (number(row.get("min_cllr")), []),
        "at threshold %": (percent(at_threshold(row)), []),
    }
    return cells


def initial_name(row: Mapping[str, Any]) -> str:
    """Return the name of the initial weights, whose EER is `eer_untrained`."""
    return BEFORE_TUNING if row.get("fine_tuned") else UNTRAINED


def format_table(rows: Sequence[Row], width: int | None = None) -> str:
    """Format results of trial lists as aligned text; width: see `aligned`."""
    table = aligned(_lines_of(rows), num_left=3)
    if width is None or _width(table) <= width:
        return table
    lines = _lines_of(rows, apart=True)
    return aligned(lines, num_left=3, width=width)


def _lines_of(rows: Sequence[Row], *, apart: bool = False) -> list[Sequence[str]]:
    """Return header and lines of the table of trial lists; empty columns are left out.

    apart: put the interval of an EER into a column of its own, where a table can be broken.
    """
    columns = {
        "trials": [row["trials"] for row in rows],
        "system": [row["system"] for row in rows],
        "back end": [row["backend"] for row in rows],
    }
    metrics = columns_of(rows)
    for name, cells in metrics.items():
        texts = [text for text, _ in cells]
        columns[name] = texts
        # Details of all metrics would make the lines too long.
        if not name.startswith("EER"):
            continue
        details = [", ".join(texts_of_cell) for _, texts_of_cell in cells]
        if apart:
            columns[f"{name}: interval"] = details
            continue
        for number, detail in enumerate(details):
            if detail:
                texts[number] += f" ({detail})"

    # A table may hold trainings from random weights and fine-tunings.
    for initial in (UNTRAINED, BEFORE_TUNING):
        eers: list[str] = []
        for row in rows:
            is_shown = initial_name(row) == initial
            eers.append(percent(row["eer_untrained"]) if is_shown else "")
        columns[f"{initial} %"] = eers
    columns["targets"] = [f"{row['num_target']:,}" for row in rows]
    columns["non-targets"] = [f"{row['num_nontarget']:,}" for row in rows]

    header: list[str] = []
    filled_columns: list[list[str]] = []
    for name, texts in columns.items():
        if any(texts):
            header.append(name)
            filled_columns.append(texts)
    return [header, *zip(*filled_columns)]


def format_conditions(
    rows: Sequence[Row],
    conditions: Collection[str],
    width: int | None = None,
) -> str:
    """Format the results of these conditions by value, for each list and back end with them.

    width: see `aligned`.
    """
    header = [
        "trials",
        "system",
        "back end",
        "condition",
        "value",
        "EER %",
        "95 % interval",
    ]
    lines = [header]
    for row in rows:
        # Rows of lists without conditions, and rows of former versions, lack this key.
        for part in row.get("conditions", ()):
            if part["condition"] not in conditions:
                continue
            line = [
                row["trials"],
                row["system"],
                row["backend"],
                part["condition"],
                part["value"],
                percent(part["eer"]),
                bounds(part["eer_ci95"], part, percent),
            ]
            lines.append(line)
    return aligned(lines, num_left=5, width=width)


def format_identification(rows: Sequence[Row], width: int | None = None) -> str:
    """Format results of identification as aligned text; width: see `aligned`."""
    header = [
        "data",
        "system",
        "accuracy %",
        "95 % interval",
        "balanced %",
        "classes",
        "number",
    ]
    lines = [header]
    for row in rows:
        line = [
            row["data"],
            row["system"],
            percent(row["accuracy"]),
            bounds(row["accuracy_ci95"], row, percent),
            percent(row["balanced_accuracy"]),
            str(row["num_classes"]),
            f"{row['num']:,}",
        ]
        lines.append(line)
    return aligned(lines, num_left=2, width=width)


def format_confusion(row: Row, width: int | None = None) -> str:
    """Format the confusion table, true classes in rows; only the worst if there are many.

    width: see `aligned`.
    """
    table = confusion_table(row)
    if table is None:
        lines = [["true", "found", "number"]]
        for true, decided, count in frequent_confusions(row):
            lines.append([true, decided, str(count)])
        return aligned(lines, num_left=2, width=width)

    classes, counts_of_classes = table
    lines = [["true \\ found", *classes]]
    for true, counts in counts_of_classes:
        texts = [str(count) for count in counts]
        lines.append([true, *texts])
    return aligned(lines, width=width)


def confusion_table(row: Row) -> ConfusionTable | None:
    """Return (names of columns, (true class, counts) of each row); None if too large."""
    confusion = row["confusion"]  # true class -> found class -> count
    # A row of results.json holds only the counts above 0.
    names = set(confusion)
    for counts in confusion.values():
        names.update(counts)
    if len(names) > MAX_CLASSES_SHOWN:
        return None

    classes = sorted(names)
    lines: list[tuple[str, list[int]]] = []
    for true in sorted(confusion):
        count_of = confusion[true]
        counts = [count_of.get(decided, 0) for decided in classes]
        lines.append((true, counts))
    return classes, lines


def frequent_confusions(row: Row) -> list[Confusion]:
    """Return (true class, found class, count), most frequent first."""
    wrong: list[Confusion] = []
    for true, counts in row["confusion"].items():
        for decided, count in counts.items():
            if true != decided:
                wrong.append((true, decided, count))

    # The sort is stable: confusions of equal count stay in alphabetical order.
    wrong.sort()
    wrong.sort(key=itemgetter(2), reverse=True)
    return wrong[:MAX_CONFUSIONS_SHOWN]


def priors_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the priors at which the rows have a minDCF, each once."""
    priors: dict[str, None] = {}  # a set that keeps the order of the rows
    for row in rows:
        # A condition without targets or non-targets has no minDCF.
        min_dcf = row.get("min_dcf") or {}
        priors |= dict.fromkeys(min_dcf)
    return list(priors)


def at_threshold(row: Row) -> float | None:
    """Return the mean of miss and false-alarm rate at the threshold stored with the model."""
    rates = row.get("at_threshold")
    if rates is None:
        return None
    total = rates["p_miss"] + rates["p_fa"]
    return total / 2


def percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.2f}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def bounds(
    ci95: Sequence[float] | None,
    row: Mapping[str, Any],
    show: Callable[[float], str] = number,
) -> str:
    """Return an interval, or the reason why the row has none."""
    if ci95 is not None:
        return " to ".join(map(show, ci95))
    # Without speakers, the bootstrap draws single utterances.
    num_speakers = row["num_speakers"]
    if num_speakers is None:
        return f"n/a ({count_of(row['num'], 'utterance')})"
    return f"n/a ({count_of(num_speakers, 'speaker')})"


def _cell(row: Row, value: float | None, metric: str) -> Cell:
    if value is None:
        return "", []
    # Rows of former versions have an interval of the EER only.
    intervals = row.get("intervals", {})
    if metric not in intervals:
        return number(value), []
    interval = bounds(intervals[metric], row)
    return number(value), [interval]


def _compared(row: Row) -> Cell:
    """Format a difference in percentage points, its interval, p-value and the other back end."""
    compared = row.get("compared")
    if compared is None:
        return "", []

    def show(rate: float) -> str:
        return f"{100 * rate:+.2f}"

    p_value = compared["p_value"]
    if p_value is None:  # too few speakers
        significance = "p n/a"
    elif p_value < 0.001:
        significance = "p < 0.001"
    else:
        significance = f"p = {p_value:.3f}"
    interval = bounds(compared["ci95"], row, show)
    details = [interval, significance, f"to {compared['with']}"]
    return show(compared["eer_difference"]), details


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def aligned(
    lines: Sequence[Sequence[str]],
    *,
    num_left: int = 1,
    width: int | None = None,
) -> str:
    """Align a header and rows of cells as text; num_left columns are flush left.

    width: columns of the terminal, None for any. A wider table is broken into several tables. Names
    that all rows share stand above; other long names are in the first table, with numbers that
    stand for them in the following tables.
    """
    columns = [list(column) for column in zip(*lines)]
    whole = _align_columns(columns, num_left=num_left)
    if width is None or _width(whole) <= width:
        return whole

    names: list[list[str]] = []
    shared: list[str] = []
    for header, *cells in columns[:num_left]:
        if len(set(cells)) == 1:
            shared.append(f"{header}: {cells[0]}")
        else:
            names.append([header, *cells])
    tables = ["\n".join(shared)] if shared else []
    named = _align_columns(names, num_left=len(names))
    if names and _width(named) > MAX_NAMES_SHARE * width:
        numbers = ["no.", *map(str, range(1, len(lines)))]
        tables.append(_align_columns([numbers, *names], num_left=len(names) + 1))
        names = [numbers]
    tables += _break_columns(names, columns[num_left:], width)
    return "\n\n".join(tables)


def _break_columns(
    names: Sequence[Sequence[str]],
    columns: Sequence[Sequence[str]],
    width: int,
) -> list[str]:
    """Return tables no wider than `width`, each with the names and some of the columns.

    A table has as many columns as fit, but at least one.
    """

    def align(shown: Sequence[Sequence[str]]) -> str:
        return _align_columns([*names, *shown], num_left=len(names))

    tables: list[str] = []
    shown: list[Sequence[str]] = []
    for column in columns:
        if shown and _width(align([*shown, column])) > width:
            tables.append(align(shown))
            shown = []
        shown.append(column)
    return [*tables, align(shown)]


def _align_columns(columns: Sequence[Sequence[str]], *, num_left: int) -> str:
    """Align columns, each a header and its cells."""
    padded: list[list[str]] = []
    for number, column in enumerate(columns):
        size = max(map(len, column))
        # Names are flush left, numbers flush right.
        is_left = number < num_left
        align = str.ljust if is_left else str.rjust
        header, *cells = [align(text, size) for text in column]
        padded.append([header, "-" * size, *cells])
    # Trailing blanks would wrap in a narrow terminal.
    rows = ["  ".join(cells).rstrip() for cells in zip(*padded)]
    return "\n".join(rows)


def _width(table: str) -> int:
    return max(map(len, table.splitlines()), default=0)
