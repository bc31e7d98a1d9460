"""Learning rate and margin as pure functions of a step that the trainer owns."""

import math

MARGIN_LEFT_AT_END = 1e-3  # the exponential ramp closes all but this share of the way


def warmup_cosine(
    step: int, *, peak: float, final: float, warmup_steps: int, total_steps: int
) -> float:
    """Linear from 0 to `peak` over the warm-up, then half a cosine down to `final`.

    Loshchilov and Hutter, arXiv 1608.03983, eq. 5, without restarts.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1)
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * min(done, 1.0)))


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
