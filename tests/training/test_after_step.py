"""What is due after a step: rows, validation, checkpoints, stops."""

import json
import signal
from collections.abc import Callable

import pytest
from toy_task import make_schedule, make_state, micro_batches

from speakerlab.training import after_step as module
from speakerlab.training.after_step import AfterStep
from speakerlab.training.checkpoint import list_checkpoints, read_note
from speakerlab.training.monitor import Monitor
from speakerlab.training.progress import DivergedError
from speakerlab.training.signals import Signals, Stopped
from speakerlab.training.step import OptimizerStep
from speakerlab.training.update import NumericError


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
        self.monitor.close()
        text = (self.folder / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
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
