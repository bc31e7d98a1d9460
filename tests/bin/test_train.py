"""Properties of whole trainings, run as a user runs them: resume, ranks, locks, test audio."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

GRADIENTS = Path(__file__).with_name("gradients_of_step_0.py")


def weights(exp) -> str:
    return hashlib.sha256((exp / "model" / "embedder.safetensors").read_bytes()).hexdigest()


def losses(exp) -> dict[int, float]:
    rows = [json.loads(line) for line in (exp / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, run, train_command):
    exp = tmp_path_factory.mktemp("exp") / "one"
    done = run(*train_command(exp))
    assert done.returncode == 0, done.stderr
    return exp


def test_a_training_leaves_everything_the_design_names(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert names >= {
        *("config.yaml", "speakers.txt", "train.log", "run.json", "metrics.jsonl"),
        *("tensorboard", "checkpoints", "model"),
    }
    card = json.loads((uninterrupted / "model" / "card.json").read_text())
    assert card["sha256"] == weights(uninterrupted)
    # 6 speakers x 3 utterances of 1.5-1.7 s in crops of 0.6 s: 18 x 1.6 / 0.6 = 48 crops
    assert len(losses(uninterrupted)) == card["steps"] == 4 * (48 // 8)
    speakers = (uninterrupted / "speakers.txt").read_text().split()
    assert len(speakers) == 6 * 3 and speakers[6] == speakers[0] + "#0.9"


def test_a_resumed_run_ends_with_the_same_bits(uninterrupted, tmp_path, run, train_command):
    exp = tmp_path / "cut"
    shutil.copytree(uninterrupted, exp)
    shutil.rmtree(exp / "model")
    kept = sorted((exp / "checkpoints").glob("step_*"))
    for path in kept[1:]:  # as if killed after the oldest checkpoint there is
        shutil.rmtree(path)
    step = int(kept[0].name.removeprefix("step_"))
    done = run(*train_command(exp))
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {step} of 24" in done.stderr
    assert weights(exp) == weights(uninterrupted)
    assert losses(exp) == losses(uninterrupted)


def test_without_the_test_audio_the_weights_are_the_same(
    uninterrupted, data, tmp_path, run, train_command
):
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    shutil.rmtree(copy / "test")
    for name in ("s8", "s9", "s10", "s11"):
        for path in (copy / "wav").glob(f"{name}-*"):
            path.unlink()
    for table in ("train/wav.scp", "noise/wav.scp", "rirs/wav.scp"):
        path = copy / table
        path.write_text(path.read_text().replace(str(data), str(copy)))
    done = run(*train_command(tmp_path / "exp", 1, f"data.dir={copy}"))
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "exp") == weights(uninterrupted)


@pytest.mark.slow
def test_two_ranks_resume_with_the_same_bits(tmp_path, run, train_command):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = run(*train_command(whole, 2, "training.num_epochs=1"))
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "model")
    for path in sorted((cut / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(path)
    done = run(*train_command(cut, 2, "training.num_epochs=1"))
    assert done.returncode == 0, done.stderr
    assert "resuming from step 2 of 6" in done.stderr
    assert weights(cut) == weights(whole)
    assert losses(cut) == losses(whole)


def test_two_ranks_have_the_gradients_of_two_accumulations(tmp_path, run, settings):
    """Through the real loader, BatchNorm in train mode: the same micro-batches, meaned."""
    grads = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.npz"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [GRADIENTS, out, tmp_path / f"exp{ranks}", *settings, "runtime.micro_batch=4"]
        done = run(*(launch if ranks > 1 else []), *words)
        assert done.returncode == 0, done.stderr
        grads.append(dict(np.load(out)))
    one, two = grads
    assert one.keys() == two.keys() and len(one) > 50
    for name in one:
        error = np.linalg.norm(one[name] - two[name]) / np.linalg.norm(one[name])
        assert error < 1e-6, (name, error)


def test_another_configuration_is_refused_on_resume(uninterrupted, run, train_command):
    done = run(*train_command(uninterrupted, 1, "training.lr=0.5"))
    assert done.returncode == 1
    assert "must keep its configuration, got training.lr: 0.002 -> 0.5;" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_run_of_an_experiment_is_refused(tmp_path, environment, run, train_command):
    exp = tmp_path / "exp"
    words = [sys.executable, *train_command(exp, 1, "training.num_epochs=400")]
    first = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    try:
        for line in first.stderr:
            if "step 1/" in line:
                break
        second = run(*train_command(exp, 1, "training.num_epochs=400"))
        assert second.returncode == 1
        assert f"is being trained already, got process {first.pid} on" in second.stderr
    finally:
        first.kill()
        first.wait()


def test_fine_tuning_keeps_every_row_of_the_head(uninterrupted, tmp_path, run, train_command):
    exp = tmp_path / "lm"
    more = ["augment.speeds=[1.0]", "training.init_head=keep", "training.num_epochs=1"]
    done = run(*train_command(exp, 1, *more, "--init", str(uninterrupted / "model")))
    assert done.returncode == 0, done.stderr
    assert "head: 18 of 18 rows by name, 0 made new, 0 of the model's dropped" in done.stderr
    assert (exp / "speakers.txt").read_text() == (uninterrupted / "speakers.txt").read_text()
    assert weights(exp) != weights(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_epochs_leave_the_backbone_as_it_was(
    ranks, uninterrupted, tmp_path, run, train_command
):
    """One frozen epoch of one: only the head learns. The second of two moves the backbone too."""
    init = ["--init", str(uninterrupted / "model")]
    frozen = ["training.num_epochs=1", "training.freeze_epochs=1", "training.init_head=drop"]
    done = run(*train_command(tmp_path / "frozen", ranks, *frozen, *init))
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "frozen") == weights(uninterrupted)
    head, old = (
        load_file(exp / "model" / "head.safetensors")["weight_CD"]
        for exp in (tmp_path / "frozen", uninterrupted)
    )
    assert not torch.equal(head, old)
    more = ["training.num_epochs=2", "training.freeze_epochs=1", *init]
    done = run(*train_command(tmp_path / "thawed", ranks, *more))
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "thawed") != weights(uninterrupted)


def test_only_a_given_model_may_be_frozen(tmp_path, run, train_command):
    done = run(*train_command(tmp_path / "exp", 1, "training.freeze_epochs=1"))
    assert done.returncode == 1
    assert "training.freeze_epochs: only a model given by --init may be frozen" in done.stderr


def test_a_finished_training_is_left_as_it_is(uninterrupted, run, train_command):
    kept = [(uninterrupted / name).read_bytes() for name in ("model/card.json", "run.json")]
    done = run(*train_command(uninterrupted))
    assert done.returncode == 0, done.stderr
    assert "was trained to its end before, nothing changed" in done.stderr
    assert [(uninterrupted / n).read_bytes() for n in ("model/card.json", "run.json")] == kept


def test_another_initial_model_is_refused_on_resume(uninterrupted, run, train_command):
    words = train_command(uninterrupted, 1, "--init", str(uninterrupted / "model"))
    done = run(*words)
    assert done.returncode == 1
    line = f"a resumed run must keep its initial model, got {weights(uninterrupted)} for None;"
    assert line in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_vanished_is_one_line_though_a_worker_met_it(
    data, tmp_path, run, train_command
):
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    for path in (copy / "train" / name for name in ("wav.scp", "utt2spk", "utt2dur")):
        path.write_text(path.read_text().replace(str(data), str(copy)))
    shutil.rmtree(copy / "wav")
    done = run(*train_command(tmp_path / "exp", 1, f"data.dir={copy}", "data.valid_speakers=0"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{copy}/wav/s")
    assert last.endswith(".wav: no such file; correct wav.scp or restore it")
    assert last in (tmp_path / "exp" / "train.log").read_text()
