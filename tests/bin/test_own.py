"""egs/own through run.sh: fine-tuned where there is enough, calibrated where there is not."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny import ROOT
from voices import RATE, make_wave

import speakerlab
from speakerlab.checkpoints.published import file_sha256
from speakerlab.data import audio
from speakerlab.scoring.embeddings import EmbeddingTable

FEW_STEPS = [
    *("training.num_epochs=2", "training.freeze_epochs=1", "training.global_batch=8"),
    *("data.crop_seconds=0.6", "data.valid_speakers=3", "runtime.num_workers=0"),
]


@pytest.fixture(scope="module")
def initial(tmp_path_factory, run, train_command):
    exp = tmp_path_factory.mktemp("initial") / "exp"
    done = run(*train_command(exp, 1, "training.num_epochs=1"))
    assert done.returncode == 0, done.stderr
    return exp


@pytest.fixture
def run_own(environment, tmp_path, initial):
    """run_own(number of speakers, *options) -> (finished run.sh, experiment)."""

    def run_recipe(num_speakers: int, *options: str):
        for speaker in range(num_speakers):
            for take in range(2):
                path = tmp_path / "in" / f"name {speaker}" / f"{take}.flac"
                path.parent.mkdir(parents=True, exist_ok=True)
                audio.write(path, make_wave(speaker, take, 1.5), RATE)
        words = ["bash", ROOT / "egs/own/run.sh", "--corpus", tmp_path / "in"]
        words += ["--data", tmp_path / "data", "--exp", tmp_path / "exp", *options]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
        return done, tmp_path / "exp"

    return run_recipe


def wavs(ids):
    return [f"{name.replace('_', ' ')}.flac" for name in ids]


def test_twenty_speakers_are_fine_tuned_to_and_tested(run_own, initial, tmp_path):
    done, exp = run_own(22, "--init", str(initial), "--set", *FEW_STEPS)
    assert done.returncode == 0, done.stderr
    assert "head: 0 of 14 rows by name, 14 made new, 18 of the model's dropped" in done.stderr
    (row,) = json.loads((exp / "results.json").read_text())
    assert (row["num_target"], row["num_nontarget"]) == (5, 40)
    # "Untrained" is the model that it began with.
    before = EmbeddingTable.load(exp / "embeddings/test/untrained")
    again = speakerlab.load(initial).embed_many([tmp_path / "in" / n for n in wavs(before.ids)])
    np.testing.assert_allclose(before.emb_ND, again, rtol=1e-4, atol=1e-5)
    assert row["at_threshold"]["threshold"] == pytest.approx(
        json.loads((exp / "model/calibration.json").read_text())["threshold"]
    )


@pytest.mark.slow
def test_a_handful_of_speakers_teaches_the_threshold_only(run_own, initial):
    done, exp = run_own(4, "--init", str(initial))
    assert done.returncode == 0, done.stderr
    assert "4 of 4 speakers have 2 recordings or more, training needs 20" in done.stdout
    for stage in (4, 5, 6):
        assert f"stage {stage}: skipped, 4 of 4 speakers" in done.stdout
    weights = [(e / "model/embedder.safetensors").read_bytes() for e in (exp, initial)]
    assert weights[0] == weights[1]
    learned = json.loads((exp / "model/calibration.json").read_text())
    assert learned["source"] == "train: 4 speakers, 8 recordings"
    assert learned != json.loads((initial / "model/calibration.json").read_text())


@pytest.mark.slow
def test_another_corpus_does_not_overwrite_an_experiment(run_own, initial, run, tmp_path):
    done, exp = run_own(4, "--init", str(initial))
    assert done.returncode == 0, done.stderr
    kept = (exp / "model/embedder.safetensors").read_bytes()
    other = tmp_path / "other"
    shutil.copytree(initial, other)
    weights = load_file(other / "model/embedder.safetensors")
    save_file({name: t + 1 for name, t in weights.items()}, other / "model/embedder.safetensors")
    card = json.loads((other / "model/card.json").read_text())
    card["sha256"] = file_sha256(other / "model/embedder.safetensors")
    (other / "model/card.json").write_text(json.dumps(card))
    done, _ = run_own(4, "--init", str(other), "--stage", "3")
    assert done.returncode == 1
    assert f"{exp}: holds another model than {other}, got sha256 " in done.stderr
    assert (exp / "model/embedder.safetensors").read_bytes() == kept


def test_without_a_model_a_handful_is_refused(run_own):
    done, _ = run_own(4)
    assert done.returncode == 1
    assert "only the calibration is trained; give a trained model with --init" in done.stderr


def test_what_is_no_model_is_refused_at_once(run_own, tmp_path):
    done, _ = run_own(4, "--init", str(tmp_path / "nothing"))
    assert done.returncode == 1 and not (tmp_path / "data").exists()
    assert "--init: not a model: " in done.stderr
