"""`speakerlab plot` and `table`: files, options, and hostile input in one line."""

import json
import re

import pytest
from paper_systems import make_list, write_system
from refusals import refuses
from result_rows import identified

from speakerlab.bin import plot, table

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
    for width, points in (("column", 240.9), ("page", 496.0), ("10", 283.4)):
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
    with refuses("x", "names two systems"):
        plot.main(["confusion", "x=.", "x=.", "--data", "dev", "--out", "b.pdf"])
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
        ("det good.txt --out a.pdf --p-target 1", "--p-target", "1"),
        ("det good.txt --out a.pdf --trials data/test/trials", "--trials", "2"),
        ("det gone.txt --out a.pdf", "gone.txt", "no such"),
    ],
)
def test_wrong_arguments_are_refused(world, arguments, subject, value):
    error = FileNotFoundError if "gone" in arguments else ValueError
    with refuses(subject, value, error=error):
        draw(*arguments.split())
    assert not (world / "a.pdf").exists()


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
        ("good.txt", lambda _: "", "good.txt", "no score"),
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
    assert (
        printed.splitlines()[0] == "| system | Vox\\_O: EER % | Vox\\_O: minDCF(0.01) |"
    )
    assert "| ours | **" in printed
    table.main([*arguments, "--format", "latex", "--out", "new/t.tex"])
    assert capsys.readouterr().out == ""
    text = (world / "new/t.tex").read_text()
    assert "Vox\\_O" in text and "\\textbf{" in text
    with refuses("data", "cannot be written"):
        table.main([*arguments, "--out", "data"])
    with refuses("--p-target", "2"):
        table.main([*arguments, "--p-target", "2"])


def test_systems_and_lists_may_come_in_any_order(world, capsys):
    table.main(["good.txt", "--trials", "data/test/trials", "--format", "csv"])
    expected = capsys.readouterr().out
    table.main(["--format", "csv", "--trials", "data/test/trials", "good.txt"])
    assert capsys.readouterr().out == expected
