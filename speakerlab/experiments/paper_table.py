"""Table of systems for papers: EER and minDCF on trial lists, with intervals; the best in bold.

In: systems on trial lists. Out: LaTeX, Markdown or CSV. The numbers are those of `speakerlab
score`.

The best system of a column is bold if it is significantly better than each other system: by the
paired bootstrap over speakers on the same trials, p < 0.05 after Holm's correction for the
comparisons of the column. A slow test simulates equally good systems, of which the best is chosen
on the same trials: it is bold in less than 5 % of the columns.
Letters: S systems.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from speakerlab.experiments.results import number, percent
from speakerlab.experiments.run_table import LEVEL, holm, least_p
from speakerlab.experiments.systems import MIN_DCF, NamedList, NamedSystem, Scored

EER = "eer"
MISSING = "-"
# A backslash would otherwise escape those of the others.
LATEX_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "`": r"\`{}",
        "\n": " ",
    }
)
MARKDOWN_ESCAPES = str.maketrans(
    {
        **{character: f"\\{character}" for character in "\\`*_{}[]<>#|~!$&"},
        "\n": " ",
    }
)


@dataclass(frozen=True)
class Cell:
    """Metric of a system in a column."""

    value: float | None = None
    interval: Sequence[float] | None = None
    is_best: bool = False  # significantly


@dataclass(frozen=True)
class Column:
    """A metric on a trial list, with a cell for each system."""

    trials: str
    metric: str
    cells: Sequence[Cell]
    # Largest of the corrected p-values of the best system; None if one was not tested.
    p_value: float | None = None

    @property
    def is_rate(self) -> bool:
        return self.metric == EER

    @property
    def prior(self) -> str:
        return self.metric.removeprefix(MIN_DCF)

    def show(self, value: float) -> str:
        return percent(value) if self.is_rate else number(value)


@dataclass(frozen=True)
class PaperTable:
    """Names of the systems, columns, and what a reader of the table should know."""

    systems: Sequence[str]
    columns: Sequence[Column]
    notes: Sequence[str]  # about these numbers, for the author


def build_table(
    systems: Sequence[NamedSystem],
    lists: Sequence[NamedList],
    scored: Sequence[Sequence[Scored | None]],
    p_targets: Sequence[float],
) -> PaperTable:
    """Return the table of systems; scored: for each list, each system, or None."""
    metrics = [EER, *(f"{MIN_DCF}{p_target:g}" for p_target in p_targets)]
    columns: list[Column] = []
    notes: list[str] = []
    for trial_list, results in zip(lists, scored):
        columns += [_column(trial_list.name, metric, results) for metric in metrics]
        notes += _notes_of(trial_list.name, systems, results)
    return PaperTable([system.name for system in systems], columns, notes)


def _column(trials: str, metric: str, results: Sequence[Scored | None]) -> Column:
    cells: list[Cell] = []
    for result in results:
        cell = Cell()
        if result is not None:
            cell = Cell(result.find_metric(metric), result.interval(metric))
        cells.append(cell)

    best, p_value = find_best(metric, results)
    if best is not None:
        chosen = cells[best]
        cells[best] = Cell(chosen.value, chosen.interval, is_best=True)
    return Column(trials, metric, cells, p_value)


def find_best(
    metric: str, results: Sequence[Scored | None]
) -> tuple[int | None, float | None]:
    """Return the number of the system that is better than each other one, None if none is.

    Also return the largest corrected p-value of the comparisons of the system with the lowest
    metric; None if one of them was not possible.
    """
    values: dict[int, float] = {}
    for place, result in enumerate(results):
        value = result.find_metric(metric) if result is not None else None
        if value is not None:
            values[place] = value
    if len(values) < 2:
        return None, None
    lowest = min(values, key=values.__getitem__)
    p_values: list[float] = []
    for place in values:
        if place == lowest:
            continue
        p_value = _p_value(metric, results[lowest], results[place])
        if p_value is None:
            return None, None
        p_values.append(p_value)
    largest = max(holm(p_values))
    return (lowest if largest < LEVEL else None), largest


def _p_value(metric: str, best: Scored | None, other: Scored | None) -> float | None:
    """Return the p-value of a difference; None without scores, or with too few speakers."""
    assert best is not None and other is not None
    if not best.has_scores or not other.has_scores:
        return None
    _, p_value = best.replicates.paired(other.replicates, metric)
    return p_value


def _notes_of(
    trials: str,
    systems: Sequence[NamedSystem],
    results: Sequence[Scored | None],
) -> list[str]:
    """Return lines about cells that are missing, and about differences that were not tested."""
    notes: list[str] = []
    with_result = [result for result in results if result is not None]
    for system, result in zip(systems, results):
        if result is None:
            notes.append(f"{trials}: {system.name} was not scored on it")
    reasons = dict.fromkeys(
        result.no_scores for result in with_result if not result.has_scores
    )
    for reason in reasons:
        notes.append(f"{trials}: nothing is bold, not tested: {reason}")
    if reasons or len(with_result) < 2:
        return notes

    replicates = with_result[0].replicates
    least = least_p(replicates)
    if least is None:
        notes.append(
            f"{trials}: nothing is bold, not tested:"
            f" {replicates.num_speakers} speakers are too few"
        )
    elif least * (len(with_result) - 1) >= LEVEL:
        notes.append(
            f"{trials}: nothing can be bold among so many systems (p is at least"
            f" {least * (len(with_result) - 1):.2g}); leave some out"
        )
    return notes


def explain(table: PaperTable) -> str:
    """Return the sentences that a caption needs."""
    cells = [cell for column in table.columns for cell in column.cells]
    sentences: list[str] = []
    if any(cell.interval is not None for cell in cells):
        sentences.append("In brackets: 95 % intervals by bootstrap over speakers.")
    if any(cell.is_best for cell in cells):
        sentences.append(
            "Bold: significantly better than each other system of the column (paired"
            f" bootstrap over speakers, p < {LEVEL:g} after Holm's correction for the"
            " comparisons of the column)."
        )
    elif any(column.p_value is not None for column in table.columns):
        sentences.append(
            "Nothing is bold: in no column is a system significantly better than each"
            f" other one (paired bootstrap over speakers, p < {LEVEL:g} after Holm's"
            " correction)."
        )
    elif len(table.systems) > 1:
        sentences.append("Nothing is bold: the differences were not tested.")
    return " ".join(sentences)


def format_latex(table: PaperTable) -> str:
    """Return a tabular with the rules of booktabs; intervals stand below their metrics."""
    by_list = _columns_by_list(table)
    lines = [f"% {line}" for line in ("Needs \\usepackage{booktabs}.", explain(table))]
    lines += [
        f"\\begin{{tabular}}{{l{'c' * len(table.columns)}}}",
        "\\toprule",
    ]
    names: list[str] = []
    rules: list[str] = []
    first = 2
    for trials, columns in by_list.items():
        last = first + len(columns) - 1
        names.append(f"\\multicolumn{{{len(columns)}}}{{c}}{{{escape_latex(trials)}}}")
        rules.append(f"\\cmidrule(lr){{{first}-{last}}}")
        first = last + 1
    lines.append(f" & {' & '.join(names)} \\\\")
    lines.append(" ".join(rules))
    headers = [
        "EER (\\%)" if column.is_rate else f"minDCF$_{{{column.prior}}}$"
        for column in table.columns
    ]
    lines += [f"System & {' & '.join(headers)} \\\\", "\\midrule"]
    for place, system in enumerate(table.systems):
        values: list[str] = []
        intervals: list[str] = []
        for column in table.columns:
            cell = column.cells[place]
            text = "--" if cell.value is None else column.show(cell.value)
            values.append(f"\\textbf{{{text}}}" if cell.is_best else text)
            interval = _show_interval(column, cell, "--")
            intervals.append(f"\\scriptsize {interval}" if interval else "")
        # A line that begins with a bracket would be an argument of the `\\` before it.
        lines.append(f"{{{escape_latex(system)}}} & {' & '.join(values)} \\\\")
        lines.append(f" & {' & '.join(intervals)} \\\\")
        lines.append("\\addlinespace[2pt]")
    lines.pop()  # no blank before the last rule
    lines += ["\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(lines)


def format_markdown(table: PaperTable) -> str:
    """Return a table of GitHub's Markdown, and the sentences about it."""
    header = ["system"]
    for column in table.columns:
        metric = "EER %" if column.is_rate else f"minDCF({column.prior})"
        header.append(f"{escape_markdown(column.trials)}: {metric}")
    lines = [_markdown_line(header), _markdown_line(["---"] * len(header))]
    for place, system in enumerate(table.systems):
        texts = [escape_markdown(system)]
        for column in table.columns:
            cell = column.cells[place]
            text = MISSING if cell.value is None else column.show(cell.value)
            if cell.is_best:
                text = f"**{text}**"
            interval = _show_interval(column, cell, " to ")
            texts.append(f"{text} {interval}" if interval else text)
        lines.append(_markdown_line(texts))
    lines += ["", explain(table), ""]
    return "\n".join(lines)


def format_csv(table: PaperTable) -> str:
    """Return a row for each system and list; rates are fractions, what is unknown is empty."""
    by_list = _columns_by_list(table)
    priors = dict.fromkeys(
        column.prior for column in table.columns if not column.is_rate
    )
    metrics = [EER, *(f"{MIN_DCF}{prior}" for prior in priors)]
    header = ["system", "trials"]
    for metric in metrics:
        header += [metric, f"{metric}_low", f"{metric}_high", f"{metric}_best"]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for place, system in enumerate(table.systems):
        for trials, columns in by_list.items():
            row: list[str | float | int | None] = [system, trials]
            for column in columns:
                cell = column.cells[place]
                low, high = cell.interval or (None, None)
                is_best = int(cell.is_best) if cell.value is not None else None
                row += [cell.value, low, high, is_best]
            writer.writerow(row)
    return stream.getvalue()


FORMATS: Mapping[str, Callable[[PaperTable], str]] = {
    "latex": format_latex,
    "markdown": format_markdown,
    "csv": format_csv,
}


def _columns_by_list(table: PaperTable) -> dict[str, list[Column]]:
    by_list: dict[str, list[Column]] = {}
    for column in table.columns:
        by_list.setdefault(column.trials, []).append(column)
    return by_list


def _show_interval(column: Column, cell: Cell, between: str) -> str:
    """Return an interval in brackets, "" without one."""
    if cell.value is None or cell.interval is None:
        return ""
    return f"[{between.join(map(column.show, cell.interval))}]"


def _markdown_line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def escape_latex(text: str) -> str:
    """Return text as LaTeX that prints it."""
    return text.translate(LATEX_ESCAPES)


def escape_markdown(text: str) -> str:
    """Return text as Markdown that shows it."""
    return text.translate(MARKDOWN_ESCAPES)
