"""Tables for papers: the numbers, what is bold, and that LaTeX and Markdown show the names."""

import csv
import io
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper_systems import make_list, score

from speakerlab.experiments import paper_table
from speakerlab.experiments.paper_table import (
    build_table,
    escape_latex,
    escape_markdown,
    explain,
    find_best,
    format_csv,
    format_latex,
    format_markdown,
    latex_width_cm,
)
from speakerlab.experiments.run_table import holm, least_p
from speakerlab.experiments.systems import NamedList, NamedSystem, Scored
from speakerlab.scoring.bootstrap import Replicates

WEIRD = r"a_b & 50% #1 $x\{y}^~<z>|`*[q](r)* !"


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    return make_list(tmp_path_factory.mktemp("data") / "test")


def table_of(scored, p_targets=(0.01,)):
    systems = [result.system for result in scored]
    return build_table(systems, [scored[0].trial_list], [scored], p_targets)


def bold(table):
    """(system, metric) of the bold cells."""
    return [
        (table.systems[place], column.metric)
        for column in table.columns
        for place, cell in enumerate(column.cells)
        if cell.is_best
    ]


# What is bold


def test_equal_copies_are_never_bold(listed):
    table = table_of(score(listed, [0.3, 0.3], seeds=[1, 1]))
    assert bold(table) == []
    assert all(column.p_value == 1 for column in table.columns)
    # Also not where both are much better than a third one.
    table = table_of(score(listed, [0.3, 0.3, 4.0], seeds=[1, 1, 2]))
    assert bold(table) == []


def test_a_clearly_better_system_is_bold(listed):
    scored = score(listed, [2.0, 0.2, 2.0])
    assert bold(table_of(scored)) == [
        ("system 1", "eer"),
        ("system 1", "min_dcf_0.01"),
    ]
    assert bold(table_of(scored[:1])) == []


def test_the_p_value_is_that_of_the_paired_bootstrap_after_holm(listed):
    scored: Any = score(listed, [0.4, 0.44, 0.5])
    values = [result.metric("eer") for result in scored]
    best = int(np.argmin(values))
    p_values = [
        scored[best].replicates.paired(result.replicates, "eer")[1]
        for result in scored
        if result is not scored[best]
    ]
    place, p_value = find_best("eer", scored)
    assert p_value is not None
    assert p_value == max(holm(p_values))
    assert (place == best) == (p_value < 0.05)
    assert 0.01 < p_value < 1


def test_without_scores_nothing_is_bold_and_a_note_has_the_reason(listed):
    good, bad = score(listed, [0.2, 2.0])
    row = {
        "eer": 0.4,
        "eer_ci95": [0.25, 0.5],
        "min_dcf": {"0.01": 1.0},
        "num_target": 30,
        "num_nontarget": 405,
    }
    stored = Scored(bad.system, bad.trial_list, row, no_scores="bad has no scores")
    table = table_of([good, stored])
    assert bold(table) == []
    assert table.notes == [
        "test/trials: nothing is bold, not tested: bad has no scores"
    ]
    # A system alone is never bold, so its scores are not missed.
    assert table_of([stored]).notes == []
    results = [None, stored]
    systems = [good.system, bad.system]
    table = build_table(systems, [bad.trial_list], [results], (0.01,))
    assert table.notes == ["test/trials: system 0 was not scored on it"]
    # But for a metric that the results do not have.
    (note,) = table_of([stored], (0.3,)).notes
    assert note == "test/trials: a metric is unknown: bad has no scores"
    table = table_of([good, stored])
    # The metrics of its results are shown.
    assert "| 40.00 [25.00 to 50.00] | 1.000 |" in format_markdown(table)


def test_too_few_speakers_and_too_many_systems_have_notes(tmp_path, listed):
    small = make_list(tmp_path / "small", num_speakers=4)
    table = table_of(score(small, [0.2, 4.0]))
    assert bold(table) == []
    assert table.notes == [
        "test/trials: no intervals, and nothing is bold: 4 speakers are too few, 5 are"
        " needed".replace("test", "small")
    ]
    # No interval either.
    text = format_markdown(table)
    assert "In brackets" not in text
    assert "No intervals: fewer than 5 speakers." in text
    assert text.endswith("Nothing is bold. The differences were not tested.\n")
    (note,) = table_of(score(small, [0.2])).notes
    assert note == "small/trials: no intervals: 4 speakers are too few, 5 are needed"


@pytest.mark.parametrize(
    ("num_speakers", "num_systems", "reason"),
    [
        # The smallest p-values: of 5 speakers 0.051, of 7 0.029, of 10 0.017.
        (
            5,
            2,
            "with 5 speakers and 1,000 replicates, a p-value is at least 0.051; score more"
            " speakers",
        ),
        (
            7,
            3,
            "with 7 speakers and 1,000 replicates, a p-value is at least 0.029, and 0.058"
            " after the correction for 2 comparisons; score more speakers, or compare at"
            " most 2 systems",
        ),
        (
            10,
            4,
            "with 10 speakers and 1,000 replicates, a p-value is at least 0.017, and 0.05"
            " after the correction for 3 comparisons; score more speakers, or compare at"
            " most 3 systems",
        ),
        (10, 3, None),
    ],
)
def test_why_nothing_can_be_bold(tmp_path, num_speakers, num_systems, reason):
    listed = make_list(tmp_path / "test", num_speakers=num_speakers)
    table = table_of(score(listed, [0.1, *[4.0] * (num_systems - 1)]))
    text = explain(table)
    if reason is None:
        assert table.notes == []
        assert bold(table) == [("system 0", "eer"), ("system 0", "min_dcf_0.01")]
        assert "could be significant" not in text
        return
    assert table.notes == [f"test/trials: nothing can be bold: {reason}"]
    assert bold(table) == []
    # It is not said that no system is better.
    assert text.endswith(
        "Nothing is bold. No difference could be significant, with"
        f" {num_speakers} speakers and {num_systems} systems."
    )


def test_the_smallest_p_value_is_that_of_the_replicates_that_were_drawn(
    tmp_path, monkeypatch
):
    listed = make_list(tmp_path / "test", num_speakers=7)
    scores: Any = score(listed, [0.1, 4.0])
    assert bold(table_of(scores)) == [("system 0", "eer"), ("system 0", "min_dcf_0.01")]
    # As with more than a million trials.
    monkeypatch.setattr("speakerlab.scoring.bootstrap.MANY_TRIALS", 10)
    scores = score(listed, [0.1, 4.0])
    assert len(scores[0].replicates.values["eer"]) == 200
    table = table_of(scores)
    assert bold(table) == []
    (note,) = table.notes
    assert "with 7 speakers and 200 replicates, a p-value is at least 0.054" in note
    assert note.endswith("score more speakers")


@pytest.mark.parametrize("num_replicates", [200, 1000])
def test_the_guide_has_the_smallest_p_values(num_replicates):
    guide = Path(__file__).parents[2] / "docs/papers.md"
    lines = guide.read_text(encoding="utf-8").splitlines()
    (header,) = [line for line in lines if line.startswith("| replicates |")]
    (row,) = [
        line for line in lines if line.startswith(f"| {num_replicates:,}, p-value |")
    ]
    (most,) = [
        line for line in lines if line.startswith(f"| {num_replicates:,}, systems |")
    ]
    cells = zip(*(line.strip("| ").split(" | ")[1:] for line in (header, row, most)))
    for num_speakers, p_value, num_systems in cells:
        replicates = Replicates({"eer": np.zeros(num_replicates)}, int(num_speakers))
        least = least_p(replicates)
        assert least is not None
        assert p_value == f"{least:.3f}"
        allowed = [m for m in range(2, 30) if least * (m - 1) < 0.05]
        assert num_systems == str(max(allowed, default="-"))


def test_the_caption_says_on_which_lists_nothing_could_be_shown(tmp_path, listed):
    small = make_list(tmp_path / "small", num_speakers=6)
    on_both = [score(listed, [0.3] * 3), score(small, [0.3] * 3)]
    lists = [scored[0].trial_list for scored in on_both]
    systems = [result.system for result in on_both[0]]
    text = explain(build_table(systems, lists, on_both, (0.01,)))
    assert text == (
        "In brackets: 95 % intervals by bootstrap over speakers. On test/trials, no system"
        " is significantly better than each other one (paired bootstrap over speakers,"
        " p < 0.05 after Holm's correction). On small/trials, no difference could be"
        " significant, with 6 speakers and 3 systems."
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_systems", [2, 4])
def test_the_best_of_equal_systems_is_seldom_bold(tmp_path, num_systems):
    """Chosen on the same trials as it is tested: still at most one of twenty."""
    listed = make_list(tmp_path / "test", num_speakers=20)
    num_bold = 0
    for column in range(100):
        seeds = [num_systems * column + place for place in range(num_systems)]
        systems = score(listed, [0.3] * num_systems, seeds=seeds, speaker_spread=0.3)
        best, _ = find_best("eer", systems)
        num_bold += best is not None
    # 95 % of binomials of 100 draws at 5 % are at most 9.
    assert num_bold <= 9


# Formats


@pytest.fixture
def table(listed):
    """Two lists; the second system was not scored on the second one."""
    first = score(listed, [0.2, 2.0], names=["good_1", WEIRD])
    systems = [result.system for result in first]
    lists = [first[0].trial_list, type(first[0].trial_list)("b&c|d", "x")]
    return build_table(systems, lists, [first, [first[0], None]], (0.01, 0.05))


def test_csv_has_the_plain_numbers(table, listed):
    rows = list(csv.DictReader(io.StringIO(format_csv(table))))
    names = [(row["system"], row["trials"]) for row in rows]
    assert names == [
        ("good_1", "test/trials"),
        ("good_1", "b&c|d"),
        (WEIRD, "test/trials"),
        (WEIRD, "b&c|d"),
    ]
    scored: Any = score(listed, [0.2, 2.0])
    for row, result in zip(rows[::2], scored):
        assert float(row["eer"]) == result.metric("eer")
        low, high = result.replicates.interval("min_dcf_0.05")
        assert float(row["min_dcf_0.05_low"]) == low
        assert float(row["min_dcf_0.05_high"]) == high
    assert [row["eer_best"] for row in rows] == ["1", "0", "0", ""]
    assert rows[3]["eer"] == rows[3]["min_dcf_0.01_low"] == ""


def test_markdown_shows_the_names_and_the_numbers(table, listed):
    markdown_it = pytest.importorskip("markdown_it")
    tokens = markdown_it.MarkdownIt().enable("table").parse(format_markdown(table))
    cells = [
        "".join(child.content for child in token.children or ())
        for token in tokens
        if token.type == "inline"
    ]
    num_columns = 7
    assert cells[:num_columns][4] == "b&c|d: EER %"
    good = cells[num_columns : 2 * num_columns]
    weird = cells[2 * num_columns : 3 * num_columns]
    assert good[0] == "good_1"
    assert weird[0] == WEIRD
    assert weird[4:] == ["-"] * 3
    result: Any = score(listed, [0.2])[0]
    low, high = (100 * rate for rate in result.replicates.interval("eer"))
    eer = 100 * result.metric("eer")
    assert good[1] == f"{eer:.2f} [{low:.2f} to {high:.2f}]"
    # Of three columns, the best is bold.
    assert sum(token.type == "table_open" for token in tokens) == 1
    markdown_it = pytest.importorskip("markdown_it")
    html = markdown_it.MarkdownIt().enable("table").render(format_markdown(table))
    assert html.count("<strong>") == 3
    assert "p &lt; 0.05 after Holm" in html


def test_latex_has_rules_bold_numbers_and_escaped_names(table):
    text = format_latex(table)
    assert "\\toprule" in text and "\\bottomrule" in text
    assert text.count("\\textbf{") == 3
    assert "\\multicolumn{3}{c}{b\\&c\\textbar{}d}" in text
    assert escape_latex(WEIRD) in text
    assert escape_latex(r"\{_^") == ("\\textbackslash{}\\{\\_\\textasciicircum{}")
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert {line.count(" & ") for line in rows[1:]} == {6}


def test_markdown_escapes_only_what_is_a_mark():
    assert escape_markdown("e_f0 #2 & {a} (b) 5 %!") == "e_f0 #2 & {a} (b) 5 %!"
    assert escape_markdown("_x_ *y* a|b &lt; <i>") == r"\_x\_ \*y\* a\|b \&lt; \<i>"
    markdown_it = pytest.importorskip("markdown_it").MarkdownIt()
    for name in (WEIRD, "_x_", "__init__", "a__b", "&amp; &#38;", "#1", "ö_ü", r"\_"):
        html = markdown_it.renderInline(escape_markdown(name))
        assert unescape(html) == name


def test_the_width_of_a_table_is_about_that_of_latex(listed, tmp_path):
    if shutil.which("pdflatex") is None:
        pytest.skip("needs LaTeX")
    scored = score(listed, [0.3, 0.5], names=["ours", "ERes2Net, large margin"])
    lists = [NamedList("Vox1-O", "x"), NamedList("test/trials_test-speechocean", "y")]
    systems = [result.system for result in scored]
    for num_lists, names in ((1, systems), (2, systems), (2, systems[:1])):
        results = [scored[: len(names)]] * num_lists
        table = build_table(names, lists[:num_lists], results, (0.01, 0.05))
        text = format_latex(table)
        lines = [
            "\\documentclass[10pt]{article}",
            "\\usepackage{booktabs,times}",
            "\\begin{document}",
            "\\setbox0=\\hbox{\\small\\setlength{\\tabcolsep}{2pt}%",
            text.rstrip(),
            "}\\typeout{width \\the\\wd0}",
            "\\end{document}",
        ]
        (tmp_path / "paper.tex").write_text("\n".join(lines))
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "paper.tex"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        points = float(done.stdout.partition("width ")[2].partition("pt")[0])
        width_cm = latex_width_cm(table)
        assert width_cm == pytest.approx(points * 2.54 / 72.27, rel=0.1)
        place = "in one column" if width_cm < 8 else "for table*"
        assert f"% About {width_cm:.1f} cm wide" in text and place in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_latex_compiles(table, tmp_path):
    (tmp_path / "table.tex").write_text(format_latex(table), encoding="utf-8")
    lines = [
        "\\documentclass{article}",
        "\\usepackage{booktabs}",
        "\\begin{document}",
        "\\input{table}",
        "\\end{document}",
    ]
    (tmp_path / "paper.tex").write_text("\n".join(lines))
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").stat().st_size > 5000


@pytest.fixture
def caption(tmp_path, listed):
    """The line of a LaTeX table for its caption, with a weird list and system."""
    small = make_list(tmp_path / "small", num_speakers=6)
    names = [f"{WEIRD}\r\nx", "b", "c"]
    on_both = [score(data, [0.3] * 3, names=names) for data in (listed, small)]
    lists = [NamedList("a_b", "x", listed), NamedList(names[0], "y", small)]
    systems = [result.system for result in on_both[0]]
    table = build_table(systems, lists, on_both, (0.01,))
    return format_latex(table).splitlines()[2]


def test_the_caption_can_be_copied(caption):
    assert caption.startswith("% In brackets: 95 \\% intervals by bootstrap")
    assert "On a\\_b, no system is" in caption
    assert "p \\textless{} 0.05 after Holm" in caption
    assert f"On {escape_latex(WEIRD)}  x, no difference could" in caption
    assert re.search(r"(?<!\\)[%_&#$^~<>|]", caption.removeprefix("%")) is None


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_the_caption_compiles(caption, tmp_path):
    lines = [
        "\\documentclass{article}",
        "\\begin{document}",
        "\\begin{table}",
        f"\\caption{{{caption.removeprefix('% ')}}}",
        "\\end{table}",
        "\\end{document}",
    ]
    (tmp_path / "paper.tex").write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_formats_have_the_names_of_the_option():
    from speakerlab.bin import table as command

    assert tuple(paper_table.FORMATS) == command.FORMATS
    assert NamedSystem("x").exp_dir is None
