"""Official trial lists: their formats, counts and errors by line."""

from pathlib import Path

import pytest
from refusals import refused

from egs.common.corpus.official import read_official
from speakerlab.core.faults import Faults

RECORDINGS = {"a.wav", "b.wav", "c.wav"}


def read(path: Path, text: str, **options):
    """Return (trials, errors) of a list with this text."""
    path.write_text(text)
    faults = Faults()
    options = {"recordings": RECORDINGS} | options
    trials = read_official(path, faults, **options)
    errors = [line for lines in faults.lines.values() for line in lines]
    return trials, errors


@pytest.mark.parametrize(
    "text",
    [
        "1 a.wav b.wav\n0 a.wav c.wav\n",
        "a.wav b.wav 1\n\na.wav c.wav 0\n",
        "a.wav\tb.wav\ttarget\na.wav c.wav  nontarget",
    ],
)
def test_three_spellings(tmp_path, text, capsys):
    trials, lines = read(tmp_path / "list", text)
    assert trials == [("a.wav", "b.wav", True), ("a.wav", "c.wav", False)]
    assert lines == []
    assert capsys.readouterr().out == ""


def test_counts_beside_the_published_ones(tmp_path, capsys):
    text = "1 a.wav b.wav\n0 a.wav c.wav\n0 b.wav c.wav\n"
    for published in ((1, 2), (2, 2), (7, 7)):
        others = None
        if published == (7, 7):
            others = {(1, 2): "the list before it was cleaned"}
        read(
            tmp_path / "list",
            text,
            published=published,
            source="the page",
            others=others,
        )
    same, fewer, uncleaned = capsys.readouterr().out.splitlines()
    counts = "1 target and 2 nontarget trials"
    assert same.startswith(f"list: {counts}, as published (the page)")
    assert "2 and 2 (the page): incomplete" in fewer
    assert uncleaned.endswith("7 and 7 (the page): the list before it was cleaned")


def test_faults_by_line(tmp_path):
    path = tmp_path / "list"
    text = "1 a.wav b.wav\na.wav c.wav 0\n0 a.wav\n0 d.wav b.wav\n0 a.wav b.wav\n"
    trials, lines = read(path, text)
    values = ("a.wav c.wav 0", "0 a.wav", "d.wav", "a.wav b.wav")
    assert len(lines) == 4
    # The first line is right.
    for number, (line, value) in enumerate(zip(lines, values), 2):
        assert refused(line, f"{path}:{number}", value)


def test_models_and_renamed_ids(tmp_path):
    trials, lines = read(
        tmp_path / "list",
        "m1-enroll b.wav 1\nm2-enroll b.wav 0\nb m1-enroll 0\n",
        recordings={"b"},
        models={"m1-enroll"},
        rename=lambda name: name.removesuffix(".wav"),
    )
    assert trials[0] == ("m1-enroll", "b", True)
    # An utterance does not enrol, and a model is not tested.
    problems = [line.split(";")[0] for line in lines]
    names = [problem.split()[-1] for problem in problems]
    assert names == ["m2-enroll", "b", "m1-enroll"]


def test_a_trial_that_occurs_again_is_kept_once(tmp_path, capsys):
    text = "1 a.wav b.wav\n0 a.wav c.wav\n1 a.wav b.wav\n"
    trials, lines = read(tmp_path / "list", text)
    assert trials == [("a.wav", "b.wav", True), ("a.wav", "c.wav", False)]
    assert lines == []
    assert refused(capsys.readouterr().out, "list", "1 repeated trial")
