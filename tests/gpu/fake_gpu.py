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
  that blocks.

An operation that is not a view counts as one launch. So counts are exact in comparisons, but a
lower bound of kernels: some operations, as the backward pass of a convolution, launch several.
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
# Names that torch does not promise: the module and the name in it.
PRIVATE = (
    (FAKE, "FakeTensor"),
    (FAKE, "FakeTensorMode"),
    (FAKE, "DataDependentOutputException"),
    (FAKE, "DynamicOutputShapeException"),
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
    x = torch.ones(1, requires_grad=True)
    node = x.exp().grad_fn
    for name in OF_A_NODE:
        if not hasattr(node, name):
            return f"torch {torch.__version__} has no grad_fn.{name}"
    fake: Any = import_module(FAKE)
    try:
        with fake.FakeTensorMode():
            torch.empty(2, device=GPU)[:1]
    except RuntimeError as error:
        # Older versions ask the driver.
        first_line, _, _ = str(error).partition("\n")
        return f"torch {torch.__version__}: {first_line}"
    return None


@contextmanager
def fake_gpu() -> Iterator[Kernels]:
    """Let code use GPU; functions of `torch.cuda` do nothing, or refuse to wait."""
    fake: Any = import_module(FAKE)
    kernels = Kernels()
    hooks = Hooks()

    def enter(region: Any) -> Any:
        # torch's optimizers have regions, too; they count as the one around them.
        is_of_step = region.name.startswith("step")
        innermost = kernels.regions[-1]
        kernels.regions.append(region.name if is_of_step else innermost)
        return region

    def leave(*_: Any) -> None:
        kernels.regions.pop()

    def register_hook(tensor: Tensor, hook: Any) -> None:
        hooks.register(tensor, hook)

    def backward(tensor: Tensor) -> None:
        hooks.backward(tensor)

    amp_common = import_module("torch.cuda.amp.common")
    foreach_utils = import_module("torch.utils._foreach_utils")
    replaced: list[tuple[Any, str, Any]] = []
    for name, value in stand_ins(kernels).items():
        replaced.append((torch.cuda, name, value))
    replaced += [
        (amp_common, "amp_definitely_not_available", lambda: False),
        (foreach_utils, "_foreach_supported_types", [Tensor, fake.FakeTensor]),
        (Tensor, "record_stream", lambda *_: None),
        (Tensor, "register_hook", register_hook),
        (Tensor, "backward", backward),
        (torch.autograd, "grad", hooks.grad),
        (
            torch.autograd.function.FunctionCtx,
            "set_materialize_grads",
            set_materialize_grads,
        ),
        (torch._C, "_current_graph_task_id", lambda: hooks.num_passes),
        (record_function, "__enter__", enter),
        (record_function, "__exit__", leave),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            replacement = mock.patch.object(owner, name, value)
            stack.enter_context(replacement)
        stack.enter_context(fake.FakeTensorMode())
        stack.enter_context(kernels)
        yield kernels


class Event:
    """Moment in what is queued; the host may only wait for one of an earlier step."""

    def __init__(self, kernels: Kernels, *_: Any, **__: Any) -> None:
        self.kernels = kernels
        self.tick = 0

    def record(self, *_: Any) -> None:
        self.tick = next(self.kernels.clock)

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        if self.tick > self.kernels.step_began:
            raise fault("host read", "the host waits for an event of this step")
        known_until = self.kernels.known_until
        self.kernels.known_until = max(known_until, self.tick)

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    """Stream that waits for another one at once."""

    def __init__(self, kernels: Kernels, *_: Any, **__: Any) -> None:
        self.kernels = kernels

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        if event is None:
            event = Event(self.kernels)
        event.record()
        return event

    def synchronize(self) -> None:
        raise fault("host read", "the host waits for all that is queued")


def stand_ins(kernels: Kernels) -> dict[str, Any]:
    """Return what replaces names of `torch.cuda`."""
    main = Stream(kernels)

    def memory(*_: Any) -> None:
        raise fault("host read", "of the memory in use, which may differ in each run,")

    return {
        "mem_get_info": memory,
        "memory_allocated": memory,
        "memory_reserved": memory,
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
        return torch.empty_strided(
            tuple(tensor.shape),
            tensor.stride(),
            dtype=tensor.dtype,
            device=GPU,
        )

    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                layer._parameters[name] = nn.Parameter(
                    moved(parameter),
                    requires_grad=parameter.requires_grad,
                )
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                layer._buffers[name] = moved(buffer)
    return module
