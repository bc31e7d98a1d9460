"""A model's own convolutions and linear layers, alone: what the model would take without the rest.

In: a backbone and features. Out: `Convolutions`, their operations and the seconds that they take at
the shapes they have in the model. It is the limit of any way to compute the same layers here.

A pass of the backbone without data tells the shapes. Layers of one shape are timed once and counted
as often as they are there, each in the fastest of its layouts in memory.

Letters: B batch, T frames, F mel bins.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from speakerlab.bench.timing import block_seconds
from speakerlab.training.precision import DTYPES

LAYERS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.linear)
NORMS = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
ROUNDS = 2  # over all layers, so that a slow spell of the machine meets a layer once
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Convolutions:
    """Of one forward pass of the batch, or of a forward and a backward pass."""

    gflop: float  # a multiplication and an addition are two; biases are not counted
    seconds: float

    @property
    def gflops(self) -> float:
        """10^9 operations a second."""
        return self.gflop / self.seconds


@dataclass(frozen=True)
class Layer:
    """What layers that compute the same, on inputs of one shape, have in common."""

    function: Callable[..., Tensor]  # of LAYERS
    input_shape: Shape
    weight_shape: Shape
    has_bias: bool
    options: tuple[Any, ...]  # of the function, after input, weight and bias
    learns_below: bool  # its input needs a gradient, too
    macs: int  # multiplications of a forward pass
    memory_format: torch.memory_format = torch.contiguous_format

    def flop(self, *, train: bool) -> int:
        """The gradients of the weight and of the input each take as much as the forward pass."""
        return 2 * self.macs * (2 + self.learns_below if train else 1)

    def layouts(self) -> "list[Layer]":
        """The ways to lay out its tensors in memory; a 1-D convolution is a 2-D one of one row."""
        if self.function is F.linear:
            return [self]
        if self.function is F.conv2d:
            return [self, replace(self, memory_format=torch.channels_last)]
        stride, padding, dilation, groups = self.options
        row = replace(
            self,
            function=F.conv2d,
            input_shape=(*self.input_shape[:2], 1, *self.input_shape[2:]),
            weight_shape=(*self.weight_shape[:2], 1, *self.weight_shape[2:]),
            options=((1, *stride), (0, *padding), (1, *dilation), groups),
            memory_format=torch.channels_last,
        )
        return [self, row]

    def prepare(
        self, device: torch.device, dtype: torch.dtype, *, train: bool
    ) -> Callable[[], object]:
        """What is to be timed, on random numbers."""

        def made(*shape: int) -> Tensor:
            values = torch.randn(shape, device=device, dtype=dtype)
            is_map = len(shape) == 4  # only these have another layout
            return values.contiguous(memory_format=self.memory_format) if is_map else values

        x, weight = made(*self.input_shape), made(*self.weight_shape)
        bias = made(self.weight_shape[0]) if self.has_bias else None

        def forward() -> Tensor:
            return self.function(x, weight, bias, *self.options)

        if not train:
            return torch.inference_mode()(forward)
        wanted = [*[x] * self.learns_below, weight, *([] if bias is None else [bias])]
        for tensor in wanted:
            tensor.requires_grad_()
        grad = torch.randn_like(forward())
        return lambda: torch.autograd.grad(forward(), wanted, grad)


def measure_convolutions(
    backbone: nn.Module, feats_BTF: Tensor, *, precision: str, train: bool, seconds: float
) -> Convolutions:
    """Time the layers on the features' device, for about so many seconds in all.

    precision: fp32, bf16 or fp16, taken for all layers, also for those that the model keeps in
    fp32. train: with the gradients of weights and inputs.
    """
    layers = find_layers(backbone, tuple(feats_BTF.shape))
    device, dtype = feats_BTF.device, DTYPES[precision]
    share = seconds / ROUNDS / sum(len(layer.layouts()) for layer in layers)
    best = dict.fromkeys(layers, math.inf)
    for _ in range(ROUNDS):
        for layer in layers:
            for one in layer.layouts():
                work = one.prepare(device, dtype, train=train)
                took = block_seconds(work, device=device, seconds=share, least=1)
                best[layer] = min(best[layer], *took)
    return Convolutions(
        gflop=1e-9 * sum(count * layer.flop(train=train) for layer, count in layers.items()),
        seconds=sum(count * best[layer] for layer, count in layers.items()),
    )


def find_layers(backbone: nn.Module, shape_BTF: Shape) -> Counter[Layer]:
    """How often a pass over features of this shape computes each layer.

    Without a momentum, BatchNorms are none that a quicker formulation of a block could take over
    (dense.py): then every layer is computed as what it is.
    """
    model = copy.deepcopy(backbone).eval()
    for module in model.modules():
        if isinstance(module, NORMS):
            module.momentum = None
    device = next(model.parameters()).device
    with FakeTensorMode(allow_non_fake_inputs=True), Notes() as notes:
        model(torch.empty(shape_BTF, device=device))
    return notes.layers


class Notes(TorchFunctionMode):
    """Counts the convolutions and linear layers that are computed while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Counter[Layer]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LAYERS:
            self.layers[_layer(func, result, *args, **(kwargs or {}))] += 1
        return result


def _layer(
    function: Callable[..., Tensor],
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Layer:
    """What was computed; the names are those of torch's arguments."""
    num_axes = input.dim() - 2
    options = tuple(
        value if isinstance(value, tuple) else (value,) * num_axes
        for value in (stride, padding, dilation)
    )
    return Layer(
        function=function,
        input_shape=tuple(input.shape),
        weight_shape=tuple(weight.shape),
        has_bias=bias is not None,
        options=() if function is F.linear else (*options, groups),
        learns_below=input.requires_grad,
        macs=result.numel() * weight[0].numel(),
    )
