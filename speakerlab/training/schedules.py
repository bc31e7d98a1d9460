"""Learning rate and margin as pure functions of a step that the trainer owns.

To add a schedule of the learning rate: a function here and a line in `SCHEDULES`. It returns the
learning rate of `step` and takes, by keyword, what it needs of `SUPPLIED`, and its own arguments
with a default. One that takes `warmup_steps` defines its warm-up; any other is multiplied by a
linear one, from 0 to 1.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speakerlab.core.registry import Registry

MARGIN_LEFT_AT_END = 1e-3  # the exponential ramp closes all but this share of the way


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When things happen, in steps, and the two functions of a step."""

    lr_at: Callable[[int], float]
    margin_at: Callable[[int], float]
    total_steps: int
    steps_per_epoch: int
    valid_every_steps: int
    checkpoint_every_steps: int
    checkpoint_seconds: float  # or so long after the last one
    log_every_steps: int
    frozen_steps: int = 0  # steps at the start in which only the head learns


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate of a step, by a schedule whose own arguments are `args`.

    peak, final: after scaling with the global batch.
    extended: (step, total_steps until then) of each change of the length of a begun run. There, a
    schedule that depends on the length begins again, at its present value and without warm-up.
    """

    schedule: Callable[..., float]
    args: Mapping[str, Any]
    peak: float
    final: float
    warmup_steps: int
    total_steps: int
    steps_per_epoch: int
    extended: Sequence[tuple[int, int]] = ()

    def __call__(self, step: int) -> float:
        takes = inspect.signature(self.schedule).parameters
        known = {name: getattr(self, name) for name in SUPPLIED}
        begin, end = 0, self.total_steps  # of the present length
        start = self.warmup_steps if "warmup_steps" in takes else 0  # of the decay

        def value(at: int, end: int) -> float:
            given = {**known, "total_steps": end - begin}
            supplied = {name: given[name] for name in SUPPLIED if name in takes}
            return self.schedule(at - begin, **supplied, **self.args)

        for changed_at, before in self.extended if "total_steps" in takes else ():
            if step < changed_at:
                end = before
                break
            if changed_at > start:
                known |= {"peak": value(changed_at, before), "warmup_steps": 0}
                begin = start = changed_at
        lr = value(step, end)
        if "warmup_steps" in takes or step >= self.warmup_steps:
            return lr
        return lr * (step + 1) / self.warmup_steps


def cosine(step: int, *, peak: float, final: float, warmup_steps: int, total_steps: int) -> float:
    """Decrease along half a cosine, from `peak` after the warm-up to `final` at the end.

    Loshchilov and Hutter, arXiv 1608.03983, eq. 5, without restarts.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return _half_cosine(peak, final, _share(step - warmup_steps, total_steps - warmup_steps))


def exponential(step: int, *, peak: float, final: float, total_steps: int) -> float:
    """Decrease exponentially from `peak` in step 0, already in the warm-up, as in WeSpeaker."""
    return peak * (final / peak) ** _share(step, total_steps)


def step_decay(
    step: int,
    *,
    peak: float,
    final: float,
    warmup_steps: int,
    steps_per_epoch: int,
    every_epochs: float = 20.0,
    gamma: float = 0.1,
) -> float:
    """Multiply by `gamma` every `every_epochs` after the warm-up, but not below `final`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    every_steps = _in_steps("every_epochs", every_epochs, steps_per_epoch)
    return max(peak * gamma ** ((step - warmup_steps) // every_steps), final)


def cyclic(
    step: int,
    *,
    peak: float,
    final: float,
    steps_per_epoch: int,
    cycle_epochs: float = 2.0,
    gamma: float = 0.5,
) -> float:
    """Rise linearly from `final` and fall back in each cycle; each is `gamma` times as high.

    Smith, arXiv 1506.01186: "triangular2" with gamma 0.5, "triangular" with gamma 1.
    """
    cycle_steps = _in_steps("cycle_epochs", cycle_epochs, steps_per_epoch)
    cycle, at = divmod(step, cycle_steps)
    return final + (peak - final) * gamma**cycle * (1 - abs(2 * at / cycle_steps - 1))


def one_cycle(
    step: int,
    *,
    peak: float,
    final: float,
    warmup_steps: int,
    total_steps: int,
    initial: float = 0.04,
) -> float:
    """Rise along half a cosine in the warm-up, from `initial` times `peak`, then fall to `final`.

    Smith and Topin, arXiv 1708.07120, with the curves of torch's OneCycleLR; the momentum is
    constant.
    """
    top = max(warmup_steps - 1, 0)
    if step < top:
        return _half_cosine(initial * peak, peak, step / top)
    return _half_cosine(peak, final, _share(step - top, total_steps - top))


def constant(step: int, *, peak: float) -> float:
    """Return `peak`, after the warm-up; `final` is not used."""
    return peak


# What the program supplies to a schedule that names it; all other arguments are its own.
SUPPLIED = ("peak", "final", "warmup_steps", "total_steps", "steps_per_epoch")
SCHEDULES: Mapping[str, Callable[..., float]] = Registry(
    __name__.rpartition(".")[0],
    {
        "cosine": "schedules:cosine",
        "exponential": "schedules:exponential",
        "step": "schedules:step_decay",
        "cyclic": "schedules:cyclic",
        "one_cycle": "schedules:one_cycle",
        "constant": "schedules:constant",
    },
)


def _share(step: int, num_steps: int) -> float:
    """Return how much of `num_steps` is over in a step: 0 in the first, 1 in the last."""
    return min(step / max(num_steps - 1, 1), 1.0)


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * done))


def _in_steps(name: str, epochs: float, steps_per_epoch: int) -> int:
    if epochs <= 0:
        raise ValueError(f"schedule.args.{name}: {epochs:g} is not positive; use 20, for example")
    return max(round(epochs * steps_per_epoch), 1)


def margin_ramp(
    step: int, *, initial: float, final: float, start_step: int, end_step: int
) -> float:
    """Return `initial` to `start_step`, `final` from `end_step`, exponentially between."""
    if step >= end_step:
        return final
    if step < start_step:
        return initial
    done = (step - start_step) / (end_step - start_step)
    return initial + (final - initial) * (1 - MARGIN_LEFT_AT_END**done)
