"""What is checked and counted at every operation on tensors without data; see fake_gpu.py."""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from sides import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(ROOT))
from speakerlab.core.batch import Batch
from speakerlab.inference.batches import embed_batches

HOST = torch.device("cpu")
FAKE = "torch._subclasses.fake_tensor"
COPIES = ("_to_copy", "copy_")
UPLOADS = Batch.to, embed_batches  # the functions that may copy to the GPU
FREE = (  # operations that launch nothing, besides views
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"),
    *("detach", "alias", "lift_fresh", "_unsafe_view", "is_pinned", "_pin_memory"),
)
# Tensors of each list that a launch takes, by the number of lists (ATen's MultiTensorApply.cuh).
TENSORS_AT_ONCE = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


class Fault(RuntimeError):
    """What a GPU would reject or wait for."""


class Kernels(TorchDispatchMode):
    """Checks and counts every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.uploads = Counter[str](), Counter[str]()  # by region, by line
        self.regions = ["outside"]  # those that are open
        self.clock = itertools.count(1)  # of events and copies to the host
        self.step_began = self.known = 0  # the host knows what happened until `known`
        self.pinned, self.arrives = set[int](), dict[int, int]()  # storages on the host
        self.is_capturing = False  # a CUDA graph
        self.recorded: list[str] | None = None  # operations with shapes and numbers, if wanted

    def begin_step(self) -> None:
        """Count the events from here on as those of this step."""
        self.step_began = next(self.clock)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked for far more often than anything else
            return args[0].fake_device
        name, kwargs = func._schema.name.partition("::")[2], kwargs or {}
        given = tensors_in((*args, *kwargs.values()))
        if name == "_local_scalar_dense":
            return self.read(func, args[0])
        if name == "is_pinned":
            return storage_of(args[0]) in self.pinned
        if name not in (*COPIES, *FREE) and any(map(is_on_gpu, given)):
            refuse_mix(func, given)
        result = run(func, name, args, kwargs)
        made = tensors_in((result,))
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            self.pinned.update(map(storage_of, made))
        if name in COPIES:
            pair = (args[0], made[0]) if name == "_to_copy" else (args[1], args[0])
            self.copy(func, *pair, non_blocking=is_non_blocking(func, args, kwargs))
        if self.recorded is not None:
            self.recorded.append(f"{func} {tree_map_only(Tensor, describe, (args, kwargs))}")
        if self.is_capturing and not all(map(is_on_gpu, (*given, *made))):
            raise fault("capture", f"{func} of a tensor on the host, which replays would not see,")
        if any(map(is_on_gpu, (*given, *made))) and not self.is_capturing:
            self.count(func, name, args)
        return result

    def read(self, func: Any, value: Tensor) -> float:
        """Return a number that is on the host; 1 for one that came from the GPU."""
        if is_on_gpu(value):
            raise fault("host read", "of a value on the GPU")
        if storage_of(value) not in self.arrives:
            return func(value)
        if self.arrives[storage_of(value)] > self.known:
            raise fault("host read", "of a copy that may not have arrived")
        return 1.0 if value.is_floating_point() else 1

    def copy(self, func: Any, source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
        """Refuse copies that block, and uploads from more than one place."""
        if is_on_gpu(source) and not is_on_gpu(target):
            # torch makes the result of `to("cpu", non_blocking=True)` page-locked.
            is_pinned = "_to_copy" in func.name() or storage_of(target) in self.pinned
            if not (non_blocking and is_pinned):
                raise fault("host read", f"{func}, for which the host waits,")
            self.arrives[storage_of(target)] = next(self.clock)
        elif is_on_gpu(target) and not is_on_gpu(source):
            if not (non_blocking and any(map(is_running, UPLOADS))):
                raise fault("upload", func)
            self.uploads[place()] += 1

    def count(self, func: Any, name: str, args: Sequence[Any]) -> None:
        if not func.is_view and name not in FREE and func.namespace == "aten":
            of_lists = name.startswith(("_foreach_", "_fused_"))
            self.launches[self.regions[-1]] += list_launches(name, args) if of_lists else 1


def run(func: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
    """Return an operation's result, without data."""
    if name.startswith("_fused_"):  # an optimizer, in place; it has no kernel for shapes
        return None
    if name == "_pin_memory":  # neither has this
        return torch.empty_like(args[0])
    fake: Any = import_module(FAKE)
    try:
        return func(*args, **kwargs)
    except (fake.DataDependentOutputException, fake.DynamicOutputShapeException):
        raise fault("host read", func) from None


def refuse_mix(func: Any, given: Iterable[Tensor]) -> None:
    """Allow a number on the host only where kernels take it as an argument."""
    aten = torch.ops.aten
    takes_numbers = torch.Tag.pointwise in func.tags or func is aten.fill_.Tensor
    takes_numbers &= func is not aten.where.self  # copies them
    hosts = [t for t in given if not is_on_gpu(t) and not (takes_numbers and t.dim() == 0)]
    if hosts:
        raise fault("device mix", f"{func} with {[tuple(t.shape) for t in hosts]} on the host")


def describe(tensor: Tensor) -> str:
    """Return all that a kernel's launch depends on, but the address."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists among them."""
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def is_on_gpu(tensor: Any) -> bool:
    """Return the answer of `is_cuda`, which would be another operation."""
    return getattr(tensor, "fake_device", HOST).type == "cuda"


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_non_blocking(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    by_place = {argument.name: value for argument, value in zip(func._schema.arguments, args)}
    return bool({**by_place, **kwargs}.get("non_blocking"))


def list_launches(name: str, args: Sequence[Any]) -> int:
    """Return the launches of an operation on lists: one for each tensor where kinds differ."""
    lists = [value for value in args if isinstance(value, list | tuple) and tensors_in(value)]
    depth = len(lists) + (not name.endswith("_"))  # the results are another list
    is_one_type = all(len({tensor.dtype for tensor in tensors}) == 1 for tensors in lists)
    is_alike = all(len({(t.shape, t.stride()) for t in row}) == 1 for row in zip(*lists))
    return math.ceil(len(lists[0]) / (TENSORS_AT_ONCE[depth] if is_one_type and is_alike else 1))


def fault(what: str, which: object) -> Fault:
    return Fault(f"{what}: {which} at {place()}")


def frames() -> Iterator[Any]:
    """Yield the frames of the callers, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place() -> str:
    """Return the innermost line of the package that is running."""
    for frame in frames():
        path, _, name = frame.f_code.co_filename.rpartition(f"{ROOT}/")
        if not path and name.startswith("speakerlab/"):
            return f"{name}:{frame.f_lineno}"
    return "a line outside the package"


def is_running(function: Any) -> bool:
    return any(frame.f_code is function.__code__ for frame in frames())
