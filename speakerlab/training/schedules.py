"""Learning rate and margin as pure functions of a step that the trainer owns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def warmup_and_decay(
    step: int,
    *,
    peak: float,
    final: float,
    warmup_steps: int,
    total_steps: int,
    decay: str = "cosine",
    extended: Sequence[tuple[int, int]] = (),
) -> float:
    """Linear from 0 over the warm-up, then down to `final` at the end.

    decay: "cosine" is half a cosine from `peak` at the end of the warm-up (Loshchilov and Hutter,
    arXiv 1608.03983, eq. 5, without restarts). "exponential" begins at `peak` in step 0, so that
    the warm-up leads to a lower value, as in WeSpeaker.
    extended: (step, total_steps until then) of each change of the length of a begun run; the value
    of that step is where another decay begins.
    """
    start = warmup_steps if decay == "cosine" else 0
    for changed_at, before in extended:
        if step < changed_at:
            total_steps = before
            break
        if changed_at > start:
            peak = _decayed(changed_at, decay, peak, final, start, before)
            start = changed_at
    value = peak if step < start else _decayed(step, decay, peak, final, start, total_steps)
    return value * (step + 1) / warmup_steps if step < warmup_steps else value


def _decayed(step: int, decay: str, peak: float, final: float, start: int, total: int) -> float:
    done = min((step - start) / max(total - 1 - start, 1), 1.0)
    if decay == "exponential":
        return peak * (final / peak) ** done
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * done))


def margin_ramp(
    step: int, *, initial: float, final: float, start_step: int, end_step: int
) -> float:
    """`initial` up to `start_step`, `final` from `end_step` on, exponentially closer in between."""
    if step >= end_step:
        return final
    if step < start_step:
        return initial
    done = (step - start_step) / (end_step - start_step)
    return initial + (final - initial) * (1 - MARGIN_LEFT_AT_END**done)
