"""Official trial lists in their spellings, and what is wrong with one, by line."""

from pathlib import Path

import pytest

from egs.common.official import compare, read_official
from speakerlab.core.faults import Faults

KNOWN = {"a.wav", "b.wav", "c.wav"}


def read(path: Path, text: str, **more):
    """(trials, lines of faults) of a list with this text."""
    path.write_text(text)
    faults = Faults()
    trials = read_official(path, faults, **{"known": KNOWN, **more})
    return trials, [line for lines in faults.lines.values() for line in lines]


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
    assert lines == [] and capsys.readouterr().out == ""


def test_counts_beside_the_published_ones(tmp_path, capsys):
    for published in ((1, 2), (2, 2), (7, 7)):
        read(
            tmp_path / "list",
            "1 a.wav b.wav\n0 a.wav c.wav\n0 b.wav c.wav\n",
            published=published,
            source="the page",
            others={(1, 2): "the list before it was cleaned"} if published == (7, 7) else None,
        )
    found = "list: 1 target and 2 nontarget trials are listed"
    assert capsys.readouterr().out.splitlines() == [
        f"{found}, as published (the page)",
        f"{found}, published are 2 and 2 (the page): not the whole corpus, or another version of "
        "it",
        f"{found}, published are 7 and 7 (the page): the list before it was cleaned",
    ]
    assert (
        compare("x", (1, 2), (1, 2), ("a", "b"), "s")
        == "x: 1 a and 2 b are listed, as published (s)"
    )


def test_faults_by_line(tmp_path):
    path = tmp_path / "list"
    text = "1 a.wav b.wav\na.wav c.wav 0\n0 a.wav\n0 d.wav b.wav\n0 a.wav b.wav\n"
    trials, lines = read(path, text)
    assert lines == [
        f"{path}:2: is not '1|0 enrol test', got 'a.wav c.wav 0'; correct it",
        f"{path}:3: is not '1|0 enrol test', got '0 a.wav'; correct it",
        f"{path}:4: no such test utterance, got d.wav; remove the trial or complete the corpus",
        f"{path}:5: a trial is target and nontarget, got a.wav b.wav; keep one of the two",
    ]


def test_models_and_renamed_ids(tmp_path):
    trials, lines = read(
        tmp_path / "list",
        "m1-enroll b.wav 1\nm2-enroll b.wav 0\nb m1-enroll 0\n",
        known={"b"},
        models={"m1-enroll"},
        rename=lambda name: name.removesuffix(".wav"),
    )
    assert trials[0] == ("m1-enroll", "b", True)
    # an utterance enrols nobody and a model is not tested
    assert [line.split("got ")[1].split(";")[0] for line in lines] == [
        "m2-enroll",
        "b",
        "m1-enroll",
    ]


def test_a_trial_that_occurs_again_is_kept_once(tmp_path, capsys):
    trials, lines = read(tmp_path / "list", "1 a.wav b.wav\n0 a.wav c.wav\n1 a.wav b.wav\n")
    assert trials == [("a.wav", "b.wav", True), ("a.wav", "c.wav", False)] and lines == []
    assert capsys.readouterr().out == "list: 1 trials occur again and are left out\n"
