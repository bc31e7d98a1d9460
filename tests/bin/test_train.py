"""Properties of whole trainings: exact resume, kill -9, ranks, fine-tuning, what is refused."""

import json
import os
import shutil
import signal

import pytest
import torch
from forked import start_forked
from processes import children_of, wait_for, wait_until_gone
from refusals import refused, refuses
from safetensors.torch import load_file
from tiny import card, checkpoints, copy_data, cut, losses, rows, weights

from speakerlab.checkpoints.model_files import read_source
from speakerlab.experiments.consistency import load_same_config
from speakerlab.training.checkpoint import load_state, read_checked

ONE_EPOCH = ("training.num_epochs=1", "training.bn_batch=4")


def test_an_experiment_has_all_its_files(trained):
    names = {path.name for path in trained.iterdir()}
    assert names >= {
        *("config.yaml", "speakers.txt", "train.log", "run.json", "metrics.jsonl"),
        *("tensorboard", "checkpoints", "model"),
    }
    first = (trained / "train.log").read_text().splitlines()[0]
    assert f"{trained.name}: trains on " in first and "; fp32 (as configured" in first
    # 6 speakers x 3 utterances of 1.5-1.7 s in crops of 0.6 s: 18 x 1.6 / 0.6 = 48 crops
    assert list(losses(trained)) == list(range(1, 4 * (48 // 8) + 1))
    assert card(trained)["steps"] == 24 and card(trained)["sha256"] == weights(trained)[0]
    speakers = (trained / "speakers.txt").read_text().split()
    assert len(speakers) == 6 * 3 and speakers[6] == speakers[0] + "#0.9"


def test_a_resumed_run_is_bit_identical(trained, tmp_path, train):
    exp = cut(trained, tmp_path / "cut")
    step = int(checkpoints(exp)[0].name.removeprefix("step_"))
    assert f"resuming from step {step} of 24" in train(exp).stderr
    assert weights(exp) == weights(trained)
    assert losses(exp) == losses(trained)


def test_a_run_killed_in_any_step_resumes_bit_identically(
    trained, tmp_path, train, settings, environment
):
    exp = tmp_path / "killed"
    words = ["-m", "speakerlab", "train", "--exp", exp, *settings]
    for step in (5, 12):
        process = start_forked(words, environment, tmp_path / "output")
        wait_for(lambda step=step: len(rows(exp, "train")) >= step)
        workers = children_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert workers
        wait_until_gone(workers, seconds=5)
    assert "resuming from step" in train(exp).stderr
    assert weights(exp) == weights(trained)
    assert losses(exp) == losses(trained)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, train):
    """One epoch at one rank that accumulates two micro-batches."""
    exp = tmp_path_factory.mktemp("one") / "exp"
    train(exp, *ONE_EPOCH, "runtime.micro_batch=4")
    return exp


@pytest.mark.parametrize(("micro_batch", "joined", "rel"), [(4, 1, 1e-5), (2, 2, 5e-3)])
def test_two_ranks_learn_what_one_does_and_resume_bit_identically(
    one_rank, tmp_path, train, micro_batch, joined, rel
):
    """Of the same micro-batches, or of halves whose BatchNorm the two ranks share.

    Sharing rounds otherwise, and this model amplifies it; without it, losses differ by 5 to 30 %.
    """
    whole, more = tmp_path / "whole", [*ONE_EPOCH, f"runtime.micro_batch={micro_batch}"]
    train(whole, *more, ranks=2)
    for ours, theirs in zip(rows(whole, "train"), rows(one_rank, "train"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=rel), ours["step"]
        if joined == 1:  # a shared BatchNorm rounds otherwise
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=rel), ours["step"]
    facts = json.loads((whole / "run.json").read_text())
    assert (facts["bn_batch"], facts["bn_joined_ranks"]) == (4, joined)
    assert facts["autocast_dtype"] is None and facts["loss_scaling"] is False
    assert {"torch", "cuda", "cudnn", "driver", "gpu", "capability"} <= set(facts)
    assert facts["torch"] == torch.__version__ and facts["matmul_precision"] == "highest"
    copy = cut(whole, tmp_path / "cut")
    assert "resuming from step 2 of 6" in train(copy, *more, ranks=2).stderr
    assert weights(copy) == weights(whole)
    assert losses(copy) == losses(whole)


@pytest.mark.parametrize(
    ("more", "values"),
    [
        (["training.lr=0.5"], ["training.lr", 0.002, 0.5, "-2 --init", "EXP"]),
        (["model.args.embed_dim=16"], ["model.args.embed_dim", "another --exp"]),
        (["--init", "MODEL"], ["initial model"]),
    ],
)
def test_another_configuration_or_model_is_refused_on_resume(trained, train, more, values):
    words = [word.replace("MODEL", str(trained / "model")) for word in more]
    text = train(trained, *words, code=1).stderr
    values = [str(trained) if value == "EXP" else value for value in values]
    assert all(str(value) in text.splitlines()[-1] for value in values), text


def test_an_extended_run_is_exact_and_publishes_its_own_model(trained, tmp_path, train):
    more, whole = "training.num_epochs=5", tmp_path / "whole"
    shutil.copytree(trained, whole)
    text = train(whole, more).stderr
    assert "step 24: 5 instead of 4 epochs" in text and f"--init {whole}" in text
    assert card(whole)["steps"] == 30 and weights(whole) != weights(trained)
    assert list(losses(whole)) == list(range(1, 31))
    assert {row["lr"] for row in rows(whole, "train")[24:]} == {rows(trained, "train")[-1]["lr"]}
    again = tmp_path / "again"  # killed before its first checkpoint
    shutil.copytree(trained, again)
    shutil.copy(whole / "config.yaml", again)
    later = cut(whole, tmp_path / "later")  # killed later, the newest checkpoints are damaged
    for exp in (again, later):
        train(exp, more)
        assert weights(exp) == weights(whole) and losses(exp) == losses(whole)
    assert "nothing changed" in train(again, more).stderr
    shorter = train(again, "training.num_epochs=4", code=1).stderr
    assert refused(shorter, "training.num_epochs", 4, "num_epochs=5", "--init")
    with refuses("training.num_epochs", "=5 again", "or 4"):  # what a file says is no request
        load_same_config(again, [trained / "config.yaml"], [])
    load_same_config(again, [trained / "config.yaml"], ["training={num_epochs: 4}"])


def test_an_unfinished_run_is_extended_from_its_learning_rate(trained, tmp_path, train):
    exp = cut(trained, tmp_path / "cut")
    first = int(checkpoints(exp)[0].name.removeprefix("step_"))
    train(exp, "training.num_epochs=6")
    before, after = ([row["lr"] for row in rows(e, "train")] for e in (trained, exp))
    assert after[:first] == before[:first] and after[first] == pytest.approx(before[first])
    assert after[35] == pytest.approx(before[-1]) and len(after) == 36
    assert card(exp)["steps"] == 36


def test_a_finished_training_is_left_as_it_is(trained, train):
    kept = [(trained / name).read_bytes() for name in ("model/card.json", "run.json")]
    lines = train(trained).stderr.splitlines()
    assert "nothing changed" in lines[-1] and len(lines) <= 4, lines  # device, noise, step
    assert [(trained / name).read_bytes() for name in ("model/card.json", "run.json")] == kept


def test_fine_tuning_keeps_every_row_of_the_head_and_the_origin(trained, tmp_path, train):
    exp, init = tmp_path / "lm", shutil.copytree(trained / "model", tmp_path / "init")
    source = {"licence": "CC BY 4.0", "training_data": "VoxCeleb"}
    (init / "card.json").write_text(json.dumps({**card(trained), "source": source}))
    more = ["augment.speeds=[1.0]", "training.init_head=keep", "training.num_epochs=1"]
    assert "head: 18 of 18 rows" in train(exp, *more, "--init", init).stderr
    assert card(exp)["init_source"] == read_source(exp) == source
    assert (exp / "speakers.txt").read_text() == (trained / "speakers.txt").read_text()
    assert weights(exp)[1] != weights(trained)[1]
    # Four steps do not lower the EER of two speakers, so the model that was given is published.
    facts = card(exp)
    assert facts["kept_initial"] and facts["valid_eer_trained"] >= facts["valid_eer_initial"]
    assert weights(exp)[0] == weights(trained)[0]


@pytest.mark.parametrize(("init_head", "rows"), [("match", 6), ("keep", 18)])
def test_speeds_may_stop_making_speakers(init_head, rows, trained, tmp_path, train):
    more = ["augment.speed_classes=off", f"training.init_head={init_head}", ONE_EPOCH[0]]
    text = train(tmp_path / "exp", *more, "--init", trained / "model").stderr
    dropped = f"0 new, {18 - rows} rows of the initial model dropped"
    assert f"head: {rows} of {rows} rows loaded by name, {dropped}" in text
    assert f"{rows} classes: speeds keep the speaker" in text
    names = (trained / "speakers.txt").read_text().splitlines()
    assert (tmp_path / "exp/speakers.txt").read_text().splitlines() == names[:rows]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_frozen_epochs_train_the_head_only(ranks, trained, tmp_path, train):
    frozen, thawed, init = tmp_path / "frozen", tmp_path / "thawed", ["--init", trained / "model"]
    more = ["training.num_epochs=1", "training.freeze_epochs=1", "training.init_head=drop"]
    train(frozen, *more, *init, ranks=ranks)
    assert weights(frozen)[0] == weights(trained)[0]
    head, old = (load_file(e / "model/head.safetensors")["weight_CD"] for e in (frozen, trained))
    assert not torch.equal(head, old)
    train(thawed, "training.num_epochs=2", "training.freeze_epochs=1", *init, ranks=ranks)
    last = load_state(read_checked(checkpoints(thawed)[-1]))["task"]
    old = load_file(trained / "model/embedder.safetensors")
    assert not all(torch.equal(last[f"embedder.{name}"], tensor) for name, tensor in old.items())


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        (["training.freeze_epochs=1"], "training.freeze_epochs", "--init"),
        (["runtime.device=cpu", "runtime.precision=fp16"], "runtime.precision", "fp16"),
        (["training.global_batch=8", "runtime.micro_batch=3"], "runtime.micro_batch", "2 and 4"),
    ],
)
def test_a_refused_run_leaves_nothing_behind(tmp_path, train, more, key, value):
    assert refused(train(tmp_path / "exp", *more, code=1).stderr, key, value)
    assert not list(tmp_path.iterdir())


def test_a_file_that_vanished_is_one_line_though_a_worker_met_it(data, tmp_path, train):
    copy = copy_data(data, tmp_path / "data")
    for path in (copy / "wav").glob("spk*"):
        path.unlink()
    text = train(tmp_path / "exp", f"data.dir={copy}", "data.valid_speakers=0", code=1).stderr
    last = text.splitlines()[-1]
    assert last.startswith(f"{copy}/wav/spk") and ".wav: no such file" in last
    assert last in (tmp_path / "exp/train.log").read_text()
