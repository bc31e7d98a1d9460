"""Learning rate and margin as pure functions of a step that the trainer owns.

To add a schedule of the learning rate, write a function here and add a line to `SCHEDULES`. The
function returns the learning rate of `step`. Its keyword arguments are any of `SUPPLIED`, and
further arguments, which need a default. A schedule with the argument `warmup_steps` defines its own
warm-up; any other schedule is multiplied by a linear warm-up, from 0 to 1.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speakerlab.core.registry import Registry

# An exponential never reaches its limit: the ramp ends when this share of its range remains.
MARGIN_LEFT_AT_END = 1e-3


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Intervals of training in steps, and the learning rate and margin of a step."""

    lr_at: Callable[[int], float]
    margin_at: Callable[[int], float]
    total_steps: int
    steps_per_epoch: int
    valid_every_steps: int
    checkpoint_every_steps: int
    checkpoint_seconds: float  # longest time between two checkpoints
    log_every_steps: int
    frozen_steps: int = 0  # steps at the start in which only the head learns


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate of a step, by a schedule whose own arguments are `args`.

    peak, final: after scaling with the global batch. extended: (step, total_steps until then) of
    each change of the length of a started run. At this step, a schedule that depends on the length
    begins again, from its current value and without warm-up.
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
        parameters = inspect.signature(self.schedule).parameters
        has_own_warmup = "warmup_steps" in parameters
        depends_on_length = "total_steps" in parameters
        warmup_steps = self.warmup_steps if has_own_warmup else 0
        stretch = _Stretch(begin=0, peak=self.peak, warmup_steps=warmup_steps)
        end = self.total_steps
        if depends_on_length:
            stretch, end = self._stretch_at(step, stretch)

        lr = self._lr_in(stretch, step, end=end)
        if has_own_warmup or step >= self.warmup_steps:
            return lr
        # `step + 1`, because a learning rate of 0 would waste the first step.
        return lr * (step + 1) / self.warmup_steps

    def _stretch_at(self, step: int, first: "_Stretch") -> tuple["_Stretch", int]:
        """Return the stretch that a step is in, and the step at which it ends."""
        # Replay the changes of length before `step`, in order. Each starts from the learning rate
        # at which the run was then, so that the rate never jumps.
        stretch = first
        for changed_at, total_before in self.extended:
            if step < changed_at:
                return stretch, total_before
            # A change during the warm-up moves the end only.
            if changed_at > stretch.begin + stretch.warmup_steps:
                current_lr = self._lr_in(stretch, changed_at, end=total_before)
                stretch = _Stretch(begin=changed_at, peak=current_lr, warmup_steps=0)
        return stretch, self.total_steps

    def _lr_in(self, stretch: "_Stretch", step: int, *, end: int) -> float:
        """Return the learning rate of a step in a stretch of the run that ends at step `end`."""
        supplied = {
            "peak": stretch.peak,
            "final": self.final,
            "warmup_steps": stretch.warmup_steps,
            "total_steps": end - stretch.begin,
            "steps_per_epoch": self.steps_per_epoch,
        }
        parameters = inspect.signature(self.schedule).parameters
        arguments: dict[str, Any] = {}
        for name in SUPPLIED:
            if name in parameters:
                arguments[name] = supplied[name]
        return self.schedule(step - stretch.begin, **arguments, **self.args)


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Steps from `begin` on, over which a schedule is spread; it starts there with its warm-up."""

    begin: int
    peak: float
    warmup_steps: int


def cosine(
    step: int, *, peak: float, final: float, warmup_steps: int, total_steps: int
) -> float:
    """Decrease along half a cosine, from `peak` after the warm-up to `final` at the end.

    Loshchilov and Hutter, arXiv 1608.03983, eq. 5, without restarts.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = _share(step - warmup_steps, total_steps - warmup_steps)
    return _half_cosine(peak, final, done)


def exponential(step: int, *, peak: float, final: float, total_steps: int) -> float:
    """Decrease exponentially from `peak` in step 0, already in the warm-up, as in WeSpeaker."""
    done = _share(step, total_steps)
    return peak * (final / peak) ** done


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
    num_decays = (step - warmup_steps) // every_steps
    return max(peak * gamma**num_decays, final)


def cyclic(
    step: int,
    *,
    peak: float,
    final: float,
    steps_per_epoch: int,
    cycle_epochs: float = 2.0,
    gamma: float = 0.5,
) -> float:
    """Rise linearly from `final` and fall back; each cycle is `gamma` times as high.

    Smith, arXiv 1506.01186: "triangular2" with gamma 0.5, "triangular" with gamma 1.
    """
    cycle_steps = _in_steps("cycle_epochs", cycle_epochs, steps_per_epoch)
    cycle, step_of_cycle = divmod(step, cycle_steps)
    # 0 at both ends of a cycle, 1 in its middle.
    height = 1 - abs(2 * step_of_cycle / cycle_steps - 1)
    return final + (peak - final) * gamma**cycle * height


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
    # The last step of the warm-up has the peak. Without a warm-up, the first step has it.
    peak_step = max(warmup_steps - 1, 0)
    if step < peak_step:
        return _half_cosine(initial * peak, peak, step / peak_step)
    done = _share(step - peak_step, total_steps - peak_step)
    return _half_cosine(peak, final, done)


def constant(step: int, *, peak: float) -> float:
    """Return `peak`, after the warm-up; `final` is not used."""
    return peak


# The program supplies these arguments to a schedule that has them as parameters. All others are set
# in the configuration.
SUPPLIED = ("peak", "final", "warmup_steps", "total_steps", "steps_per_epoch")
# Name in the configuration -> file and function in this package.
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
    """Return the share of `num_steps` that is over: 0 in the first step, 1 in the last."""
    last_step = max(num_steps - 1, 1)
    return min(step / last_step, 1.0)


def _half_cosine(start: float, end: float, done: float) -> float:
    """Return the value between `start` and `end` after a share `done` of the way."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * done))


def _in_steps(name: str, epochs: float, steps_per_epoch: int) -> int:
    """Return epochs as steps, at least 1; name: of the argument, for an error."""
    if epochs <= 0:
        raise ValueError(
            f"schedule.args.{name}: {epochs:g} is not positive; use 20, for example"
        )
    return max(round(epochs * steps_per_epoch), 1)


def margin_ramp(
    step: int, *, initial: float, final: float, start_step: int, end_step: int
) -> float:
    """Return `initial` before `start_step`, `final` from `end_step`, exponential between."""
    if step >= end_step:
        return final
    if step < start_step:
        return initial
    done = (step - start_step) / (end_step - start_step)
    # From 0 to almost 1: most of the change comes early in the ramp.
    share = 1 - MARGIN_LEFT_AT_END**done
    return initial + (final - initial) * share
