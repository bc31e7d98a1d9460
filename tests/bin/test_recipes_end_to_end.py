"""Recipes from a corpus in its own layout to the report, through run.sh, with a tiny model."""

import json
import math
import re
import subprocess
from pathlib import Path

import pytest
from tiny import ROOT, TINY
from voices import RATE, make_wave

from speakerlab.data import audio

KEYS = {
    *("trials", "system", "eer", "eer_untrained", "eer_ci95", "min_dcf", "cllr", "act_dcf"),
    *("num_target", "num_nontarget", "backend", "protocol", "model_sha256", "commit"),
    *("at_threshold", "bn_batch", "min_cllr", "intervals", "calibration", "conditions"),
    "compared",
}
FEW_STEPS = [*TINY, "training.num_epochs=1"]


@pytest.fixture
def run_recipe(environment, tmp_path):
    """run_recipe(name, corpus, *options) -> finished run.sh; data and exp are below tmp_path."""

    def run(name: str, corpus: Path, *options: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", str(ROOT / "egs" / name / "run.sh"), "--corpus", str(corpus)]
        words += ["--data", str(tmp_path / "data"), "--exp", str(tmp_path / "exp")]
        words += ["--model", "campplus_tiny", *options]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)

    return run


def write_librispeech(corpus: Path) -> None:
    for subset, speakers in (("train-x", range(8)), ("test-x", range(8, 12))):
        for speaker in speakers:
            for utterance in range(3):
                path = corpus / subset / f"{speaker}" / "7" / f"{speaker}-7-{utterance:04d}.flac"
                path.parent.mkdir(parents=True, exist_ok=True)
                audio.write(path, make_wave(speaker, utterance, 1.5), RATE)


@pytest.mark.slow
def test_librispeech_from_flac_to_report(run_recipe, tmp_path):
    write_librispeech(tmp_path / "corpus")
    done = run_recipe("librispeech", tmp_path / "corpus", "--nproc", "2", "--set", *FEW_STEPS)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "exp" / "results.json").read_text())
    assert [row["backend"] for row in rows] == [
        *("cosine", "mean+cosine", "mean+cosine+asnorm", "mean+cosine+asnorm+qmf")
    ]
    row = rows[0]
    assert set(row) == KEYS
    assert (row["trials"], row["system"]) == ("test/trials", "exp")
    # 4 speakers x 3 utterances: 4 x 3 pairs of the same, 66 - 12 of others
    assert (row["num_target"], row["num_nontarget"]) == (12, 54)
    low, high = row["eer_ci95"]
    assert 0 <= low <= row["eer"] <= high <= 1 and math.isfinite(row["eer_untrained"])
    card = json.loads((tmp_path / "exp" / "model" / "card.json").read_text())
    assert row["model_sha256"] == card["sha256"]
    page = (tmp_path / "exp" / "report.html").read_text()
    assert f"{100 * row['eer']:.2f}" in page and page.count("data:image/png") >= 2
    scores = (tmp_path / "exp" / "scores" / "test_trials.txt").read_text().splitlines()
    assert len(scores) == 66 and re.fullmatch(r"\S+ \S+ -?[01]\.\d{6} (non)?target", scores[0])

    again = run_recipe("librispeech", tmp_path / "corpus", "--nproc", "2", "--set", *FEW_STEPS)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("already done with the same options, skipped") == 2  # stages 1 and 2
    assert again.stderr.count("done before with this model and data, kept") == 3  # stage 5
    assert json.loads((tmp_path / "exp" / "results.json").read_text()) == rows


@pytest.mark.slow
def test_mini_speaks_learns_and_reports(environment, tmp_path):
    """The README's first command, at eight epochs instead of forty."""
    words = ["bash", str(ROOT / "egs" / "mini" / "run.sh"), "--corpus", str(tmp_path / "corpus")]
    words += ["--data", str(tmp_path / "data"), "--exp", str(tmp_path / "exp")]
    words += ["--set", "training.num_epochs=8"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "exp" / "results.json").read_text())
    assert (row["num_target"], row["num_nontarget"]) == (1512, 6000)
    assert row["eer"] < row["eer_untrained"] - 0.05
