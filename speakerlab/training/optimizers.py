"""Optimizers: functions from parameters to a `torch.optim.Optimizer`.

Their keyword-only arguments are the schema of the configuration; `training.lr` supplies `lr`. To
add one, write a function and add its line at the end of the file; `tests/training/test_update.py`
then tests it. A fused optimizer skips a bad step by itself, so that no step waits for a GPU.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from speakerlab.core.registry import Registry


def sgd(
    parameters: Iterable[nn.Parameter],
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
        for parameter in optimizer.param_groups[0]["params"]:
            zeros = torch.zeros_like(parameter)
            optimizer.state[parameter]["momentum_buffer"] = zeros
    return optimizer


def adamw(
    parameters: Iterable[nn.Parameter],
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
