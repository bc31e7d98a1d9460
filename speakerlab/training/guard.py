"""Keeps bad batches from ending a run. In: the gradient norm of a step. Out: whether it counts.

The norm is taken after the gradients are averaged over ranks, so every rank decides alike. A bad
step leaves parameters, momentum and BatchNorm statistics as they were, and uses up its position.
The decision stays on the device; the host reads it at once on a CPU and one step late on a GPU,
so that it never waits for the step it has just asked for.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

MAX_BAD_STEPS = 20  # in a row

copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class NumericError(RuntimeError):
    """Too many steps in a row without a finite gradient, or parameters that are not finite."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step  # a bad one


class Verdict(NamedTuple):
    """What the host knows of a step."""

    step: int
    grad_norm: float
    bad_in_a_row: int
    loss_scale: float


class Guard:
    """Remembers BatchNorm's statistics before a step; counts the bad ones."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
        self.buffers: list[Tensor] = [b for m in layers for b in m.buffers()]
        self.saved = [torch.empty_like(buffer) for buffer in self.buffers]
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # in all
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.late = device.type == "cuda"  # the host does not wait to know
        self.on_the_way: tuple[int, Tensor, torch.cuda.Event] | None = None

    def before_step(self) -> None:
        """Call before the first micro-batch of a step."""
        if self.buffers:
            copy_all(self.saved, self.buffers)

    def judge(self, grad_norm: Tensor) -> Tensor:
        """1.0 where the step is bad, else 0.0, on the device; BatchNorm is put back if it is."""
        is_bad = ~grad_norm.isfinite()
        if self.buffers and self.late:
            kept = [torch.where(is_bad, old, new) for old, new in zip(self.saved, self.buffers)]
            copy_all(self.buffers, kept)
        elif is_bad:
            self.restore()
        self.skipped += is_bad
        self.in_a_row = torch.where(is_bad, self.in_a_row + 1, 0)
        return is_bad.float()

    def restore(self) -> None:
        """Put BatchNorm's statistics back to what they were before the step."""
        if self.buffers:
            copy_all(self.buffers, self.saved)

    def read(self, step: int, grad_norm: Tensor, loss_scale: Tensor) -> Verdict | None:
        """The verdict on this step; on a GPU on the one before, None at the first."""
        values = torch.stack([grad_norm.double(), self.in_a_row.double(), loss_scale.double()])
        if not self.late:
            return self._verdict(step, values)
        before, ready = self.on_the_way, torch.cuda.Event()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready.record()
        self.on_the_way = (step, host, ready)
        if before is None:
            return None
        before[2].synchronize()
        return self._verdict(before[0], before[1])

    def forget(self) -> None:
        """Begin anew, after a roll-back."""
        self.in_a_row.zero_()
        self.on_the_way = None

    def _verdict(self, step: int, values: Tensor) -> Verdict:
        grad_norm, in_a_row, loss_scale = values.tolist()
        return Verdict(step, grad_norm, int(in_a_row), loss_scale)
