"""A GPU without one: tensors on `cuda` have a shape and no data, and every operation is checked.

    with fake_gpu() as gpu:
        to_gpu(module)
        ...                     # the package's own code: forward, backward, optimizer
        print(gpu.launches)     # by the innermost region of the step (`record_function`)

Raises `Fault`, with the line of the package, for what a GPU would reject or wait for:

- device mix: an operation has inputs on the GPU and on the host;
- host read: the host reads a value, needs a shape that depends on values, or waits for an event of
  this step (`gpu.begin_step` begins one) or for all that is queued;
- upload: a copy from the host to the GPU outside UPLOADS (fake_kernels.py), or one
  that blocks;
- capture: a tensor on the host among those of a CUDA graph.

An operation that is not a view counts as one launch, and so does the replay of a CUDA graph. So
counts are exact in comparisons, but a lower bound of kernels: some operations, as the backward pass
of a convolution, launch several.
Not covered: order between streams, NCCL, numerics, memory.

Not all names of torch that are used here are public; `why_not` reports a version without them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from fake_backward import OF_A_NODE, Hooks, set_materialize_grads
from fake_kernels import FAKE, Kernels, fault
from torch import Tensor, nn
from torch.profiler import record_function

GPU = torch.device("cuda", 0)
PRIVATE = (  # module, name in it
    *((FAKE, "FakeTensor"), (FAKE, "FakeTensorMode")),
    *((FAKE, "DataDependentOutputException"), (FAKE, "DynamicOutputShapeException")),
    ("torch.utils._foreach_utils", "_foreach_supported_types"),
    ("torch.cuda.amp.common", "amp_definitely_not_available"),
)


def why_not() -> str | None:
    """Return why this version of torch cannot be used so; None if it can."""
    for module, name in PRIVATE:
        try:
            getattr(import_module(module), name)
        except (ImportError, AttributeError):
            return f"torch {torch.__version__} has no {module}.{name}"
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    for name in OF_A_NODE:
        if not hasattr(node, name):
            return f"torch {torch.__version__} has no grad_fn.{name}"
    fake: Any = import_module(FAKE)
    try:
        with fake.FakeTensorMode():
            torch.empty(2, device=GPU)[:1]
    except RuntimeError as error:  # older versions ask the driver
        return f"torch {torch.__version__}: {str(error).partition(chr(10))[0]}"
    return None


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
        (torch.autograd.function.FunctionCtx, "set_materialize_grads", set_materialize_grads),
        (torch._C, "_current_graph_task_id", lambda: hooks.num_passes),
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
        if self.at > self.kernels.step_began or self.kernels.is_capturing:
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


class Graph:
    """A CUDA graph that counts replays only; `capture` replaces `torch.cuda.graph`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def replay(self) -> None:
        self.kernels.launches[self.kernels.regions[-1]] += 1

    @contextmanager
    def capture(self, **_: Any) -> Iterator[None]:
        self.kernels.is_capturing = True
        try:
            yield
        finally:
            self.kernels.is_capturing = False


def stand_ins(kernels: Kernels) -> dict[str, Any]:
    """Return what replaces names of `torch.cuda`."""
    main = Stream(kernels)

    def memory(*_: Any) -> None:
        raise fault("host read", "of the memory in use, which may differ in each run,")

    return {
        **dict.fromkeys(("mem_get_info", "memory_allocated", "memory_reserved"), memory),
        "CUDAGraph": partial(Graph, kernels),
        "graph": Graph.capture,
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
