"""Modules on the meta device, whose tensors have shapes but no memory, and their constants."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


@contextmanager
def real_constants() -> Iterator[None]:
    """Compute real tensors, also where a module is built without memory or on fake tensors.

    For small constants whose values decide something, such as which bins of a filter are empty.
    """
    # Importing the module of fake tensors takes long; without it, there are none.
    fake_tensors = sys.modules.get("torch._subclasses.fake_tensor")
    without_fakes: Any = nullcontext()
    if fake_tensors is not None:
        without_fakes = fake_tensors.unset_fake_temporarily()
    with without_fakes, torch.device("cpu"):
        yield
