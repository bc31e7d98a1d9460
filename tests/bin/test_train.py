"""Properties of whole trainings: exact resume, kill -9, ranks, fine-tuning, what is refused."""

import json
import os
import shutil
import signal

import pytest
import torch
import yaml
from forked import start_forked
from processes import children_of, wait_for, wait_until_gone
from refusals import refused, refuses
from safetensors.torch import load_file
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tiny import (
    card,
    checkpoints,
    copy_data,
    cut,
    losses,
    read_json,
    rows,
    slow,
    weights,
)

from speakerlab.checkpoints.model_files import read_source
from speakerlab.experiments.consistency import load_same_config
from speakerlab.training.checkpoint import load_state, read_checked

ONE_EPOCH = ("training.num_epochs=1", "training.bn_batch=4")


def test_an_experiment_has_all_its_files(trained):
    names = {path.name for path in trained.iterdir()}
    assert names >= {
        "config.yaml",
        "speakers.txt",
        "train.log",
        "run.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "model",
    }
    log = (trained / "train.log").read_text()
    first = log.splitlines()[0]
    assert f"{trained.name}: trains on " in first
    assert "; fp32 (as configured" in first
    # 6 speakers x 3 utterances of 1.5-1.7 s in crops of 0.6 s: 18 x 1.6 / 0.6 = 48 crops, which
    # are 6 batches of 8. There are 4 epochs.
    steps = list(losses(trained))
    assert steps == list(range(1, 4 * 6 + 1))
    assert card(trained)["steps"] == 24
    expected = weights(trained)[0]
    assert card(trained)["sha256"] == expected
    speakers = (trained / "speakers.txt").read_text().split()
    # Each speaker at three speeds.
    assert len(speakers) == 6 * 3
    assert speakers[6] == speakers[0] + "#0.9"


def test_tensorboard_shows_the_configuration_of_the_training(trained):
    path = str(trained / "tensorboard")
    events = plugin_event_accumulator.EventAccumulator(path)
    events.Reload()
    (text,) = events.Tensors("config")
    shown = text.tensor_proto.string_val[0].decode()
    # A block of code, whose lines are indented.
    lines = [line.removeprefix("    ") for line in shown.splitlines()]
    written = (trained / "config.yaml").read_text()
    assert lines == written.splitlines()

    content = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    lr = yaml.safe_load(written)["training"]["lr"]
    assert start.hparams["training.lr"].number_value == float(lr)


def test_a_resumed_run_is_bit_identical(trained, tmp_path, train):
    exp = cut(trained, tmp_path / "cut")
    step = int(checkpoints(exp)[0].name.removeprefix("step_"))
    done = train(exp)
    assert f"resuming from step {step} of 24" in done.stderr
    assert weights(exp) == weights(trained)
    assert losses(exp) == losses(trained)


def test_a_run_killed_in_any_step_resumes_bit_identically(
    trained, tmp_path, train, settings, environment
):
    exp = tmp_path / "killed"
    arguments = ["-m", "speakerlab", "train", "--exp", exp, *settings]
    for step in (5, 12):
        process = start_forked(arguments, environment, tmp_path / "output")
        wait_for(lambda step=step: len(rows(exp, "train")) >= step)
        workers = children_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert workers
        wait_until_gone(workers, seconds=5)
    done = train(exp)
    assert "resuming from step" in done.stderr
    assert weights(exp) == weights(trained)
    assert losses(exp) == losses(trained)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, train):
    """One epoch at one rank that accumulates two micro-batches."""
    exp = tmp_path_factory.mktemp("one") / "exp"
    train(exp, *ONE_EPOCH, "runtime.micro_batch=4")
    return exp


# Both ranks have the same micro-batches, or halves whose BatchNorm they share. test_train_ssl.py
# has the former for another task.
SHARES = [slow(4, 1, 1e-5), (2, 2, 5e-3)]


@pytest.mark.parametrize(("micro_batch", "joined", "rel"), SHARES)
def test_two_ranks_learn_what_one_does_and_resume_bit_identically(
    one_rank, tmp_path, train, micro_batch, joined, rel
):
    """Of the same micro-batches, or of halves whose BatchNorm the two ranks share.

    Sharing rounds otherwise, and this model amplifies it; without it, losses differ by 5 to 30 %.
    """
    whole = tmp_path / "whole"
    overrides = [*ONE_EPOCH, f"runtime.micro_batch={micro_batch}"]
    train(whole, *overrides, ranks=2)

    whole_rows = rows(whole, "train")
    expected_rows = rows(one_rank, "train")
    for row, expected in zip(whole_rows, expected_rows, strict=True):
        step = row["step"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=rel), step
        if joined == 1:
            # A shared BatchNorm rounds otherwise.
            grad_norm = pytest.approx(expected["grad_norm"], rel=rel)
            assert row["grad_norm"] == grad_norm, step

    facts = read_json(whole / "run.json")
    assert facts["bn_batch"] == 4
    assert facts["bn_joined_ranks"] == joined
    assert facts["autocast_dtype"] is None
    assert facts["loss_scaling"] is False
    for name in ("torch", "cuda", "cudnn", "driver", "gpu", "capability"):
        assert name in facts
    assert facts["torch"] == torch.__version__
    assert facts["matmul_precision"] == "highest"
    copy = cut(whole, tmp_path / "cut")
    done = train(copy, *overrides, ranks=2)
    assert "resuming from step 2 of 6" in done.stderr
    assert weights(copy) == weights(whole)
    assert losses(copy) == losses(whole)


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["training.lr=0.5"], ["training.lr", 0.002, 0.5, "-2 --init", "EXP"]),
        (["model.args.embed_dim=16"], ["model.args.embed_dim", "another --exp"]),
        (["--init", "MODEL"], ["initial model"]),
    ],
)
def test_another_configuration_or_model_is_refused_on_resume(
    trained, train, overrides, values
):
    model = str(trained / "model")
    arguments = [override.replace("MODEL", model) for override in overrides]
    text = train(trained, *arguments, code=1).stderr
    last_line = text.splitlines()[-1]
    for value in values:
        expected = str(trained) if value == "EXP" else str(value)
        assert expected in last_line, text


def test_an_extended_run_is_exact_and_publishes_its_own_model(trained, tmp_path, train):
    overrides = "training.num_epochs=5"
    whole = tmp_path / "whole"
    shutil.copytree(trained, whole)
    text = train(whole, overrides).stderr
    assert "step 24: 5 instead of 4 epochs" in text
    assert f"--init {whole}" in text
    assert card(whole)["steps"] == 30
    assert weights(whole) != weights(trained)
    steps = list(losses(whole))
    assert steps == list(range(1, 31))
    # The learning rate stays where the shorter run ended.
    last_lr = rows(trained, "train")[-1]["lr"]
    added_rows = rows(whole, "train")[24:]
    assert {row["lr"] for row in added_rows} == {last_lr}

    # One run is killed before its first new checkpoint, the other one later.
    again = tmp_path / "again"
    shutil.copytree(trained, again)
    shutil.copy(whole / "config.yaml", again)
    later = cut(whole, tmp_path / "later")
    for exp in (again, later):
        train(exp, overrides)
        assert weights(exp) == weights(whole)
        assert losses(exp) == losses(whole)
    done = train(again, overrides)
    assert "nothing changed" in done.stderr

    shorter = train(again, "training.num_epochs=4", code=1).stderr
    assert refused(shorter, "training.num_epochs", 4, "num_epochs=5", "--init")
    # The value of a file may be an old one; the value of --set is what the user wants.
    layers = [trained / "config.yaml"]
    with refuses("training.num_epochs", "=5 again", "or 4"):
        load_same_config(again, layers, [])
    load_same_config(again, layers, ["training={num_epochs: 4}"])


def test_an_unfinished_run_is_extended_from_its_learning_rate(trained, tmp_path, train):
    exp = cut(trained, tmp_path / "cut")
    first = int(checkpoints(exp)[0].name.removeprefix("step_"))
    train(exp, "training.num_epochs=6")
    before = [row["lr"] for row in rows(trained, "train")]
    after = [row["lr"] for row in rows(exp, "train")]
    assert after[:first] == before[:first]
    assert after[first] == pytest.approx(before[first])
    assert after[35] == pytest.approx(before[-1])
    assert len(after) == 36
    assert card(exp)["steps"] == 36


def test_a_finished_training_is_left_as_it_is(trained, train):
    files = [trained / "model/card.json", trained / "run.json"]
    contents = [path.read_bytes() for path in files]
    lines = train(trained).stderr.splitlines()
    assert "nothing changed" in lines[-1], lines
    # Of the device, the noise and the step.
    assert len(lines) <= 4, lines
    assert [path.read_bytes() for path in files] == contents


def test_fine_tuning_keeps_every_row_of_the_head_and_the_origin(
    trained, tmp_path, train
):
    exp = tmp_path / "lm"
    init = shutil.copytree(trained / "model", tmp_path / "init")
    source = {"licence": "CC BY 4.0", "training_data": "VoxCeleb"}
    values = card(trained) | {"source": source}
    (init / "card.json").write_text(json.dumps(values))
    overrides = [
        "augment.speeds=[1.0]",
        "training.init_head=keep",
        "training.num_epochs=1",
    ]
    done = train(exp, *overrides, "--init", init)
    assert "head: 18 of 18 rows" in done.stderr
    assert card(exp)["init_source"] == source
    assert read_source(exp) == source
    speakers = (trained / "speakers.txt").read_text()
    assert (exp / "speakers.txt").read_text() == speakers
    embedder, head = weights(exp)
    initial_embedder, initial_head = weights(trained)
    assert head != initial_head
    # Four steps do not lower the EER of two speakers, so the model that was given is published.
    facts = card(exp)
    assert facts["kept_initial"]
    assert facts["valid_eer_trained"] >= facts["valid_eer_initial"]
    assert embedder == initial_embedder


@pytest.mark.parametrize(("init_head", "rows"), [("match", 6), ("keep", 18)])
def test_speeds_may_stop_making_speakers(init_head, rows, trained, tmp_path, train):
    overrides = [
        "augment.speed_classes=off",
        f"training.init_head={init_head}",
        ONE_EPOCH[0],
    ]
    exp = tmp_path / "exp"
    text = train(exp, *overrides, "--init", trained / "model").stderr
    dropped = f"0 new, {18 - rows} rows of the initial model dropped"
    assert f"head: {rows} of {rows} rows loaded by name, {dropped}" in text
    assert f"{rows} classes: speeds keep the speaker" in text
    names = (trained / "speakers.txt").read_text().splitlines()
    kept_names = (exp / "speakers.txt").read_text().splitlines()
    assert kept_names == names[:rows]


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_frozen_epochs_train_the_head_only(ranks, trained, tmp_path, train):
    frozen = tmp_path / "frozen"
    thawed = tmp_path / "thawed"
    init = ["--init", trained / "model"]
    frozen_epoch = [
        "training.num_epochs=1",
        "training.freeze_epochs=1",
        "training.init_head=drop",
    ]
    train(frozen, *frozen_epoch, *init, ranks=ranks)
    expected = weights(trained)[0]
    assert weights(frozen)[0] == expected
    initial_head = load_file(trained / "model/head.safetensors")["weight_CD"]
    head = load_file(frozen / "model/head.safetensors")["weight_CD"]
    assert not torch.equal(head, initial_head)

    # The second epoch trains the embedder too.
    epochs = ["training.num_epochs=2", "training.freeze_epochs=1"]
    train(thawed, *epochs, *init, ranks=ranks)
    newest = checkpoints(thawed)[-1]
    state = load_state(read_checked(newest))["task"]
    initial = load_file(trained / "model/embedder.safetensors")
    changed = []
    for name, tensor in initial.items():
        if not torch.equal(state[f"embedder.{name}"], tensor):
            changed.append(name)
    assert changed


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["training.freeze_epochs=1"], "training.freeze_epochs", "--init"),
        (["training.initial_share=0.5"], "training.initial_share", "--init"),
        (["runtime.device=cpu", "runtime.precision=fp16"], "runtime.precision", "fp16"),
        (
            ["training.global_batch=8", "runtime.micro_batch=3"],
            "runtime.micro_batch",
            "2 and 4",
        ),
    ],
)
def test_a_refused_run_leaves_nothing_behind(tmp_path, train, overrides, key, value):
    text = train(tmp_path / "exp", *overrides, code=1).stderr
    assert refused(text, key, value)
    assert not list(tmp_path.iterdir())


def test_a_file_that_vanished_is_one_line_though_a_worker_met_it(data, tmp_path, train):
    copy = copy_data(data, tmp_path / "data")
    for path in (copy / "wav").glob("spk*"):
        path.unlink()
    exp = tmp_path / "exp"
    overrides = [f"data.dir={copy}", "data.valid_speakers=0"]
    text = train(exp, *overrides, code=1).stderr
    last = text.splitlines()[-1]
    assert last.startswith(f"{copy}/wav/spk")
    assert ".wav: no such file" in last
    assert last in (exp / "train.log").read_text()
