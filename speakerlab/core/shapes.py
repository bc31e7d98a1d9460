"""Modules whose tensors have shapes and no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

RANDOM = "normal_", "uniform_", "orthogonal_"  # ends of names in torch.nn.init and torch.Tensor


class _NoDraws(TorchFunctionMode):
    """Mode without random initial values, for which torch would import its compiler (seconds)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.endswith(RANDOM):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build modules on the meta device, without any draw."""
    with torch.device("meta"), _NoDraws():
        yield
