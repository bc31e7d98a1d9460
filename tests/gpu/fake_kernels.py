"""What is checked and counted at every operation on tensors without data; see fake_gpu.py."""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speakerlab.core.batch import Batch
from speakerlab.inference.batches import embed_batches

ROOT = Path(__file__).resolve().parents[2]
HOST = torch.device("cpu")
FAKE = "torch._subclasses.fake_tensor"
COPIES = ("_to_copy", "copy_")
UPLOADS = Batch.to, embed_batches  # the functions that may copy to the GPU
# Operations that launch nothing, besides views.
FREE = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "detach",
    "alias",
    "lift_fresh",
    "_unsafe_view",
    "is_pinned",
    "_pin_memory",
)
# Tensors of each list that a launch takes, by the number of lists (ATen's MultiTensorApply.cuh).
TENSORS_AT_ONCE = {
    1: 110,
    2: 64,
    3: 48,
    4: 36,
    5: 30,
}


class Fault(RuntimeError):
    """What a GPU would reject or wait for."""


class Kernels(TorchDispatchMode):
    """Checks and counts every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = Counter[str]()  # by region of the step
        self.uploads = Counter[str]()  # by line of the package
        self.regions = ["outside"]  # open regions, the innermost last
        # Events and copies to the host happen at ticks of this clock. Everything up to
        # `known_until` has happened for sure, because the host waited for it.
        self.clock = itertools.count(1)
        self.step_began = 0
        self.known_until = 0
        # Storages on the host: page-locked ones, and the tick at which a copy arrives.
        self.pinned = set[int]()
        self.arrives = dict[int, int]()

    def begin_step(self) -> None:
        """Count the events from here on as those of this step."""
        self.step_began = next(self.clock)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        # First, because this operation is called far more often than any other.
        if func is torch.ops.prim.device.default:
            return args[0].fake_device

        _, _, name = func._schema.name.partition("::")
        kwargs = kwargs or {}
        inputs = tensors_in((*args, *kwargs.values()))
        if name == "_local_scalar_dense":
            return self.read(func, args[0])
        if name == "is_pinned":
            return storage_of(args[0]) in self.pinned
        computes = name not in COPIES and name not in FREE
        if computes and any(map(is_on_gpu, inputs)):
            refuse_mix(func, inputs)

        result = run(func, name, args, kwargs)
        outputs = tensors_in((result,))
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            self.pinned.update(map(storage_of, outputs))
        if name in COPIES:
            source, target = args[0], outputs[0]
            if name == "copy_":
                source, target = args[1], args[0]
            non_blocking = is_non_blocking(func, args, kwargs)
            self.copy(func, source, target, non_blocking=non_blocking)
        if any(map(is_on_gpu, (*inputs, *outputs))):
            self.count(func, name, args)
        return result

    def read(self, func: Any, value: Tensor) -> float:
        """Return a number that is on the host; 1 for one that came from the GPU."""
        if is_on_gpu(value):
            raise fault("host read", "of a value on the GPU")
        if storage_of(value) not in self.arrives:
            return func(value)
        arrives = self.arrives[storage_of(value)]
        if arrives > self.known_until:
            raise fault("host read", "of a copy that may not have arrived")
        return 1.0 if value.is_floating_point() else 1

    def copy(
        self, func: Any, source: Tensor, target: Tensor, *, non_blocking: bool
    ) -> None:
        """Refuse copies that block, and uploads from more than one place."""
        if is_on_gpu(source) and not is_on_gpu(target):
            # torch makes the result of `to("cpu", non_blocking=True)` page-locked.
            is_made_pinned = "_to_copy" in func.name()
            is_pinned = is_made_pinned or storage_of(target) in self.pinned
            if not (non_blocking and is_pinned):
                raise fault("host read", f"{func}, for which the host waits,")
            self.arrives[storage_of(target)] = next(self.clock)
        elif is_on_gpu(target) and not is_on_gpu(source):
            is_allowed_here = any(map(is_running, UPLOADS))
            if not (non_blocking and is_allowed_here):
                raise fault("upload", func)
            self.uploads[place()] += 1

    def count(self, func: Any, name: str, args: Sequence[Any]) -> None:
        """Count the launches of an operation in the innermost region."""
        if func.is_view or name in FREE or func.namespace != "aten":
            return
        launches = 1
        if name.startswith(("_foreach_", "_fused_")):
            launches = list_launches(name, args)
        innermost = self.regions[-1]
        self.launches[innermost] += launches


def run(func: Any, name: str, args: Sequence[Any], kwargs: Any) -> Any:
    """Return an operation's result, without data."""
    # Neither fused optimizers, which work in place, nor pinning has a kernel for shapes.
    if name.startswith("_fused_"):
        return None
    if name == "_pin_memory":
        return torch.empty_like(args[0])
    fake: Any = import_module(FAKE)
    try:
        return func(*args, **kwargs)
    except (fake.DataDependentOutputException, fake.DynamicOutputShapeException):
        raise fault("host read", func) from None


def refuse_mix(func: Any, inputs: Iterable[Tensor]) -> None:
    """Allow a number on the host only where kernels take it as an argument."""
    aten = torch.ops.aten
    is_pointwise = torch.Tag.pointwise in func.tags
    takes_numbers = is_pointwise or func is aten.fill_.Tensor
    takes_numbers &= func is not aten.where.self  # copies them
    host_shapes = []
    for tensor in inputs:
        is_argument = takes_numbers and tensor.dim() == 0
        if not is_on_gpu(tensor) and not is_argument:
            host_shapes.append(tuple(tensor.shape))
    if host_shapes:
        raise fault("device mix", f"{func} with {host_shapes} on the host")


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists among them."""
    tensors = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


def is_on_gpu(tensor: Any) -> bool:
    """Return the answer of `is_cuda`, which would be another operation."""
    return getattr(tensor, "fake_device", HOST).type == "cuda"


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_non_blocking(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    by_name = {}
    for argument, value in zip(func._schema.arguments, args):
        by_name[argument.name] = value
    by_name.update(kwargs)
    return bool(by_name.get("non_blocking"))


def list_launches(name: str, args: Sequence[Any]) -> int:
    """Return the launches of an operation on lists: one for each tensor where kinds differ."""
    lists = []
    for value in args:
        is_list = isinstance(value, list | tuple)
        if is_list and tensors_in(value):
            lists.append(value)
    one_type = all(have_one_type(tensors) for tensors in lists)
    one_shape = all(have_one_shape(tensors) for tensors in zip(*lists))
    num_tensors = len(lists[0])
    if not (one_type and one_shape):
        return num_tensors
    # Unless it works in place, the results are another list.
    depth = len(lists)
    if not name.endswith("_"):
        depth += 1
    return math.ceil(num_tensors / TENSORS_AT_ONCE[depth])


def have_one_type(tensors: Iterable[Tensor]) -> bool:
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) == 1


def have_one_shape(tensors: Iterable[Tensor]) -> bool:
    layouts = {(tensor.shape, tensor.stride()) for tensor in tensors}
    return len(layouts) == 1


def fault(kind: str, operation: object) -> Fault:
    return Fault(f"{kind}: {operation} at {place()}")


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
