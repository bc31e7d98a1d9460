"""Computations in at least fp32, also under autocast."""

from collections.abc import Callable

import torch
from torch import Tensor

WITHOUT_FLOAT64 = ("mps",)  # types of devices: Apple's GPUs have no fp64


def autocast_off(x: Tensor) -> torch.autocast:  # noqa: TID251
    """Return a context without autocast on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False)  # noqa: TID251


def where_float64_exists(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return compute(x), computed on the CPU if the device of `x` has no fp64.

    `compute` must take its constants from the device of its input.
    """
    if x.device.type not in WITHOUT_FLOAT64:
        return compute(x)
    return compute(x.to("cpu")).to(x.device)


def widened(x: Tensor) -> Tensor:
    """Return `x` in fp32; fp64 stays fp64."""
    wide_type = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide_type)
