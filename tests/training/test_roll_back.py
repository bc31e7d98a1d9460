"""Steps that are not finite: a report, roll-backs, and an error if these do not help."""

import pytest
import torch
from toy_task import NoAugmentation, ToySource, make_schedule, make_state

from speakerlab.training.checkpoint import list_checkpoints
from speakerlab.training.roll_back import MAX_ROLLBACKS, RollBack
from speakerlab.training.step import OptimizerStep
from speakerlab.training.task import Inputs
from speakerlab.training.update import NumericError

BAD = NumericError("step 2: 20 steps in a row without a finite gradient", step=2)


@pytest.fixture
def run(tmp_path):
    """A toy training with a checkpoint of step 1, whose weights have changed since."""
    state = make_state(tmp_path)
    state.resume()
    state.step = 1
    state.save(scheduled=True)
    state.wait()
    state.step = 3
    with torch.no_grad():
        state.task.head.bias.fill_(7.0)
    return state


@pytest.fixture
def roll_back(run):
    source = ToySource(accumulation=2)
    step = OptimizerStep(
        state=run,
        schedule=make_schedule(),
        accumulation=2,
        seed=0,
    )
    reports: list[dict] = []

    def read_from(number: int) -> Inputs:
        batches = source.read_from(number, run.attempt)
        return Inputs(batches, NoAugmentation(), device=run.ranks.device)

    roll_back = RollBack(step, read_from=read_from, report=reports.append)
    roll_back.reports = reports
    roll_back.source = source
    return roll_back


def test_it_reports_and_returns_to_the_last_checkpoint(run, roll_back):
    line = roll_back.recover(BAD)
    assert line == "rolled back (new data order, 0.5 of the learning rate) to"
    assert run.step == 1
    assert run.attempt == 1
    bias = run.task.head.bias
    assert not torch.any(bias == 7.0)
    # the bad step is read again, as it was
    assert roll_back.source.reads == [(2, 0)]

    # a kill resumes the new attempt
    run.wait()
    checkpoints = list_checkpoints(run.writer.folder)
    assert checkpoints[-1].name == "step_00000001_attempt_1"

    (report,) = roll_back.reports
    assert report["error"] == str(BAD)
    assert report["step"] == 2
    assert report["attempt"] == 0
    assert report["margin"] == pytest.approx(0.2)
    assert report["lr"] == pytest.approx(0.1 / 3)
    first, second = report["micro_batches"]
    assert first["index"] == 0
    assert first["is_finite"]
    assert second["index"] == 1
    assert second["is_finite"]


def test_the_layer_that_is_not_finite_is_named(run, roll_back):
    with torch.no_grad():
        weight = run.task.embedder[0].weight
        weight[0, 0] = float("inf")
    roll_back.recover(BAD)
    (report,) = roll_back.reports
    modules = {facts["module"] for facts in report["micro_batches"]}
    assert modules == {"embedder.0"}


def test_it_gives_up_after_some_attempts(run, roll_back):
    for attempt in range(MAX_ROLLBACKS):
        assert run.attempt == attempt
        roll_back.recover(BAD)
    with pytest.raises(NumericError) as caught:
        roll_back.recover(BAD)
    assert caught.value is BAD
    # the last one, too
    assert len(roll_back.reports) == MAX_ROLLBACKS + 1


def test_without_a_checkpoint_it_returns_to_the_beginning(tmp_path):
    state = make_state(tmp_path)
    state.resume()
    before = state.task.head.bias.clone()
    with torch.no_grad():
        state.task.head.bias.fill_(7.0)
    state.step = 3
    state.roll_back()
    assert torch.equal(state.task.head.bias, before)
    assert state.step == 0
    assert state.attempt == 1
