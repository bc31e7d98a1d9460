"""A GPU without one: tensors on `cuda` have a shape and no data, and every operation is checked.

    with fake_gpu() as gpu:
        to_gpu(module)
        ...                     # the package's own code: forward, backward, optimizer
        print(gpu.launches)     # by the innermost region of the step (`record_function`)

Raises `Fault`, with the line of the package, for what a GPU would reject or wait for:

- device mix: an operation has inputs on the GPU and on the host;
- host read: the host reads a value, needs a shape that depends on values, or waits for an event of
  this step (`gpu.begin_step` begins one) or for all that is queued;
- upload: a copy from the host to the GPU outside `Batch.to`, or one that blocks.

An operation that is not a view counts as one launch. So counts are exact in comparisons, but a
lower bound of kernels: some operations, as the backward pass of a convolution, launch several.
Not covered: order between streams, NCCL, numerics, memory.

The names of torch in PRIVATE are not public; without one of them, `missing` names it.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from fake_backward import OF_A_NODE, Hooks
from sides import ROOT
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(ROOT))
from speakerlab.core.batch import Batch

GPU = torch.device("cuda", 0)
FAKE = "torch._subclasses.fake_tensor"
PRIVATE = (  # module, name in it
    *((FAKE, "FakeTensor"), (FAKE, "FakeTensorMode")),
    *((FAKE, "DataDependentOutputException"), (FAKE, "DynamicOutputShapeException")),
    ("torch.utils._foreach_utils", "_foreach_supported_types"),
    ("torch.cuda.amp.common", "amp_definitely_not_available"),
)
COPIES = ("_to_copy", "copy_")
FREE = (  # operations that launch nothing, besides views
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"),
    *("detach", "alias", "lift_fresh", "_unsafe_view", "is_pinned", "_pin_memory"),
)
# Tensors of each list that a launch takes, by the number of lists (ATen's MultiTensorApply.cuh).
TENSORS_AT_ONCE = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


class Fault(RuntimeError):
    """What a GPU would reject or wait for."""


def missing() -> list[str]:
    """Return the private names that this version of torch lacks."""
    names = [f"{at}.{name}" for at, name in PRIVATE if not hasattr(import_module(at), name)]
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    return names + [f"grad_fn.{name}" for name in OF_A_NODE if not hasattr(node, name)]


class Kernels(TorchDispatchMode):
    """Checks and counts every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.uploads = Counter[str](), Counter[str]()  # by region, by line
        self.regions = ["outside"]  # those that are open
        self.clock = itertools.count(1)  # of events and copies to the host
        self.step_began = self.known = 0  # the host knows what happened until `known`
        self.pinned, self.arrives = set[int](), dict[int, int]()  # storages on the host

    def begin_step(self) -> None:
        """From here on, an event is one of this step."""
        self.step_began = next(self.clock)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func._schema.name.partition("::")[2], kwargs or {}
        given = tensors_in((*args, *kwargs.values()))
        if name == "_local_scalar_dense":
            return self.read(args[0])
        if name == "is_pinned":
            return storage_of(args[0]) in self.pinned
        if name not in (*COPIES, *FREE) and any(tensor.is_cuda for tensor in given):
            refuse_mix(func, given)
        result = run(func, name, args, kwargs)
        made = tensors_in((result,))
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            self.pinned.update(map(storage_of, made))
        if name in COPIES:
            pair = (args[0], made[0]) if name == "_to_copy" else (args[1], args[0])
            self.copy(func, *pair, non_blocking=is_non_blocking(func, args, kwargs))
        if any(tensor.is_cuda for tensor in (*given, *made)):
            self.count(func, name, args)
        return result

    def read(self, value: Tensor) -> float:
        """Return 1 for a value on the host, which is not known there either."""
        if value.is_cuda:
            raise fault("host read", "of a value on the GPU")
        if self.arrives.get(storage_of(value), 0) > self.known:
            raise fault("host read", "of a copy that may not have arrived")
        return 1.0 if value.is_floating_point() else 1

    def copy(self, func: Any, source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
        """Refuse copies that block, and uploads from more than one place."""
        if source.is_cuda and not target.is_cuda:
            # torch makes the result of `to("cpu", non_blocking=True)` page-locked.
            is_pinned = "_to_copy" in func.name() or storage_of(target) in self.pinned
            if not (non_blocking and is_pinned):
                raise fault("host read", f"{func}, for which the host waits,")
            self.arrives[storage_of(target)] = next(self.clock)
        elif target.is_cuda and not source.is_cuda:
            if not (non_blocking and is_running(Batch.to)):
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
    hosts = [t for t in given if not t.is_cuda and not (takes_numbers and t.dim() == 0)]
    if hosts:
        raise fault("device mix", f"{func} with {[tuple(t.shape) for t in hosts]} on the host")


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists among them."""
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


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


@contextmanager
def fake_gpu() -> Iterator[Kernels]:
    """Let code use GPU; functions of `torch.cuda` do nothing, or refuse to wait."""
    fake: Any = import_module(FAKE)
    kernels, hooks = Kernels(), Hooks()

    def enter(region: Any) -> Any:
        is_own = region.name.startswith("step")  # torch's optimizers have regions, too
        kernels.regions.append(region.name if is_own else kernels.regions[-1])
        return region

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in stand_ins(kernels).items()),
        (import_module("torch.cuda.amp.common"), "amp_definitely_not_available", lambda: False),
        (
            import_module("torch.utils._foreach_utils"),
            *("_foreach_supported_types", [Tensor, fake.FakeTensor]),
        ),
        (Tensor, "record_stream", lambda *_: None),
        (Tensor, "register_hook", lambda tensor, hook: hooks.register(tensor, hook)),
        (Tensor, "backward", lambda tensor: hooks.backward(tensor)),
        (torch.autograd, "grad", hooks.grad),
        (record_function, "__enter__", enter),
        (record_function, "__exit__", lambda *_: kernels.regions.pop() and None),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(fake.FakeTensorMode())
        stack.enter_context(kernels)
        yield kernels


class Event:
    """Moment in what is queued; the host may only wait for one of an earlier step."""

    def __init__(self, kernels: Kernels, *_: Any, **__: Any) -> None:
        self.kernels, self.at = kernels, 0

    def record(self, *_: Any) -> None:
        self.at = next(self.kernels.clock)

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        if self.at > self.kernels.step_began:
            raise fault("host read", "the host waits for an event of this step")
        self.kernels.known = max(self.kernels.known, self.at)

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    """Stream that waits for another one at once."""

    def __init__(self, kernels: Kernels, *_: Any, **__: Any) -> None:
        self.kernels = kernels

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.kernels) if event is None else event
        event.record()
        return event

    def synchronize(self) -> None:
        raise fault("host read", "the host waits for all that is queued")


def stand_ins(kernels: Kernels) -> dict[str, Any]:
    """Return what replaces names of `torch.cuda`."""
    main = Stream(kernels)
    return {
        "Event": partial(Event, kernels),
        "Stream": partial(Stream, kernels),
        "current_stream": lambda *_: main,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: main.synchronize(),
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }


def to_gpu(module: nn.Module) -> nn.Module:
    """Move parameters and buffers in place, as `module.to(GPU)` would; layouts stay."""

    def moved(tensor: Tensor) -> Tensor:
        shape, stride = tuple(tensor.shape), tensor.stride()
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=GPU)

    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = nn.Parameter(moved(p), requires_grad=p.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved(buffer)
    return module
