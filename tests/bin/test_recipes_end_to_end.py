"""Recipes from a corpus in its own layout to the report, through run.sh, with a tiny model."""

import json
import math
import re
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
from tiny import ROOT, TINY
from voices import RATE, make_wave

from speakerlab.data import audio

KEYS = {
    *("trials", "system", "eer", "eer_untrained", "eer_ci95", "min_dcf", "cllr", "act_dcf"),
    *("num_target", "num_nontarget", "backend", "protocol", "model_sha256", "commit"),
    *("at_threshold", "bn_batch"),
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


def write_3dspeaker(corpus: Path) -> None:
    """train/, test/ and files/ as the official archives unpack; device 09 among the rest."""
    (corpus / "files").mkdir(parents=True)
    names: dict[str, list[str]] = {"train": [], "test": []}
    for split, speakers in (("train", range(8)), ("test", range(8, 12))):
        wavs, owners, info = [], [], ["Utt-id,Spk-id,Seg-id,Device,Distance,Dialect"]
        for speaker in speakers:
            who = f"3D_SPK_{speaker:05d}"
            for segment, device in enumerate(("01", "02", "06", "09")):
                name = f"{who}_{segment:03d}_Device{device}_Distance00_Dialect00"
                relative = f"{split}/{who}/{name}.wav"
                (corpus / relative).parent.mkdir(parents=True, exist_ok=True)
                audio.write(corpus / relative, make_wave(speaker, segment, 1.5), RATE)
                wavs.append(f"{name} {relative}")
                owners.append(f"{name}\t{who}")
                info.append(f"{name},{who},{segment:03d},{device},0.3,Standard Mandarin")
                if device != "09":
                    names[split].append(name)
        (corpus / f"files/{split}_wav.scp").write_text("\n".join(wavs) + "\n")
        (corpus / f"files/{split}_utt2spk").write_text("\n".join(owners) + "\n")
        (corpus / f"files/{split}_utt2info.csv").write_text("\n".join(info) + "\n")
    pairs = [(a, b, a[:12] == b[:12]) for a, b in combinations(names["test"], 2)]
    for kind in ("device", "distance", "dialect"):
        lines = [f"{a} {b} {'target' if same else 'nontarget'}\n" for a, b, same in pairs]
        (corpus / f"files/trials_cross_{kind}").write_text("".join(lines))


@pytest.mark.slow
def test_librispeech_from_flac_to_report(run_recipe, tmp_path):
    write_librispeech(tmp_path / "corpus")
    done = run_recipe("librispeech", tmp_path / "corpus", "--nproc", "2", "--set", *FEW_STEPS)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "exp" / "results.json").read_text())
    assert set(row) == KEYS
    assert (row["trials"], row["system"]) == ("test/trials", "exp")
    # 4 speakers x 3 utterances: 4 x 3 pairs of the same, 66 - 12 of others
    assert (row["num_target"], row["num_nontarget"]) == (12, 54)
    low, high = row["eer_ci95"]
    assert 0 <= low <= row["eer"] <= high <= 1 and math.isfinite(row["eer_untrained"])
    card = json.loads((tmp_path / "exp" / "model" / "card.json").read_text())
    assert row["model_sha256"] == card["sha256"]
    page = (tmp_path / "exp" / "report.html").read_text()
    assert f"{100 * row['eer']:.2f}" in page and page.count("data:image/png") == 2
    scores = (tmp_path / "exp" / "scores" / "test_trials.txt").read_text().splitlines()
    assert len(scores) == 66 and re.fullmatch(r"\S+ \S+ -?[01]\.\d{6} (non)?target", scores[0])

    again = run_recipe("librispeech", tmp_path / "corpus", "--nproc", "2", "--set", *FEW_STEPS)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("done before with the same options, skipped") == 2  # stages 1 and 2
    assert again.stderr.count("done before with this model and data, kept") == 2  # stage 5
    assert json.loads((tmp_path / "exp" / "results.json").read_text()) == [row]


def test_3dspeaker_from_its_official_layout_to_three_results(run_recipe, tmp_path):
    write_3dspeaker(tmp_path / "corpus")
    done = run_recipe("3dspeaker", tmp_path / "corpus", "--set", *FEW_STEPS)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "exp" / "results.json").read_text())
    names = [row["trials"] for row in rows]
    assert names == [f"test/trials_cross_{kind}" for kind in ("device", "distance", "dialect")]
    assert all((row["num_target"], row["num_nontarget"]) == (12, 54) for row in rows)
    assert "Device09" not in (tmp_path / "data" / "train" / "wav.scp").read_text()

    (tmp_path / "exp" / "embeddings" / "test" / "untrained.json").unlink()
    noise = run_recipe("3dspeaker", tmp_path / "corpus", "--stage", "6", "--noise", "elsewhere")
    assert noise.returncode == 1
    assert "--noise: is not what stage 1 was run with, got " in noise.stderr
    done = run_recipe("3dspeaker", tmp_path / "corpus", "--stage", "6")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "exp" / "results.json").read_text())
    assert [row["eer_untrained"] for row in rows] == [None] * 3


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
