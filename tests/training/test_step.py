"""A step of a training: its gradients, draws, frozen steps and failures, and what is due after it.

What is due are rows, validation, checkpoints and stops.
"""

import json
import signal
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from toy_task import make_schedule, make_state, micro_batches

from speakerlab.training import step as module
from speakerlab.training.checkpoint import list_checkpoints, read_note
from speakerlab.training.monitor import Monitor
from speakerlab.training.progress import DivergedError
from speakerlab.training.signals import Signals, Stopped
from speakerlab.training.step import AfterStep, OptimizerStep
from speakerlab.training.update import MAX_BAD_STEPS, NumericError


def make_step(folder, *, accumulation=2, seed=0, **changes) -> OptimizerStep:
    return OptimizerStep(
        state=make_state(folder),
        schedule=make_schedule(**changes),
        accumulation=accumulation,
        seed=seed,
    )


def weights(step: OptimizerStep) -> dict[str, torch.Tensor]:
    copies = {}
    for name, value in step.task.state_dict().items():
        copies[name] = value.clone()
    return copies


def test_it_is_the_step_of_plain_pytorch(tmp_path):
    """The mean loss of the micro-batches, backward, and SGD with momentum."""
    step = make_step(tmp_path)
    plain = make_state(tmp_path).task
    optimizer = torch.optim.SGD(
        plain.parameters(),
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
    )
    batches = micro_batches()
    plain_batches = micro_batches()
    for number in range(3):
        step.take(batches)
        step.state.step += 1

        group = optimizer.param_groups[0]
        group["lr"] = 0.1 / (number + 1)
        optimizer.zero_grad()
        for _ in range(2):
            micro_batch = next(plain_batches)
            label_B = micro_batch.batch.label_B
            output = plain(micro_batch.x_B, label_B, 0.1 * number)
            (output.loss / 2).backward()
        optimizer.step()
    state = step.task.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_draws_depend_on_seed_attempt_step_and_micro_batch_alone(tmp_path):
    first = make_step(tmp_path)
    first.take(micro_batches())
    # another use of the global generator changes nothing
    torch.rand(7)
    first.state.step = 5
    first.take(micro_batches())
    draws = first.task.draws
    assert len(set(draws)) == 4

    again = make_step(tmp_path)
    again.state.step = 5
    again.take(micro_batches())
    assert again.task.draws == draws[2:]

    other_seed = make_step(tmp_path, seed=1)
    other_attempt = make_step(tmp_path)
    other_attempt.state.attempt = 1
    for other in (other_seed, other_attempt):
        other.state.step = 5
        other.take(micro_batches())
        shared = set(other.task.draws) & set(draws)
        assert not shared


def changed_names(before, after) -> set[str]:
    names = set()
    for name, value in before.items():
        if not torch.equal(value, after[name]):
            names.add(name)
    return names


def test_in_frozen_steps_only_the_head_learns(tmp_path):
    step = make_step(tmp_path, frozen_steps=1)
    before = weights(step)
    step.take(micro_batches())
    after = weights(step)
    changed = changed_names(before, after)
    assert changed == {"head.weight", "head.bias"}

    step.state.step = 1
    step.take(micro_batches())
    changed = changed_names(after, weights(step))
    assert {"embedder.0.weight", "embedder.1.running_mean"} <= changed


def test_a_step_that_is_not_finite_changes_nothing(tmp_path):
    step = make_step(tmp_path)
    before = weights(step)
    batches = micro_batches()
    bad = next(batches)
    nan_input = bad._replace(x_B=bad.x_B * float("nan"))
    update = step.take(iter([nan_input, next(batches)]))
    assert float(update.is_bad) == 1
    assert not changed_names(before, weights(step))
    # no crop is counted
    counts = step.state.sums.sums.tolist()[:4]
    assert counts == [0, 0, 0, 0]

    for _ in range(MAX_BAD_STEPS - 1):
        step.updater.check(0, update)
        update = step.take(iter([nan_input, nan_input]))
    with pytest.raises(NumericError, match="20 steps in a row"):
        step.updater.check(0, update)


def test_each_roll_back_halves_the_learning_rate(tmp_path):
    step = make_step(tmp_path)
    rates = []
    for attempt in range(3):
        step.state.attempt = attempt
        rates.append(step.lr_at(1))
    assert rates == [0.05, 0.025, 0.0125]


def test_progress_is_reported_after_each_micro_batch(tmp_path):
    events: list[object] = []
    step = make_step(tmp_path)
    step.report_progress = events.append
    optimizer = step.updater.optimizer
    optimizer.register_step_pre_hook(lambda *_: events.append("update"))
    step.take(micro_batches())
    assert events == [0.5, 1.0, "update"]


@pytest.mark.parametrize("error", [RuntimeError("lost"), MemoryError()])
def test_an_error_of_a_pass_is_handled_and_raised_again(tmp_path, error):
    failures: list[Exception] = []
    step = make_step(tmp_path)
    step.on_failure = failures.append

    def fail(loss):
        raise error

    step.updater.scale_loss = fail
    with pytest.raises(type(error)) as raised:
        step.take(micro_batches())
    assert raised.value is error
    assert failures == [error]


def test_the_error_of_the_handler_replaces_that_of_a_pass(tmp_path):
    class Stop(RuntimeError):
        pass

    def stop(error):
        raise Stop from None

    step = make_step(tmp_path)
    step.on_failure = stop
    bad = next(micro_batches())
    bad_shape = bad._replace(x_B=bad.x_B[:, :1])
    with pytest.raises(Stop) as raised:
        step.take(iter([bad_shape]))
    assert raised.value.__suppress_context__


def test_other_errors_are_not_handled(tmp_path):
    """An update that fails leaves no state to save; a KeyError is not about memory."""
    failures: list[Exception] = []
    step = make_step(tmp_path)
    step.on_failure = failures.append

    def fail_update(*_):
        raise RuntimeError("in the update")

    optimizer = step.updater.optimizer
    hook = optimizer.register_step_pre_hook(fail_update)
    with pytest.raises(RuntimeError, match="in the update"):
        step.take(micro_batches())
    hook.remove()

    def fail_pass(loss):
        raise KeyError("not of torch")

    step.updater.scale_loss = fail_pass
    with pytest.raises(KeyError):
        step.take(micro_batches())
    assert failures == []


def test_ranks_average_their_gradients_once_a_step(tmp_path):
    """All but the last micro-batch run in `no_sync` of DDP."""

    class Wrapped(nn.Module):
        def __init__(self, task):
            super().__init__()
            self.task = task
            self.is_synchronised = True
            self.passes: list[bool] = []

        def forward(self, *arguments, **options):
            self.passes.append(self.is_synchronised)
            return self.task(*arguments, **options)

        @contextmanager
        def no_sync(self):
            self.is_synchronised = False
            yield
            self.is_synchronised = True

    step = make_step(tmp_path, accumulation=3)
    step.model = Wrapped(step.task)
    step.take(micro_batches())
    assert step.model.passes == [False, False, True]


class ToyValidation:
    """Returns the next of its error rates, or None if it is stopped."""

    def __init__(self, *rates: float) -> None:
        self.rates = list(rates)

    def run(self, embedder, ranks, stop: Callable[[], bool]):
        if stop():
            return None
        return {"eer": self.rates.pop(0)}


class Run:
    """A toy training: its steps, and what is due after each."""

    def __init__(self, folder, *rates: float, stop: bool = False, **changes: object):
        self.folder = folder
        self.state = make_state(folder / "checkpoints", stop=stop)
        schedule = make_schedule(**changes)
        self.step = OptimizerStep(
            state=self.state,
            schedule=schedule,
            accumulation=1,
            seed=0,
        )
        self.signals = Signals(lambda number: None)
        self.monitor = Monitor(folder, total_steps=8, every_seconds=0.0)
        self.monitor.begin(0)
        self.batches = micro_batches()
        self.after = AfterStep(
            state=self.state,
            schedule=schedule,
            validation=ToyValidation(*rates) if rates else None,
            monitor=self.monitor,
            signals=self.signals,
            lr_at=self.step.lr_at,
            report_progress=lambda step, activity: None,
        )

    def take(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step.take(self.batches)
            self.state.step += 1
            self.after.run(lambda: 0.5)

    def rows(self, kind: str) -> list[dict]:
        """Return the rows of a kind, `train` or `valid`, in metrics.jsonl."""
        self.monitor.close()
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        return [row for row in rows if row["kind"] == kind]

    def saved(self) -> list[tuple[int, bool]]:
        """Return (step, scheduled) of each checkpoint."""
        self.state.wait()
        notes = []
        for path in list_checkpoints(self.state.writer.folder):
            note = read_note(path)
            notes.append((note.step, note.scheduled))
        return notes


def test_rows_are_written_when_due_and_at_the_end(tmp_path):
    run = Run(tmp_path, log_every_steps=3)
    run.take(8)
    rows = run.rows("train")
    assert [row["step"] for row in rows] == [3, 6, 8]
    # Learning rate and margin are those of the step that was taken, counted from 0.
    lrs = [row["lr"] for row in rows]
    assert lrs == pytest.approx([0.1 / 3, 0.1 / 6, 0.1 / 8])
    margins = [row["margin"] for row in rows]
    assert margins == pytest.approx([0.2, 0.5, 0.7])
    epochs = [row["epoch"] for row in rows]
    assert epochs == [0.75, 1.5, 2.0]
    for row in rows:
        assert row["silent"] == 0


def test_checkpoints_are_scheduled_best_and_last(tmp_path):
    run = Run(
        tmp_path,
        0.3,
        0.2,
        0.25,
        checkpoint_every_steps=3,
        valid_every_steps=3,
    )
    run.take(8)
    # Steps 3 and 6 are scheduled and better than before, 8 is only the last.
    assert run.saved() == [(3, True), (6, True), (8, False)]
    assert run.state.best == 0.2
    steps = [row["step"] for row in run.rows("valid")]
    assert steps == [3, 6, 8]


def test_the_best_metric_is_saved_outside_of_the_schedule(tmp_path):
    run = Run(tmp_path, 0.3, 0.4, checkpoint_every_steps=100)
    run.take(5)
    assert run.saved() == [(4, False)]


def test_a_roll_back_must_not_resume_after_bad_steps(tmp_path):
    run = Run(tmp_path)
    run.take(3)
    run.state.updater.bad_in_a_row.fill_(2)
    run.state.step = 4
    run.after.run(lambda: 0.0)
    assert run.saved() == []


def test_a_checkpoint_is_overdue_after_some_time(tmp_path, monkeypatch):
    run = Run(tmp_path, checkpoint_seconds=100.0)
    run.take(1)
    assert run.saved() == []
    run.state.saved_at -= 101.0
    run.take(2)
    assert run.saved() == [(2, False)]


def test_a_signal_saves_and_stops(tmp_path):
    run = Run(tmp_path)
    run.take(1)
    run.signals.number = signal.SIGTERM
    with pytest.raises(Stopped, match="SIGTERM at step 2"):
        run.take(1)
    assert run.saved() == [(2, False)]


def test_a_validation_that_a_signal_interrupts_is_made_up_for(tmp_path):
    run = Run(tmp_path, 0.3, 0.2)
    run.take(3)
    run.signals.number = signal.SIGTERM
    with pytest.raises(Stopped):
        run.take(1)
    assert run.after.is_validation_due()
    assert run.state.best is None

    run.signals.number = 0
    run.after.make_up_for_validation()
    assert run.state.best == 0.3
    assert not run.after.is_validation_due()
    steps = [row["step"] for row in run.rows("valid")]
    assert steps == [4]

    # only once
    run.after.make_up_for_validation()
    assert run.after.validation.rates == [0.2]


def test_embeddings_that_are_not_finite_make_the_step_before_bad(tmp_path):
    class Broken:
        def run(self, embedder, ranks, stop):
            raise FloatingPointError("2 of 6 validation embeddings are not finite")

    run = Run(tmp_path)
    run.after.validation = Broken()
    with pytest.raises(NumericError, match="step 4: 2 of 6") as caught:
        run.take(4)
    assert caught.value.step == 3


@pytest.mark.parametrize("stop", [False, True])
def test_a_training_that_does_not_learn_is_warned_of_or_stopped(
    tmp_path, monkeypatch, caplog, stop
):
    run = Run(tmp_path, stop=stop)
    learning = run.state.learning
    monkeypatch.setattr(learning, "add", lambda step, row: "does not learn")
    if stop:
        with pytest.raises(DivergedError, match="does not learn"):
            run.take(2)
        assert run.saved() == [(2, False)]
    else:
        run.take(2)
        assert run.saved() == []
    assert "does not learn" in caplog.text


def test_validation_does_not_count_as_time_of_training(tmp_path, monkeypatch):
    clock = iter(range(1000))
    run = Run(tmp_path, 0.3)
    run.take(3)

    def tick() -> float:
        return float(next(clock))

    monkeypatch.setattr(module.time, "monotonic", tick)
    run.state.step = 4
    before = run.state.sums.started_at
    run.after.validate()
    assert run.state.sums.started_at > before
