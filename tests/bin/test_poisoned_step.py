"""A batch that makes gradients NaN in the middle of a training costs its step and nothing else."""

import json
import math
from pathlib import Path

import pytest
import torch

from speakerlab.config.schema import load_config
from speakerlab.core import process
from speakerlab.experiments.train import build_training
from speakerlab.training.distributed import Ranks
from speakerlab.training.guard import NumericError
from speakerlab.training.monitor import Monitor
from speakerlab.training.signals import Signals

ALONE = Ranks(rank=0, local_rank=0, world_size=1, local_size=1, device=torch.device("cpu"))
BAD_STEP = 3


@pytest.fixture
def training(request, settings, tmp_path):
    """A training of as many epochs (of 6 steps) as the test asks for."""
    overrides = [*settings[3:], f"training.num_epochs={request.param}"]
    config = load_config([Path(settings[1])], overrides)
    return build_training(tmp_path, None, config, ALONE, Signals(process.leave))


def poison(training, is_bad):
    """NaN in one crop, in the forward pass of the training steps for which `is_bad(step)`."""

    def hook(module, _inputs, out):
        if not (module.training and is_bad(training.trainer.step)):
            return out
        poisoned = out.clone()
        poisoned[0] = float("nan")
        return poisoned

    # at the front, so that the statistics of every BatchNorm behind it are poisoned too
    first = next(m for m in training.embedder.modules() if isinstance(m, torch.nn.Conv2d))
    first.register_forward_hook(hook)


def fit(training, exp):
    def monitor(step):
        total = training.trainer.schedule.total_steps
        return Monitor(exp, start_step=step, total_steps=total, every_seconds=100)

    training.trainer.fit(monitor)


@pytest.mark.parametrize("training", [1], indirect=True)
def test_a_poisoned_step_is_skipped_whole(training, tmp_path):
    trainer = training.trainer
    poison(training, lambda step: step == BAD_STEP)
    states = {}
    run_step = trainer.run_step

    def watched(inputs):
        states[trainer.step] = {
            k: v.clone() for k, v in trainer.gradients.task.state_dict().items()
        }
        run_step(inputs)
        if trainer.step == BAD_STEP:
            for name, value in trainer.gradients.task.state_dict().items():
                assert torch.equal(value, states[BAD_STEP][name]), name

    trainer.run_step = watched
    fit(training, tmp_path)
    assert trainer.step == 6 and trainer.updater.guard.skipped == 1
    assert all(v.isfinite().all() for v in trainer.gradients.task.state_dict().values())
    rows = (tmp_path / "metrics.jsonl").read_text()
    assert '"skipped": 1' in rows and "NaN" not in rows
    moved = [
        k
        for k, v in trainer.gradients.task.state_dict().items()
        if not torch.equal(v, states[4][k])
    ]
    assert len(moved) > 50  # training went on after the bad step
    best_eer = trainer.keeper.progress.best
    assert best_eer is not None and math.isfinite(best_eer)


@pytest.mark.parametrize("training", [5], indirect=True)
def test_nothing_but_poison_ends_the_run(training, tmp_path):
    poison(training, lambda step: True)
    with pytest.raises(NumericError, match=r"20 steps in a row had no finite gradient"):
        fit(training, tmp_path)
    assert all(v.isfinite().all() for v in training.trainer.gradients.task.state_dict().values())


@pytest.mark.parametrize("training", [3], indirect=True)
def test_a_validation_that_is_not_finite_is_rolled_back(training, tmp_path):
    """Steps are fine; the embeddings of the first validation are not."""
    trainer = training.trainer
    attempts = []

    def hook(module, _inputs, out):
        if module.training or trainer.keeper.progress.attempt:
            return out
        attempts.append(trainer.step)
        return out * float("inf")

    convolution = next(m for m in training.embedder.modules() if isinstance(m, torch.nn.Conv2d))
    convolution.register_forward_hook(hook)
    fit(training, tmp_path)
    assert attempts and trainer.keeper.progress.attempt == 1 and trainer.step == 18
    report = json.loads((tmp_path / "nan_report.json").read_text())
    assert report["error"] == f"step {attempts[0]}: 6 of 6 validation embeddings are not finite"
