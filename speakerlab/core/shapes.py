"""Modules on the meta device, whose tensors have shapes but no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Suffixes of the random functions in torch.nn.init and torch.Tensor.
RANDOM = ("normal_", "uniform_", "orthogonal_")


class _NoDraws(TorchFunctionMode):
    """Mode without random initial values, for which torch would import its compiler (seconds)."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__.endswith(RANDOM):
            # In place: the functions return the tensor that they are given.
            return args[0] if args else kwargs["tensor"]
        options = kwargs or {}
        return func(*args, **options)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build modules on the meta device, without random draws."""
    with torch.device("meta"), _NoDraws():
        yield
