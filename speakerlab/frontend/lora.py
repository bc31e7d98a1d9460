"""Low-rank adaptation (LoRA): a linear layer learns the product of two narrow matrices.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, arXiv 2106.09685.
The weight W (O, I) stays as it is; the layer computes x (W + alpha / rank * B A)^T, with
A (rank, I) and B (O, rank). B begins at zero, so an adapted model begins as the original.
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
        # Not as an attribute: that name is the property below.
        self._parameters["weight"] = nn.Parameter(linear.weight, requires_grad=False)
        self.bias = linear.bias
        self.scale = lora.alpha / lora.rank
        a_RI = torch.empty(lora.rank, linear.in_features)
        nn.init.kaiming_uniform_(a_RI, a=math.sqrt(5))
        self.lora_A = nn.Parameter(a_RI)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, lora.rank))

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
    linears = {
        name: part for name, part in module.named_modules() if type(part) is nn.Linear
    }
    last_names = sorted({name.rpartition(".")[2] for name in linears})
    for target in lora.targets:
        if target not in last_names:
            raise ValueError(
                f"frontend.lora.targets: the model has no linear layer {target}; use"
                f" some of {', '.join(last_names)}"
            )
    for name, linear in linears.items():
        parent, _, last_name = name.rpartition(".")
        if last_name in lora.targets:
            adapted = LoraLinear(linear, lora)
            setattr(module.get_submodule(parent), last_name, adapted)


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that a module would have without adapters, computing the same."""
    state = dict(module.state_dict())
    for name, part in module.named_modules():
        if isinstance(part, LoraLinear):
            state[f"{name}.weight"] = part.weight.detach()
            del state[f"{name}.lora_A"], state[f"{name}.lora_B"]
    return state


def merge_lora(module: nn.Module) -> None:
    """Replace every adapted layer in a module by a plain one that computes the same."""
    for name, part in list(module.named_modules()):
        if isinstance(part, LoraLinear):
            parent, _, last_name = name.rpartition(".")
            setattr(module.get_submodule(parent), last_name, part.merged())
