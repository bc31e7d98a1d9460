"""CUDA graphs on a CPU, for tests.

A capture records operations with their tensors and numbers, and undoes what they have changed; a
replay does the same operations on the same tensors again, without running any Python of the model.
"""

from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Graph(TorchDispatchMode):
    """Replaces `torch.cuda.CUDAGraph`, and `capture` replaces `torch.cuda.graph`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[tuple[Any, Any, Any, list[Tensor]]]()
        self.before = dict[int, tuple[Any, Any]]()  # by address: memory from before the capture
        self.made = set[int]()  # addresses

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        # The same memory, without the gradients that torch attaches to tensors.
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        for tensor in tensors_in((args, kwargs)):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in self.before.keys() | self.made:
                self.before[memory.data_ptr()] = (memory, memory.clone())
        result = func(*args, **kwargs)
        made = [tensor.detach() for tensor in tensors_in(result)]
        self.made.update(
            t.untyped_storage().data_ptr()
            for t in made
            if t.untyped_storage().data_ptr() not in self.before
        )
        self.calls.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                for old, new in zip(made, tensors_in(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextmanager
def capture(graph: Graph, **how):
    assert how["capture_error_mode"] == "thread_local"
    try:
        with graph:
            yield
    finally:
        for memory, before in graph.before.values():
            memory.copy_(before)


def is_recording() -> bool:
    return any(isinstance(mode, Graph) for mode in _get_current_dispatch_mode_stack())


class Stream:
    def wait_stream(self, _: Any) -> None: ...


def emulate(monkeypatch) -> None:
    """Replace the names of `torch.cuda` that training/graphs.py uses."""
    stand_ins = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": Stream,
        "graph": capture,
        "stream": lambda _: nullcontext(),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
