"""An optimizer step: its gradients, draws, frozen steps, and the order of its events."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from toy_task import make_schedule, make_state, micro_batches

from speakerlab.training.step import OptimizerStep
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


def test_progress_and_the_guard_cover_the_micro_batches(tmp_path):
    events: list[object] = []

    @contextmanager
    def guard():
        events.append("guarded")
        yield
        events.append("unguarded")

    step = make_step(tmp_path)
    step.memory_guard = guard
    step.report_progress = events.append
    optimizer = step.updater.optimizer
    optimizer.register_step_pre_hook(lambda *_: events.append("update"))
    step.take(micro_batches())
    assert events == ["guarded", 0.5, 1.0, "unguarded", "update"]


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
