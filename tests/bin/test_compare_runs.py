"""`speakerlab compare-runs`: what it prints and refuses; its test is that of `compare`."""

import json
import re

import pytest
from compared_runs import LIST, add_valid, make_run, write_list
from refusals import refuses

from speakerlab.bin import compare, compare_runs


@pytest.fixture
def exp(tmp_path):
    """Two experiments, of which the second one is clearly worse."""
    write_list(tmp_path / "data/test")
    make_run(tmp_path / "exp/a", seed=0, lr=0.1, spread=0.3)
    make_run(tmp_path / "exp/b", seed=0, lr=0.5, spread=0.5)
    return tmp_path / "exp"


@pytest.fixture
def ask(capsys):
    def main(*arguments):
        compare_runs.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return main


def test_the_p_value_is_that_of_compare(exp, ask, capsys):
    files = [str(exp / name / "scores/test_trials.txt") for name in "ab"]
    compare.main(["--trials", str(exp.parent / "data/test/trials"), *files])
    printed = capsys.readouterr().out
    difference = re.search(
        r"EER +(\S+) points \((\S+) to (\S+)\) against .*p = (\S+)", printed
    )
    assert difference is not None
    rows = [json.loads(line) for line in ask(exp, "--json").splitlines()]
    compared = rows[1]["results"][LIST]["compared"]
    low, high = compared["ci95"]
    shown = [f"{100 * rate:+.2f}" for rate in (compared["eer_difference"], low, high)]
    assert [*shown, f"{compared['p_value']:.3g}"] == list(difference.groups())
    assert 0.001 < compared["p_value"] < 0.5


def test_tables_name_the_reference_and_the_settings(exp, ask):
    text = ask(exp)
    assert text.splitlines()[0].split()[:2] == ["experiment", "lr"]
    assert "EER compared with a (the first), in points:" in text
    assert "EER compared with b (as requested), in points:" in ask(
        exp, "--against", exp / "b"
    )
    for name, eer in (("a", 0.25), ("b", 0.125)):
        add_valid(exp / name, eer=eer)
    text = ask(exp / "a", exp / "b")
    assert "EER compared with b (lowest validation EER), in points:" in text
    (line,) = [line for line in text.splitlines() if line.startswith(LIST)]
    assert line.split()[1] == "a"


def test_experiments_without_scores_are_shown(exp, ask):
    (exp / "b/results.json").unlink()
    (exp / "a/train.log").write_text("no time\n")
    lines = ask(exp).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["a", "b"]
    assert not any(line.startswith("EER compared") for line in lines)
    assert lines[-1] == f"not tested: b on {LIST}: b was not scored on it"


def test_wrong_arguments_are_refused(exp, ask, tmp_path):
    with refuses(str(tmp_path / "data"), "no experiment"):
        ask(exp, tmp_path / "data")
    with refuses(str(exp / "a"), "two or more"):
        ask(exp / "a")
    with refuses("--against", exp / "c"):
        ask(exp, "--against", exp / "c")
    (exp / "b/results.json").write_text("[{}]")
    with refuses(str(exp / "b/results.json"), "damaged"):
        ask(exp)
