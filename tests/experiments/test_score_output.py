"""What `speakerlab score` prints: a JSON object per result, error rates at a threshold."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from embedded_sets import make_experiment
from models_on_disk import CALIBRATION
from refusals import refuses

from speakerlab.bin import score
from speakerlab.experiments.trial_list import read_trial_list
from speakerlab.scoring.score_files import read_scores


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """An experiment with a second list, whose scorings draw no pictures."""
    with pytest.MonkeyPatch.context() as patch:
        report = "speakerlab.experiments.report"
        patch.setattr(f"{report}.draw_list", lambda folder, group: [])
        patch.setattr("speakerlab.scoring.bootstrap.MANY_TRIALS", 0)
        exp, data = make_experiment(tmp_path_factory.mktemp("scored"))
        trials = data / "test/trials"
        lines = trials.read_text().splitlines(keepends=True)
        (data / "test/few").write_text("".join(lines[:2000]))
        yield exp, trials, data / "test/few"


def printed(capsys, exp, lists, *options: str) -> str:
    paths = [str(path) for path in lists]
    capsys.readouterr()
    score.main(["--exp", str(exp), "--trials", *paths, *options])
    return capsys.readouterr().out


def rates_at(exp, trials, threshold: float, back_end: str = "") -> tuple[float, float]:
    """Misses and false alarms, counted."""
    listed = read_trial_list(trials).trials
    file = exp / "scores" / f"test_{trials.name}{back_end}.txt"
    is_accepted_N = read_scores(file, listed) >= threshold
    is_target_N = listed.is_target_N
    p_miss = np.mean(~is_accepted_N[is_target_N])
    p_fa = np.mean(is_accepted_N[~is_target_N])
    return float(p_miss), float(p_fa)


def test_a_line_for_each_list_and_back_end(experiment, capsys):
    exp, trials, few = experiment
    back_ends = ("--backend", "cosine", "mean+cosine")
    text = printed(capsys, exp, [trials, few], *back_ends, "--json")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["trials"], row["backend"]) for row in rows] == [
        ("test/trials", "cosine"),
        ("test/trials", "mean+cosine"),
        ("test/few", "cosine"),
        ("test/few", "mean+cosine"),
    ]
    assert rows == json.loads((exp / "results.json").read_text())

    # Of results that are kept, those asked for.
    text = printed(capsys, exp, [few], "--backend", "mean+cosine", "--json")
    assert [json.loads(line)["trials"] for line in text.splitlines()] == ["test/few"]
    again = printed(capsys, exp, [few], "--backend", "mean+cosine", "--json")
    assert again == text


def test_rates_at_a_threshold_are_counted(experiment, capsys):
    exp, trials, _ = experiment
    back_ends = ("--backend", "cosine", "mean+cosine")
    options = (*back_ends, "--threshold", "0.5")
    rows = [
        json.loads(line)
        for line in printed(capsys, exp, [trials], *options, "--json").splitlines()
    ]
    for row, suffix in zip(rows, ("", "_mean+cosine")):
        p_miss, p_fa = rates_at(exp, trials, 0.5, suffix)
        decision = {"threshold": 0.5, "far": None, "p_miss": p_miss, "p_fa": p_fa}
        assert row["decision"] == pytest.approx(decision)
        assert 0 < p_miss < 1 or 0 < p_fa < 1
    text = printed(capsys, exp, [trials], *options)
    p_miss, p_fa = rates_at(exp, trials, 0.5)
    last_table = text.split("\n\n")[-1]
    assert f"0.500000  {100 * p_miss:8.2f}" in last_table
    assert f"{100 * p_fa:.2f}" in last_table


def test_a_rate_needs_a_threshold_of_the_model(experiment, capsys):
    exp, trials, _ = experiment
    with refuses("--far", "no calibration"):
        printed(capsys, exp, [trials], "--far", "0.01")
    calibration = exp / "model/calibration.json"
    calibration.write_text(json.dumps(asdict(CALIBRATION)))
    try:
        options = ("--backend", "cosine", "mean+cosine", "--far", "0.1", "--json")
        text = printed(capsys, exp, [trials], *options)
        of_cosine, of_mean = map(json.loads, text.splitlines())
        p_miss, p_fa = rates_at(exp, trials, 0.4)
        decision = {"threshold": 0.4, "far": 0.1, "p_miss": p_miss, "p_fa": p_fa}
        assert of_cosine["decision"] == pytest.approx(decision)
        assert of_mean["decision"] is None
        with refuses("calibration", "0.3"):
            printed(capsys, exp, [trials], "--far", "0.3")
        with refuses("--far", "cosine"):
            printed(capsys, exp, [trials], "--far", "0.1", "--backend", "mean+cosine")
    finally:
        calibration.unlink()


@pytest.mark.parametrize("threshold", ["nan", "inf"])
def test_a_threshold_is_a_finite_score(experiment, capsys, threshold):
    exp, trials, _ = experiment
    with refuses("--threshold", threshold):
        printed(capsys, exp, [trials], "--threshold", threshold)
