"""Keeps one bad batch from ending a run. In: the gradient norm of a step. Out: step or skip.

The norm is taken after the gradients are averaged over ranks, so every rank decides alike.
A skipped step leaves parameters, momentum and BatchNorm statistics as they were.
"""

import math

import torch
from torch import Tensor, nn

MAX_BAD_STEPS = 20  # in a row


copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class NumericError(RuntimeError):
    """Too many steps in a row without a finite gradient."""


class Guard:
    """Remembers BatchNorm's statistics before a step and counts the bad ones."""

    def __init__(self, module: nn.Module) -> None:
        layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
        self.buffers: list[Tensor] = [buffer for layer in layers for buffer in layer.buffers()]
        self.saved = [torch.empty_like(buffer) for buffer in self.buffers]
        self.skipped = 0  # in all
        self.in_a_row = 0

    def before_step(self) -> None:
        """Call before the first micro-batch of a step."""
        if self.buffers:
            copy_all(self.saved, self.buffers)

    def restore(self) -> None:
        """Put BatchNorm's statistics back to what they were before the step."""
        if self.buffers:
            copy_all(self.buffers, self.saved)

    def accepts(self, grad_norm: float, step: int) -> bool:
        """Whether to step; raises NumericError after too many refusals in a row."""
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.restore()
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= MAX_BAD_STEPS:
            raise NumericError(
                f"step {step}: {MAX_BAD_STEPS} steps in a row had no finite gradient, got a norm "
                f"of {grad_norm}; lower training.lr, or use runtime.precision=fp32"
            )
        return False
