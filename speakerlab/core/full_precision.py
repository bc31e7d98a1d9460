"""Computations in at least fp32, also under autocast."""

import torch
from torch import Tensor


def fp32_island(x: Tensor) -> torch.autocast:  # noqa: TID251
    """Return a context without autocast on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False)  # noqa: TID251


def widened(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
