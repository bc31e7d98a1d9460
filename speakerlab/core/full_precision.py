"""Computations in at least fp32, also under autocast."""

import torch
from torch import Tensor


def autocast_off(x: Tensor) -> torch.autocast:  # noqa: TID251
    """Return a context without autocast on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False)  # noqa: TID251


def widened(x: Tensor) -> Tensor:
    """Return `x` in fp32; fp64 stays fp64."""
    wide_type = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide_type)
