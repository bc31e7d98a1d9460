"""Optimizers: functions from parameters, or groups of them, to a `torch.optim.Optimizer`.

Their keyword-only arguments are the schema of the configuration; `training.lr` supplies `lr`. To
add one, write a function and add its line at the end of the file; `tests/training/test_update.py`
then tests it. A fused optimizer skips a bad step by itself, so that no step waits for a GPU.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from speakerlab.core.registry import Registry

# A group is a dict with "params"; its "lr_scale" is a factor on the learning rate of each step.
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def sgd(
    parameters: Parameters,
    *,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = True,
    weight_decay: float = 1e-4,
) -> torch.optim.Optimizer:
    """Build stochastic gradient descent with (Nesterov) momentum."""
    optimizer = torch.optim.SGD(
        parameters,
        lr=lr,
        fused=True,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
    )
    # torch would fill the momentum at the first step, even if that step is bad.
    if momentum:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                zeros = torch.zeros_like(parameter)
                optimizer.state[parameter]["momentum_buffer"] = zeros
    return optimizer


def adamw(
    parameters: Parameters,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.05,
) -> torch.optim.Optimizer:
    """Build Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""
    return torch.optim.AdamW(
        parameters,
        lr=lr,
        fused=True,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
    )


# Name in the configuration -> file and function in this package.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = Registry(
    __name__.rpartition(".")[0],
    {
        "sgd": "optimizers:sgd",
        "adamw": "optimizers:adamw",
    },
)
