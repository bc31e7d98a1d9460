"""Low-rank adaptation (LoRA): a linear layer learns the product of two narrow matrices.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, arXiv 2106.09685.
The weight W (O, I) stays as it is; the layer computes x (W + alpha / R * B A)^T, with A (R, I) and
B (O, R). B begins at zero, so an adapted model begins as the original.
Letters: O outputs, I inputs, R rank.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Lora:
    """What is adapted: the linear layers named `targets`, such as "linear_q", in every layer."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "allow_inf_nan": False,
    }


class LoraLinear(nn.Module):
    """A linear layer with an adapter; its tensors are `weight`, `bias`, `lora_A` and `lora_B`."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # Saved as `weight`, but not set as an attribute: that is the property below.
        weight_OI = nn.Parameter(linear.weight, requires_grad=False)
        self._parameters["weight"] = weight_OI
        self.bias = linear.bias
        self.scale = lora.alpha / lora.rank

        # As torch.nn.Linear begins.
        a_RI = torch.empty(lora.rank, linear.in_features)
        nn.init.kaiming_uniform_(a_RI, a=math.sqrt(5))
        b_OR = torch.zeros(linear.out_features, lora.rank)
        self.lora_A = nn.Parameter(a_RI)
        self.lora_B = nn.Parameter(b_OR)

    @property
    def weight(self) -> Tensor:
        """Return the adapted weight.

        For modules that compute with the weight of a layer instead of calling it, such as WavLM's
        attention: an adapter that only changed `forward` would be ignored there.
        """
        return self.original_weight + self.scale * (self.lora_B @ self.lora_A)

    @property
    def original_weight(self) -> Tensor:
        """Return the weight without the adapter, which the state dict has as `weight`."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, without computing the adapted weight."""
        original = F.linear(x, self.original_weight, self.bias)
        # Scaled where it is narrow.
        narrow = self.scale * F.linear(x, self.lora_A)
        return original + F.linear(narrow, self.lora_B)

    def merged(self) -> nn.Linear:
        """Return a plain layer with the adapted weight."""
        linear = nn.Linear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            device="meta",
        )
        linear.weight = nn.Parameter(self.weight.detach().clone())
        linear.bias = self.bias
        return linear


def add_lora(module: nn.Module, lora: Lora) -> None:
    """Adapt the targets in a module in place, and freeze everything else of it.

    Raises ValueError for a target that is no linear layer of the module.
    """
    if lora.rank < 1:
        raise ValueError(f"frontend.lora.rank: {lora.rank} is below 1; raise it")
    module.requires_grad_(False)
    linears: dict[str, nn.Linear] = {}
    for name, layer in module.named_modules():
        # Not `isinstance`: a subclass may compute something else.
        if type(layer) is nn.Linear:
            linears[name] = layer

    last_names = sorted({name.rpartition(".")[2] for name in linears})
    for target in lora.targets:
        if target not in last_names:
            raise ValueError(
                f"frontend.lora.targets: the model has no linear layer {target}; use"
                f" some of {', '.join(last_names)}"
            )
    for name, linear in linears.items():
        if name.rpartition(".")[2] in lora.targets:
            _replace_layer(module, name, LoraLinear(linear, lora))


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that a module would have without adapters, computing the same."""
    state = dict(module.state_dict())
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLinear):
            state[f"{name}.weight"] = layer.weight.detach()
            del state[f"{name}.lora_A"]
            del state[f"{name}.lora_B"]
    return state


def merge_lora(module: nn.Module) -> None:
    """Replace every adapted layer in a module by a plain one that computes the same."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoraLinear):
            _replace_layer(module, name, layer.merged())


def _replace_layer(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Put another layer in the place of the one with this name in a module."""
    parent_name, _, last_name = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    setattr(parent, last_name, layer)
