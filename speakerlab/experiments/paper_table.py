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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from speakerlab.core.counting import count_of
from speakerlab.core.intervals import MIN_GROUPS
from speakerlab.experiments.paper_layout import COLUMN_CM
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
        # TeX ends a line, and so a comment, at both.
        "\n": " ",
        "\r": " ",
    }
)
# Of a cell: what Markdown would otherwise take for a mark. Within a word, _ is a letter.
MARKDOWN_MARKS = re.compile(r"[\\`*\[\]<|~$]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
# Of LaTeX, with \small and \tabcolsep of 2 pt in a text of 10 pt.
SMALL_PT, SCRIPT_PT, INDEX_PT = 9.0, 7.0, 6.0
COLUMN_GAP_PT = 4.0
NARROW, WIDE = frozenset(".,:;'[]()|!ifjlrt "), frozenset("mwMW%@ABCDEFGHKLNOPQRUVXYZ")
POINT_CM = 2.54 / 72.27


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
    # The smallest that it can be, with so many speakers and systems.
    least_p: float | None = None
    num_speakers: int | None = None  # None if unknown
    num_replicates: int | None = None  # of the bootstrap; None without scores

    @property
    def is_rate(self) -> bool:
        return self.metric == EER

    @property
    def values(self) -> list[float]:
        return [cell.value for cell in self.cells if cell.value is not None]

    @property
    def has_intervals(self) -> bool:
        return any(cell.interval is not None for cell in self.cells)

    @property
    def can_show(self) -> bool:
        """Return whether a system could be significantly better than each other one."""
        return self.least_p is not None and self.least_p < LEVEL

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
    metrics = [
        EER,
        *(f"{MIN_DCF}{p_target:g}" for p_target in dict.fromkeys(p_targets)),
    ]
    columns: list[Column] = []
    notes: list[str] = []
    for trial_list, results in zip(lists, scored):
        of_list = [_column(trial_list.name, metric, results) for metric in metrics]
        columns += of_list
        notes += _notes_of(of_list, systems, results)
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
        cells[best] = replace(cells[best], is_best=True)
    column = Column(trials, metric, cells, p_value, num_speakers=_speakers_of(results))
    with_scores = [r for r in results if r is not None and r.has_scores]
    if p_value is None or not with_scores:
        return column
    replicates = with_scores[0].replicates
    least = least_p(replicates)
    if least is None:
        return column
    return replace(
        column,
        least_p=min(1.0, least * (len(column.values) - 1)),
        num_replicates=len(replicates.values[EER]),
    )


def _speakers_of(results: Sequence[Scored | None]) -> int | None:
    """Return the number of speakers of a list, None if it is unknown."""
    for result in results:
        if result is not None and result.has_scores:
            return result.replicates.num_speakers
    for result in results:
        if result is not None and result.row is not None:
            return result.row.get("num_speakers")
    return None


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
    columns: Sequence[Column],
    systems: Sequence[NamedSystem],
    results: Sequence[Scored | None],
) -> list[str]:
    """Return lines about missing cells and intervals of a list, and why nothing can be bold."""
    first = columns[0]
    trials = first.trials
    notes: list[str] = []
    for system, result in zip(systems, results):
        if result is None:
            notes.append(f"{trials}: {system.name} was not scored on it")
    with_result = [result for result in results if result is not None]
    has_gaps = any(len(column.values) < len(with_result) for column in columns)
    reasons = dict.fromkeys(
        result.no_scores for result in with_result if not result.has_scores
    )
    if has_gaps:
        notes += [f"{trials}: a metric is unknown: {reason}" for reason in reasons]
    # A system alone is never bold.
    elif len(with_result) > 1:
        notes += [
            f"{trials}: nothing is bold, not tested: {reason}" for reason in reasons
        ]

    num_speakers = first.num_speakers
    if num_speakers is not None and num_speakers < MIN_GROUPS:
        also_bold = ", and nothing is bold" if len(with_result) > 1 else ""
        notes.append(
            f"{trials}: no intervals{also_bold}: {count_of(num_speakers, 'speaker')} are"
            f" too few, {MIN_GROUPS} are needed"
        )
    elif first.least_p is not None and not first.can_show:
        notes.append(f"{trials}: {_why_never_bold(first)}")
    return notes


def _why_never_bold(column: Column) -> str:
    """Return why not even a system that is always the best would be bold, and what helps."""
    assert column.least_p is not None
    num_comparisons = len(column.values) - 1
    alone = column.least_p / num_comparisons
    text = (
        f"nothing can be bold: with {column.num_speakers} speakers and"
        f" {column.num_replicates:,} replicates, a p-value is at least {alone:.2g}"
    )
    if num_comparisons > 1:
        text += (
            f", and {column.least_p:.2g} after the correction for"
            f" {num_comparisons} comparisons"
        )
    most = int(LEVEL / alone)
    if most * alone >= LEVEL:  # exactly
        most -= 1
    fewer = ""
    if most:
        fewer = f", or compare at most {most + 1} systems"
    return f"{text}; score more speakers{fewer}"


def explain(table: PaperTable) -> str:
    """Return the sentences that a caption needs."""
    sentences: list[str] = []
    if any(column.has_intervals for column in table.columns):
        sentences.append("In brackets: 95 % intervals by bootstrap over speakers.")
    few = [
        column
        for column in table.columns
        if column.num_speakers is not None and column.num_speakers < MIN_GROUPS
    ]
    if few:
        sentences.append(
            f"{_on(table, few)}no intervals: fewer than {MIN_GROUPS} speakers."
        )
    sentences += _sentences_on_bold(table)
    return " ".join(map(_capitalized, sentences))


def _sentences_on_bold(table: PaperTable) -> list[str]:
    """Return what bold means, and on which lists nothing could be bold, and why."""
    compared = [column for column in table.columns if len(column.values) > 1]
    if not compared:
        return []
    test = f"(paired bootstrap over speakers, p < {LEVEL:g} after Holm's correction"
    shown = [column for column in compared if column.can_show]
    sentences: list[str] = []
    if any(cell.is_best for column in compared for cell in column.cells):
        sentences.append(
            f"Bold: significantly better than each other system {test} for the comparisons"
            " of the column)."
        )
    elif shown:
        sentences.append(
            f"{_on(table, shown)}no system is significantly better than each other one"
            f" {test})."
        )
    else:
        sentences.append("Nothing is bold.")

    # A list of few speakers is no evidence that its systems are equally good.
    never = [column for column in compared if column.least_p and not column.can_show]
    for num_speakers in dict.fromkeys(column.num_speakers for column in never):
        alike = [column for column in never if column.num_speakers == num_speakers]
        sentences.append(
            f"{_on(table, alike)}no difference could be significant, with"
            f" {num_speakers} speakers and {len(alike[0].values)} systems."
        )
    untested = [column for column in compared if column.p_value is None]
    if untested:
        sentences.append(f"{_on(table, untested)}the differences were not tested.")
    return sentences


def _on(table: PaperTable, columns: Iterable[Column]) -> str:
    """Return `On <lists>, `; "" for all lists of the table."""
    lists = dict.fromkeys(column.trials for column in columns)
    if len(lists) == len({column.trials for column in table.columns}):
        return ""
    return f"On {' and '.join(lists)}, "


def _capitalized(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def format_latex(table: PaperTable) -> str:
    """Return a tabular with the rules of booktabs; intervals are below their metrics.

    The third line, a comment, has the sentences for a caption, escaped.
    """
    by_list = _columns_by_list(table)
    width_cm = latex_width_cm(table)
    place = (
        "in one column" if width_cm <= COLUMN_CM else "for table*, over both columns"
    )
    comments = (
        "Needs \\usepackage{booktabs}.",
        f"About {width_cm:.1f} cm wide in Times, \\small, with a \\tabcolsep of 2pt:"
        f" {place}.",
        # For \caption, where a % would begin a comment.
        escape_latex(explain(table)),
    )
    lines = [f"% {line}" for line in comments]
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
    headers: list[str] = []
    for column in table.columns:
        prior = f"minDCF$_{{{column.prior}}}$"
        headers.append("EER (\\%)" if column.is_rate else prior)
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


def latex_width_cm(table: PaperTable) -> float:
    """Return about how wide the table is in Times, \\small, with a \\tabcolsep of 2 pt."""
    names = ("System", *table.systems)
    width_pt = max(_text_em(name) * SMALL_PT for name in names) + COLUMN_GAP_PT
    for trials, columns in _columns_by_list(table).items():
        of_columns: list[float] = []
        for column in columns:
            header = "EER (%)" if column.is_rate else "minDCF"
            prior = "" if column.is_rate else column.prior
            widths = [_text_em(header) * SMALL_PT + _text_em(prior) * INDEX_PT]
            for cell in column.cells:
                interval = _show_interval(column, cell, "-")
                widths.append(_text_em(interval) * SCRIPT_PT)
            of_columns.append(max(widths) + COLUMN_GAP_PT)
        # The name of a list stands over its columns.
        width_pt += max(sum(of_columns), _text_em(trials) * SMALL_PT + COLUMN_GAP_PT)
    return width_pt * POINT_CM


def _text_em(text: str) -> float:
    """Return about how wide a text is in Times, in units of the size of the font."""
    num_narrow = sum(character in NARROW for character in text)
    num_wide = sum(character in WIDE for character in text)
    num_others = len(text) - num_narrow - num_wide
    return 0.3 * num_narrow + 0.5 * num_others + 0.72 * num_wide


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
    return MARKDOWN_MARKS.sub(r"\\\g<0>", text).replace("\n", " ")
