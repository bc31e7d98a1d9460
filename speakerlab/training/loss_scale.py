"""Scales the loss so that gradients in fp16 do not vanish. In: losses, gradients, a verdict a step.

It halves at a step whose gradients are not finite and doubles after many that are. It stays on the
device: nothing is read by the host. torch's GradScaler looks at this rank's gradients alone; here
the verdict is the trainer's, which also knows the norm and what other ranks hold.
Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv 1710.03740, section 3.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH_STEPS = 2000  # good ones in a row, after which it doubles
FLOOR = 1.0  # a gradient that overflows unscaled is no matter of the scale

multiply_all = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]


class LossScale:
    """A power of two on `device`; 1 for ever where it is not `enabled`."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = torch.full((), INITIAL if enabled else 1.0, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)

    def apply(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss * self.scale if self.enabled else loss

    def remove(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients of a scaled loss, in place."""
        if self.enabled and gradients:
            multiply_all(list(gradients), self.scale.reciprocal())

    def update(self, bad: Tensor) -> None:
        """Follow a step; bad: scalar, 1.0 where its gradients were not finite, else 0.0."""
        if not self.enabled:
            return
        self.good = torch.where(bad > 0, 0, self.good + 1)
        grown = torch.where(self.good >= GROWTH_STEPS, self.scale * 2, self.scale)
        self.scale = torch.where(bad > 0, self.scale / 2, grown)
        self.good = torch.where(self.good >= GROWTH_STEPS, 0, self.good)

    def raise_to_initial(self) -> None:
        """Begin anew, after a roll-back."""
        if self.enabled:
            self.scale.fill_(INITIAL)
            self.good.zero_()

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {"scale": float(self.scale), "good": int(self.good)}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse of `state`; of a run in another precision it is left out."""
        if self.enabled:
            self.scale.fill_(max(state["scale"], FLOOR))
            self.good.fill_(state["good"])
