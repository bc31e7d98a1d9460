"""A run that is told to leave in the midst of a validation saves, and validates when it goes on."""

import json
import signal
from pathlib import Path

import pytest

from speakerlab.config.schema import load_config
from speakerlab.core import process
from speakerlab.experiments.train import build_training
from speakerlab.training.distributed import start_ranks
from speakerlab.training.monitor import Monitor
from speakerlab.training.signals import Signals, Stopped


def training_of(settings, exp):
    """Two epochs of 6 steps, one checkpoint at the end; validation after each epoch."""
    more = ["training.num_epochs=2", "training.checkpoint_every_steps=100"]
    more.append("training.valid_every_epochs=1")
    config = load_config([Path(settings[1])], [*settings[3:], *more])
    ranks = start_ranks(timeout_minutes=1)
    return build_training(exp, None, config, ranks, Signals(process.leave))


def fit(training, exp):
    def monitor(step):
        return Monitor(exp, start_step=step, total_steps=12, every_seconds=100)

    return training.trainer.fit(monitor)


def tell_in_the_midst_of_validation(training, *, at):
    """The signal comes before its first batch."""
    trainer = training.trainer
    validate = trainer.validate

    def told(stop):
        if trainer.step == at:
            trainer.signals.number = signal.SIGTERM
        return validate(stop)

    trainer.validate = told


def valid_rows(exp):
    rows = [json.loads(line) for line in (exp / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["eer"]) for row in rows if row["kind"] == "valid"]


@pytest.mark.parametrize("step", [6, 12])
def test_the_validation_is_made_up_for(settings, tmp_path, step):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for exp in (whole, cut):
        exp.mkdir()
    undisturbed = training_of(settings, whole)
    fit(undisturbed, whole)
    first = training_of(settings, cut)
    tell_in_the_midst_of_validation(first, at=step)
    with pytest.raises(Stopped, match=f"stopped by SIGTERM at step {step}, saved"):
        fit(first, cut)
    assert valid_rows(cut) == valid_rows(whole)[: step // 6 - 1]
    again = training_of(settings, cut)
    tell_in_the_midst_of_validation(again, at=step)  # and once more, before any step
    with pytest.raises(Stopped, match=f"at step {step}, saved"):
        fit(again, cut)
    last = training_of(settings, cut)
    assert fit(last, cut) == 12 - step
    assert valid_rows(cut) == valid_rows(whole)
    best = [t.trainer.keeper.progress.best for t in (last, undisturbed)]
    assert best[0] == best[1] is not None
