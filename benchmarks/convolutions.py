"""A model's convolutions and linear layers alone: a limit of any way to compute the same model.

A pass of the backbone without data finds the layers. Layers of one shape are timed once and counted
as often as they occur, each in its faster memory layout. Letters: B batch, T frames, F mel bins.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from speakerlab.bench.stopwatch import block_seconds
from speakerlab.training.precision import DTYPES

LAYERS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.linear)
NORMS = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
ROUNDS = 2  # over all layers, so that a slow spell of the machine meets a layer once
Shape = tuple[int, ...]


class Layer(NamedTuple):
    """What layers that compute the same on inputs of one shape have in common."""

    function: Callable[..., Tensor]  # of LAYERS
    input_shape: Shape
    weight_shape: Shape
    has_bias: bool
    options: tuple[Any, ...]  # of a convolution: stride, padding, dilation, groups, or none
    learns_below: bool  # its input needs a gradient, too
    macs: int  # multiplications of a forward pass
    layout: torch.memory_format = torch.contiguous_format

    def flop(self, *, train: bool) -> int:
        """Count operations, without biases; gradients of weight and input take as many each."""
        return 2 * self.macs * (2 + self.learns_below if train else 1)

    def layouts(self) -> "list[Layer]":
        """Return its memory layouts; a 1-D convolution is also a 2-D one of one row."""
        if self.function is F.linear:
            return [self]
        last = self._replace(function=F.conv2d, layout=torch.channels_last)
        if self.function is F.conv1d:
            shapes = (self.input_shape, self.weight_shape)
            x, weight = ((*shape[:2], 1, *shape[2:]) for shape in shapes)
            pairs = ((first, *last) for first, last in zip((1, 0, 1), self.options))
            options = (*pairs, *self.options[3:])
            last = last._replace(input_shape=x, weight_shape=weight, options=options)
        return [self, last]

    def prepare(
        self, device: torch.device, dtype: torch.dtype, *, train: bool
    ) -> Callable[[], object]:
        """Return a computation of the layer on random numbers."""
        shapes = [self.input_shape, self.weight_shape, *[self.weight_shape[:1]] * self.has_bias]
        tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        tensors = [t.to(memory_format=self.layout) if t.dim() == 4 else t for t in tensors]

        def forward() -> Tensor:
            bias = tensors[2] if self.has_bias else None
            return self.function(*tensors[:2], bias, *self.options)

        if not train:
            return torch.inference_mode()(forward)
        wanted = [t.requires_grad_() for t in tensors[0 if self.learns_below else 1 :]]
        grad = torch.randn_like(forward())
        return lambda: torch.autograd.grad(forward(), wanted, grad)


def measure_convolutions(
    backbone: nn.Module, feats_BTF: Tensor, *, precision: str, seconds: float
) -> float:
    """Return the seconds of the layers in a pass, measured for about so many seconds in all.

    In training mode it includes the gradients of weights and inputs. precision: fp32, bf16 or fp16,
    of all layers, also of those that the model keeps in fp32.
    """
    layers = find_layers(backbone, tuple(feats_BTF.shape))
    device, dtype = feats_BTF.device, DTYPES[precision]
    share = seconds / ROUNDS / sum(len(layer.layouts()) for layer in layers)
    best = dict.fromkeys(layers, math.inf)
    for layer in [*layers] * ROUNDS:
        for one in layer.layouts():
            work = one.prepare(device, dtype, train=backbone.training)
            took = block_seconds(work, device=device, seconds=share, least=1)
            best[layer] = min(best[layer], *took)
    return sum(count * best[layer] for layer, count in layers.items())


def find_layers(backbone: nn.Module, shape_BTF: Shape) -> Counter[Layer]:
    """Return how often a pass over features of this shape computes each layer.

    BatchNorms without momentum keep the CPU kernels of `models/cpu` from replacing whole blocks.
    """
    model = copy.deepcopy(backbone).eval()
    for module in model.modules():
        if isinstance(module, NORMS):
            module.momentum = None
    device = next(model.parameters()).device
    with FakeTensorMode(allow_non_fake_inputs=True), LayerCounter() as counter:
        model(torch.empty(shape_BTF, device=device))
    return counter.layers


class LayerCounter(TorchFunctionMode):
    """Counts the convolutions and linear layers that are computed inside a `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Counter[Layer]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LAYERS:
            x, weight, *rest = args  # torch's modules give everything by position
            bias, *options = rest or [None]
            layer = Layer(
                function=func,
                input_shape=tuple(x.shape),
                weight_shape=tuple(weight.shape),
                has_bias=bias is not None,
                options=tuple(options),
                learns_below=x.requires_grad,
                macs=result.numel() * weight[0].numel(),
            )
            self.layers[layer] += 1
        return result
