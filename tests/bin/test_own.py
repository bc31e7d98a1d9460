"""egs/own through run.sh: fine-tuned where there is enough, calibrated where there is not."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny import ROOT, TINY, card, read_json, weights
from voices import RATE, make_wave

import speakerlab
from speakerlab.checkpoints.published import file_sha256
from speakerlab.config.schema import load_config
from speakerlab.data import audio
from speakerlab.data.tables import read_table
from speakerlab.scoring.embeddings import EmbeddingTable
from tests.egs.messy_corpus import write_as_people_have_it

FEW_STEPS = [
    "training.num_epochs=2",
    "training.freeze_epochs=1",
    "training.global_batch=8",
    "data.crop_seconds=0.6",
    "data.valid_speakers=3",
    "runtime.num_workers=0",
]


@pytest.fixture
def run_own(environment, tmp_path):
    """run_own(number of speakers, *options, code=0) -> finished run.sh."""

    def run_recipe(num_speakers: int, *options: object, code: int = 0):
        corpus = tmp_path / "in"
        for speaker in range(num_speakers):
            folder = corpus / f"name {speaker}"
            folder.mkdir(parents=True, exist_ok=True)
            for take in range(2):
                wave_S = make_wave(speaker, take, 1.5)
                audio.write(folder / f"{take}.flac", wave_S, RATE)
        arguments = ["bash", ROOT / "egs/own/run.sh", "--corpus", corpus]
        arguments += ["--data", tmp_path / "data", "--exp", tmp_path / "exp"]
        done = subprocess.run(
            [*arguments, *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run_recipe


def calibration(exp):
    return read_json(exp / "model/calibration.json")


@pytest.mark.slow
def test_a_model_is_fine_tuned_to_twenty_speakers(run_own, trained, tmp_path):
    done = run_own(22, "--init", trained, "--set", *FEW_STEPS)
    assert "head: 0 of 14 rows" in done.stderr
    exp = tmp_path / "exp"
    (row,) = read_json(exp / "results.json")
    assert row["num_target"] == 5
    assert row["num_nontarget"] == 40
    # "Untrained" is the model that it began with.
    before = EmbeddingTable.load(exp / "embeddings/test/untrained")
    wavs = []
    for name in before.ids:
        wavs.append(tmp_path / f"in/{name.replace('_', ' ')}.flac")
    initial_ND = speakerlab.load(trained).embed_many(wavs)
    np.testing.assert_allclose(before.emb_ND, initial_ND, rtol=1e-4, atol=1e-5)

    # The threshold of the report is the one of the calibration.
    threshold = row["at_threshold"]["threshold"]
    assert threshold == pytest.approx(calibration(exp)["threshold"])


@pytest.mark.slow
def test_a_model_trained_without_labels_is_fine_tuned_with_labels(run_own, tmp_path):
    ssl = ("--model", "campplus_tiny", "--task", "ssl", "--method", "simclr")
    first = tmp_path / "first"
    exp = tmp_path / "exp"
    settings = (*TINY, "data.valid_speakers=3", "training.num_epochs=2")
    run_own(22, *ssl, "--exp", first, "--set", *settings)
    (row,) = read_json(first / "results.json")
    assert row["num_target"] == 5
    assert row["num_nontarget"] == 40
    assert row["backend"] == "cosine"
    assert "trained without labels (simclr)" in (first / "report.html").read_text()
    assert not (first / "model/head.safetensors").exists()
    done = run_own(22, "--init", first, "--set", *FEW_STEPS)
    assert "head: 0 of 14 rows" in done.stderr
    config = load_config([exp / "config.yaml"])
    assert config.task == "verification"
    assert config.objective is None
    assert card(exp)["objective"] is None
    assert card(exp)["train_speakers"] == 14
    assert "without labels" not in (exp / "report.html").read_text()


@pytest.mark.slow
def test_a_handful_of_speakers_calibrates_and_never_overwrites(
    run_own, trained, tmp_path
):
    exp = tmp_path / "exp"
    done = run_own(4, "--init", trained)
    assert "stages 4 to 6: skipped, 4 of 4 speakers" in done.stdout
    expected = weights(trained)[0]
    assert weights(exp)[0] == expected
    assert calibration(exp)["source"] == "train: 4 speakers, 8 recordings"
    assert calibration(exp) != calibration(trained)

    # A model with other weights.
    other = shutil.copytree(trained, tmp_path / "other")
    file = other / "model/embedder.safetensors"
    tensors = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    values = card(other) | {"sha256": file_sha256(file)}
    (other / "model/card.json").write_text(json.dumps(values))
    done = run_own(4, "--init", other, "--stage", "3", code=1)
    assert refused(done.stderr, str(exp), other)
    expected = weights(trained)[0]
    assert weights(exp)[0] == expected


def test_a_handful_without_a_model_is_refused(run_own):
    done = run_own(4, code=1)
    assert "--init" in done.stderr


def test_what_is_not_a_model_is_refused_at_once(run_own, tmp_path):
    done = run_own(4, "--init", tmp_path / "nothing", code=1)
    assert refused(done.stderr, "--init", tmp_path / "nothing")
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_six_speakers_are_fine_tuned_with_cross_validation(run_own, trained, tmp_path):
    exp = tmp_path / "exp"
    settings = [*FEW_STEPS[:-2], "runtime.num_workers=0"]
    options = ("--init", trained, "--set", *settings)
    done = run_own(6, "--folds", "2", *options)
    # Three pairs of one speaker and twelve of two in each part.
    trials = (tmp_path / "data/all/test/trials").read_text().splitlines()
    assert len(trials) == 2 * 15
    before, after = done.stdout.split(f"{exp}/folds/after.txt\n")
    assert f"{exp}/folds/before.txt\n  EER" in before
    assert f"against {exp}/folds/before.txt" in after
    assert weights(exp)[0] != weights(trained)[0]
    assert card(exp)["train_speakers"] == 6
    assert card(tmp_path / "exp-fold1")["train_speakers"] == 3
    source = "cross-validation: 6 speakers in 2 folds"
    assert calibration(exp)["source"] == source

    stages = ("--stage", "2", "--stop-stage", "3", "--folds", "2")
    again = run_own(6, *stages, *options)
    assert again.stderr.count("nothing changed") == 3


@pytest.mark.slow
def test_what_people_have_trains_the_model_of_its_clean_copies(environment, tmp_path):
    samples = write_as_people_have_it(tmp_path / "messy")

    def train(corpus: str) -> tuple[Path, Path]:
        """Return the data directories and the experiment of stages 0 to 3."""
        data = tmp_path / f"data_{corpus}"
        exp = tmp_path / f"exp_{corpus}"
        arguments = ["bash", ROOT / "egs/own/run.sh", "--corpus", tmp_path / corpus]
        arguments += ["--data", data, "--exp", exp, "--stop-stage", "3"]
        done = subprocess.run(
            [*arguments, "--set", *TINY, *FEW_STEPS, "training.freeze_epochs=0"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return data, exp

    messy_data, messy_exp = train("messy")
    wavs = read_table(messy_data / "train/wav.scp")
    wavs |= read_table(messy_data / "test/wav.scp")
    for name, path in wavs.items():
        # Of lossy recordings, what the recipe has decoded.
        wave_S = samples.get(name)
        copy = tmp_path / "clean" / f"{name}.flac"
        copy.parent.mkdir(parents=True, exist_ok=True)
        audio.write(copy, audio.read(path) if wave_S is None else wave_S, RATE)

    clean_data, clean_exp = train("clean")
    assert not (clean_data / "train/rejected.tsv").exists()
    assert weights(messy_exp)[0] == weights(clean_exp)[0]
