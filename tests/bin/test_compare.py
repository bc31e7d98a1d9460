"""`speakerlab compare`: several lists with names, and p-values corrected for their number."""

import json
import re

import pytest
from compared_runs import make_run
from paper_systems import make_list, write_system
from refusals import refuses

from speakerlab.bin.compare import main
from speakerlab.experiments.run_table import holm
from speakerlab.experiments.trial_list import read_trial_list

LISTS = ["--trials", "one=data/test/trials", "--trials", "two=data/other/trials"]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Three systems on two lists."""
    for name, num_speakers in (("test", 10), ("other", 8)):
        listed = make_list(tmp_path / "data" / name, num_speakers=num_speakers)
        for seed, spread in enumerate((0.4, 0.5, 0.8)):
            path = tmp_path / f"{'abc'[seed]}_{name}.txt"
            write_system(path, listed, spread=spread, seed=seed)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ask(capsys):
    def compare(*arguments):
        main(list(arguments))
        return capsys.readouterr().out

    return compare


def systems(*names):
    return [f"{name}={name}_{part}.txt" for name in names for part in ("test", "other")]


def test_all_comparisons_of_a_metric_are_corrected_together(world, ask):
    rows = [
        json.loads(line)
        for line in ask(*systems(*"abc"), *LISTS, "--json").splitlines()
    ]
    assert [(row["trials"], row["system"]) for row in rows] == [
        (trials, name) for trials in ("one", "two") for name in "abc"
    ]
    compared = [row["compared"] for row in rows if row["compared"] is not None]
    assert len(compared) == 4
    for key in ("eer", "min_dcf_0.01"):
        p_values = [row[key]["p_value"] for row in compared]
        assert [row[key]["p_holm"] for row in compared] == holm(p_values)
        assert len(set(p_values)) > 1
    # Each list alone has other corrections.
    alone = ask(*systems(*"abc")[::2], *LISTS[:2], "--json").splitlines()
    second = json.loads(alone[1])["compared"]["eer"]
    assert second["p_value"] == compared[0]["eer"]["p_value"]
    assert second["p_holm"] != compared[0]["eer"]["p_holm"]


def test_text_has_the_names_of_the_lists(world, ask):
    text = ask(*systems(*"abc"), *LISTS)
    lines = text.splitlines()
    assert [line for line in lines if line in ("one", "two")] == ["one", "two"]
    (line, *_) = [line for line in lines if "against a, p = " in line]
    assert re.search(r"p = \S+, corrected \S+$", line)
    (place,) = [n for n, line in enumerate(lines) if line.startswith("corrected: ")]
    assert lines[place].endswith("for 4 comparisons of each metric")
    # Then a line for each system and metric.
    assert [
        line.partition(" against a: ")[0] for line in lines[place + 1 : place + 5]
    ] == [f"{metric} of {name}" for name in "bc" for metric in ("EER", "minDCF(0.01)")]


def test_the_conclusion_is_that_of_the_corrected_p_values(world, ask):
    for part, seed in (("test", 5), ("other", 6)):
        listed = read_trial_list(world / f"data/{part}/trials")
        write_system(world / f"w_{part}.txt", listed, spread=3.0, seed=seed)
    pairs = systems(*"aw")
    text = ask(*pairs, *LISTS)
    assert (
        "\nEER of w against a: significantly higher on both lists (level 0.05, corrected)\n"
        in text
    )
    # The better one as the second system, on one list.
    text = ask("w=w_test.txt", "a=a_test.txt", *LISTS[:2])
    assert "EER of a against w: significantly lower (level 0.05)\n" in text
    # Percentage points, and the p-value that no other difference could go below.
    (difference,) = re.findall(r"EER +(.*) against w, p = (.*)", text)
    assert re.fullmatch(r"-\d+\.\d\d points \(-\S+ to -\S+\)", difference[0])
    assert difference[1] == "0.0167 (the least possible on this list)"
    # Worse on the first list only.
    text = ask("a=a_test.txt", "a=a_other.txt", "w=w_test.txt", "w=c_other.txt", *LISTS)
    rows = [
        json.loads(line)["compared"]
        for line in ask(
            *("a=a_test.txt", "a=a_other.txt", "w=w_test.txt", "w=c_other.txt"),
            *LISTS,
            "--json",
        ).splitlines()
    ]
    assert rows[1]["eer"]["p_holm"] < 0.05
    other = "significantly higher"
    if rows[3]["eer"]["p_holm"] >= 0.05:
        other = "no significant difference"
    verdict = f"significantly higher on one, {other} on two"
    if other == "significantly higher":
        verdict = f"{other} on both lists"
    assert f"EER of w against a: {verdict} (level" in text


def test_few_speakers_are_no_sign_of_equal_systems(world, ask):
    small = make_list(world / "data/small", num_speakers=5)
    tiny = make_list(world / "data/tiny", num_speakers=4)
    for name, listed in (("small", small), ("tiny", tiny)):
        for seed, spread in enumerate((0.2, 3.0)):
            write_system(world / f"{seed}_{name}.txt", listed, spread=spread, seed=seed)
    text = ask("0_small.txt", "1_small.txt", "--trials", "data/small/trials")
    assert "EER of 1_small.txt against 0_small.txt: no significant difference" in text
    assert text.splitlines()[-1].startswith(
        "small/trials: with 5 speakers, a p-value is at least 0.051 before"
    )
    text = ask("0_tiny.txt", "1_tiny.txt", "--trials", "data/tiny/trials")
    assert text.splitlines()[-1].endswith(
        "not tested (fewer than five speakers) (level 0.05)"
    )


def test_two_systems_on_one_list_are_not_corrected(world, ask):
    text = ask(
        "--trials", "data/test/trials", "a_test.txt", "b_test.txt", "--far", "0.1"
    )
    assert text.splitlines()[0] == "a_test.txt"
    assert "corrected" not in text
    assert text.count("threshold ") == 2
    assert "against a_test.txt, p = " in text
    assert "least" not in text
    row = json.loads(ask(*systems("a")[:1], *LISTS[:2], "--far", "0.1", "--json"))
    assert row["at_rate"]["p_fa"] <= 0.1
    assert row["compared"] is None


def test_experiments_are_compared_on_their_lists(world, ask):
    make_run(world / "exp/x", seed=0, lr=0.1, spread=0.3)
    make_run(world / "exp/y", seed=1, lr=0.1, spread=0.6)
    rows = [
        json.loads(line) for line in ask("x=exp/x", "y=exp/y", "--json").splitlines()
    ]
    assert [row["trials"] for row in rows] == ["test/trials"] * 2
    (stored,) = json.loads((world / "exp/y/results.json").read_text())
    assert rows[1]["eer"] == stored["eer"]
    with refuses("exp/x", "not scored on two"):
        ask("exp/x", *LISTS[2:])
    (world / "exp/x/scores/test_trials.txt").unlink()
    with refuses("test/trials", "exp/x has no stored scores"):
        ask("exp/x", "exp/y")
