"""`speakerlab plot` and `table`: files, options, and hostile input in one line."""

import json
import re

import pytest
from compared_runs import make_run
from paper_systems import make_list, write_system
from refusals import refuses
from result_rows import identified

from speakerlab.bin import compare, plot, score, table
from speakerlab.experiments.paper_layout import DASHES, MARKERS

pytest.importorskip("matplotlib")


@pytest.fixture
def world(tmp_path, monkeypatch):
    listed = make_list(tmp_path / "data/test")
    write_system(tmp_path / "good.txt", listed, spread=0.2)
    write_system(tmp_path / "bad.txt", listed, spread=2.0, seed=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def draw(*arguments):
    plot.main([*arguments, "--trials", "data/test/trials"])


@pytest.mark.parametrize("kind", ["det", "scores", "roc", "duration"])
def test_every_kind_is_drawn(world, kind):
    draw(kind, "good.txt", "x=bad.txt", "--out", "new/a.PDF")
    assert (world / "new/a.PDF").read_bytes().startswith(b"%PDF")


def test_the_width_and_an_existing_file(world):
    (world / "a.pdf").write_text("old")
    # Of Interspeech: 80 and 170 mm.
    for width, points in (("column", 226.7), ("page", 481.8), ("10", 283.4)):
        draw("duration", "good.txt", "--out", "a.pdf", "--width", width)
        box = re.search(rb"/MediaBox \[ 0 0 (\S+) ", (world / "a.pdf").read_bytes())
        assert box is not None
        assert float(box[1]) == pytest.approx(points, abs=0.1)


def test_options_change_the_figure(world):
    figures = []
    for options in ([], ["--intervals"], ["--p-target", "0.05"], ["--font-size", "9"]):
        draw("det", "good.txt", "--out", "a.svg", *options)
        figures.append((world / "a.svg").read_bytes())
    assert len(set(figures)) == 4


def test_confusions_of_a_data_directory_are_drawn(world):
    rows = [
        identified([0, 1], [0, 1], ["x", "y"], data=name) for name in ("dev", "test")
    ]
    (world / "results.json").write_text(json.dumps(rows))
    with refuses(".", "2 data directories", "dev, test"):
        plot.main(["confusion", ".", "--out", "a.pdf"])
    plot.main(["confusion", "lid=.", "--data", "dev", "--out", "a.pdf"])
    assert (world / "a.pdf").exists()
    with refuses(".", "no results of an identification of eval"):
        plot.main(["confusion", ".", "--data", "eval", "--out", "b.pdf"])
    with refuses(".", "given twice"):
        plot.main(["confusion", "x=.", "x=.", "--data", "dev", "--out", "b.pdf"])
    with refuses("x", "names 2 systems"):
        plot.main(["confusion", "x=.", "x=data", "--data", "dev", "--out", "b.pdf"])
    with refuses("dat", "did you mean data?", error=FileNotFoundError):
        plot.main(["confusion", ".", "dat", "--data", "dev", "--out", "b.pdf"])
    assert not (world / "b.pdf").exists()


@pytest.mark.parametrize(
    ("arguments", "subject", "value"),
    [
        ("det good.txt --out a.eps", "--out", ".pdf, .svg, .png"),
        ("det good.txt --out a", "--out", "a must end"),
        (
            "det good.txt --out data/test/trials/a.pdf",
            "data/test/trials/a.pdf",
            "written",
        ),
        ("roc good.txt --out a.pdf --intervals", "--intervals", "roc"),
        ("confusion good.txt --out a.pdf", "--trials", "confusion"),
        ("det good.txt --out a.pdf --data x", "--data", "det"),
        ("det good.txt --out a.pdf --trials data/test/trials", "--trials", "2"),
        ("duration good.txt --out a.pdf --p-target 0.01", "--p-target", "duration"),
        (
            "det good.txt --out a.pdf --p-target 0.1 0.2 0.3 0.4 0.5 0.6",
            "--p-target",
            "at most 5 priors, got 6",
        ),
        ("det gone.txt --out a.pdf", "gone.txt", "no such"),
    ],
)
def test_wrong_arguments_are_refused(world, arguments, subject, value):
    error = FileNotFoundError if "gone" in arguments else ValueError
    with refuses(subject, value, error=error):
        draw(*arguments.split())
    assert not (world / "a.pdf").exists()


def test_confusions_have_no_priors():
    with refuses("--p-target", "confusion"):
        plot.parse(["confusion", "x", "--out", "a.pdf", "--p-target", "0.01"])


@pytest.mark.parametrize("kind", ["det", "roc", "scores"])
def test_every_prior_has_a_mark_of_its_own(world, kind):
    priors = ["0.001", "0.01", "0.05", "0.1", "0.5"]
    drawn = set()
    for number in range(1, plot.MAX_PRIORS + 1):
        draw(kind, "good.txt", "--out", "a.svg", "--p-target", *priors[:number])
        drawn.add((world / "a.svg").read_bytes())
    assert len(drawn) == plot.MAX_PRIORS == len(priors)
    draw(kind, "good.txt", "--out", "a.svg", "--p-target", *priors, *priors)
    assert (world / "a.svg").read_bytes() in drawn
    # A mark for the EER, and one for each prior.
    assert len(set(MARKERS)) > plot.MAX_PRIORS
    assert len(set(map(str, DASHES))) > plot.MAX_PRIORS


@pytest.mark.parametrize("width", ["4.9", "30.1", "nan", "wide", ""])
def test_a_wrong_width_is_refused(world, width, capsys):
    with pytest.raises(SystemExit):
        draw("det", "good.txt", "--out", "a.pdf", "--width", width)
    assert "must be column, page, or 5 to 30 cm" in capsys.readouterr().err


def first_lines(text, number):
    return "".join(text.splitlines(keepends=True)[:number])


@pytest.mark.parametrize(
    ("file", "change", "subject", "value"),
    [
        ("good.txt", lambda text: text.replace("1.", "nan ", 1), "good.txt", ""),
        ("good.txt", lambda text: first_lines(text, 9), "good.txt", "no score"),
        ("good.txt", lambda _: "", "good.txt", "is empty"),
        (
            "data/test/trials",
            lambda text: first_lines(text, 1),
            "data/test/trials",
            "1 of 1",
        ),
        (
            "data/test/trials",
            lambda text: text.replace(" target", " nontarget"),
            "data/test/trials",
            "nontarget",
        ),
        (
            "data/test/trials",
            lambda text: "".join(
                line for line in text.splitlines(True) if " target" not in line
            ),
            "data/test/trials",
            "0 of",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plot", "table"])
def test_hostile_files_are_one_line(world, command, file, change, subject, value):
    path = world / file
    path.write_text(change(path.read_text()))
    with refuses(subject, value):
        if command == "plot":
            draw("det", "good.txt", "bad.txt", "--out", "a.pdf")
        else:
            table.main(["good.txt", "bad.txt", "--trials", "data/test/trials"])
    assert not (world / "a.pdf").exists()


def test_a_table_is_printed_or_written(world, capsys):
    arguments = ["ours=good.txt", "bad.txt", "--trials", "Vox_O=data/test/trials"]
    table.main(arguments)
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "| system | Vox_O: EER % | Vox_O: minDCF(0.01) |"
    assert "| ours | **" in printed
    table.main([*arguments, "--format", "latex", "--out", "new/t.tex"])
    assert capsys.readouterr().out == ""
    text = (world / "new/t.tex").read_text()
    assert "Vox\\_O" in text and "\\textbf{" in text
    with refuses("data", "cannot be written"):
        table.main([*arguments, "--out", "data"])


@pytest.mark.parametrize("value", ["0", "1", "nan", "0.01,0.05", "0,01", "x", ""])
@pytest.mark.parametrize("command", [plot, table, score])
def test_a_wrong_prior_is_refused(command, value, capsys):
    with pytest.raises(SystemExit):
        command.parse(["--p-target", value])
    error = capsys.readouterr().err
    assert f"--p-target: must be between 0 and 1, got {value}; several are" in error
    assert "0.01 0.05" in error


def test_a_prior_that_is_given_twice_is_one_column(world, capsys):
    arguments = ["good.txt", "--trials", "data/test/trials", "--p-target", "0.05"]
    table.main(arguments)
    once = capsys.readouterr().out
    table.main([*arguments, "0.05"])
    assert capsys.readouterr().out == once


def test_of_several_lists_a_figure_needs_one(world):
    for name in "ab":
        make_run(world / f"exp/{name}", seed=len(name), lr=0.1, spread=0.3)
        path = world / f"exp/{name}/results.json"
        (row,) = json.loads(path.read_text())
        other = row | {"trials": "test/trials, hard"}
        path.write_text(json.dumps([row, other]))
    lists = "'test/trials' and 'test/trials, hard'"
    with refuses("--trials", lists, "--trials 'test/trials'"):
        plot.main(["det", "exp/a", "exp/b", "--out", "a.pdf"])
    plot.main(["det", "exp/a", "exp/b", "--out", "a.pdf", "--trials", "test/trials"])
    assert (world / "a.pdf").exists()


def test_help_of_plot_has_one_list(capsys):
    for command, has_several in ((plot, False), (table, True), (compare, True)):
        with pytest.raises(SystemExit):
            command.parse(["--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert ("give it again for more lists" in text) == has_several


def test_a_table_that_is_wider_than_a_page_is_reported(world, caplog):
    lists: list[str] = []
    systems: list[str] = []
    for number in range(4):
        listed = make_list(world / f"list{number}")
        write_system(world / f"{number}.txt", listed)
        lists += ["--trials", f"list{number}/trials"]
        systems.append(f"x={number}.txt")
    options = ["--format", "latex", "--out", "t.tex", "--p-target"]
    table.main([*systems, *lists, *options, "0.01", "0.05"])
    assert re.search(r"is about 2\d cm wide in \\small, a page 17 cm", caplog.text)
    caplog.clear()
    table.main([*systems[:2], *lists[:4], *options, "0.01"])
    assert "wide" not in caplog.text


def test_systems_and_lists_may_come_in_any_order(world, capsys):
    table.main(["good.txt", "--trials", "data/test/trials", "--format", "csv"])
    expected = capsys.readouterr().out
    table.main(["--format", "csv", "--trials", "data/test/trials", "good.txt"])
    assert capsys.readouterr().out == expected
