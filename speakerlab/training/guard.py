"""Skip steps whose gradients are not finite, so that a bad batch never ends a run.

The norm is taken after gradients are averaged over ranks, so every rank decides alike. A bad step
leaves parameters, momentum and BatchNorm statistics unchanged and uses up its place in the data.
The decision stays on the device; the host reads it at once on a CPU and one step late on a GPU,
so that it never waits for the step it has just queued.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

MAX_BAD_STEPS = 20  # in a row

copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class NumericError(RuntimeError):
    """Too many steps in a row without a finite gradient, or weights that are not finite."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step  # a bad one


class Verdict(NamedTuple):
    """What the host knows about a step."""

    step: int
    grad_norm: float
    bad_in_a_row: int
    loss_scale: float


class Guard:
    """Keeps BatchNorm's statistics from before a step; counts bad steps."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
        self.buffers: list[Tensor] = [b for m in layers for b in m.buffers()]
        self.saved = [torch.empty_like(buffer) for buffer in self.buffers]
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # in total
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.late = device.type == "cuda"  # the host learns the verdict one step late
        self.pending: tuple[int, Tensor, torch.cuda.Event] | None = None

    def before_step(self) -> None:
        """Save the statistics; call before the first micro-batch of a step."""
        if self.buffers:
            copy_all(self.saved, self.buffers)

    def judge(self, grad_norm: Tensor) -> Tensor:
        """Return 1.0 if the step is bad, else 0.0, on the device; a bad step's statistics go."""
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
        """Reset BatchNorm's statistics to those from before the step."""
        if self.buffers:
            copy_all(self.buffers, self.saved)

    def read(self, step: int, grad_norm: Tensor, loss_scale: Tensor) -> Verdict | None:
        """Return the verdict on this step; on a GPU that on the step before, None at the first."""
        values = torch.stack([grad_norm.double(), self.in_a_row.double(), loss_scale.double()])
        if self.late:
            before, ready = self.pending, torch.cuda.Event()
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            ready.record()
            self.pending = (step, host, ready)
            if before is None:
                return None
            step, values, ready = before
            ready.synchronize()
        norm, in_a_row, scale = values.tolist()
        return Verdict(step, norm, int(in_a_row), scale)

    def reset(self) -> None:
        """Forget the bad steps in a row, after a roll-back."""
        self.in_a_row.zero_()
        self.pending = None
