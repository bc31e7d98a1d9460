"""Optimizers by name. All are fused, so that they skip a bad step without the host's help."""

from collections.abc import Callable, Iterable

import torch
from torch import nn


def sgd(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = True,
    weight_decay: float = 1e-4,
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with (Nesterov) momentum."""
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return torch.optim.SGD(parameters, lr=lr, fused=True, **options)


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.05,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return torch.optim.AdamW(parameters, lr=lr, fused=True, **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": sgd, "adamw": adamw}
