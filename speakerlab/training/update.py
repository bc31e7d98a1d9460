"""From gradients to parameters, or not: unscale, norm, clip, judge, step. In: `.grad`. Out: norm.

Nothing here waits for a GPU: a bad step is skipped by the fused optimizers themselves (their
`found_inf`), so they must be fused.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speakerlab.core.regions import region
from speakerlab.training.guard import MAX_BAD_STEPS, Guard, NumericError
from speakerlab.training.loss_scale import FLOOR, LossScale


class Update(NamedTuple):
    """Of one step, on the device."""

    grad_norm: Tensor
    is_bad: Tensor  # 1.0 or 0.0


class Updater:
    """Moves the parameters of `module` by its gradients, once a step.

    split: parameters of which every rank has rows of its own; sum_over_ranks: for their norm.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        clip_norm: float,
        scale_loss: bool,
        split: Sequence[nn.Parameter] = (),
        sum_over_ranks: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self.scale = LossScale(device, enabled=scale_loss)
        self.guard = Guard(module, device)
        self.split = list(split)
        ids = {id(parameter) for parameter in split}
        self.shared = [p for p in module.parameters() if p.requires_grad and id(p) not in ids]
        self.sum_over_ranks = sum_over_ranks
        make_momentum(optimizer)

    def step(self, lr: float) -> Update:
        """Use up the gradients. Every rank comes to the same verdict."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        shared, split = gradients_of(self.shared), gradients_of(self.split)
        with region("step/optimizer/clip"):
            self.scale.remove([*shared, *split])
            norm = self._norm(shared, split)
            nn.utils.clip_grads_with_norm_([*self.shared, *self.split], self.clip_norm, norm)
        with region("step/optimizer/verdict"):
            is_bad = self.guard.judge(norm)
        optimizer: Any = self.optimizer
        optimizer.grad_scale, optimizer.found_inf = None, is_bad
        with region("step/optimizer/update"):
            self.optimizer.step()
        self.scale.update(is_bad)
        self.optimizer.zero_grad(set_to_none=True)
        return Update(norm, is_bad)

    def check(self, step: int, update: Update) -> None:
        """Raise NumericError where too many steps in a row were bad, or the loss scale is lost."""
        verdict = self.guard.read(step, update.grad_norm, self.scale.scale)
        if verdict is None:
            return
        if verdict.bad_in_a_row >= MAX_BAD_STEPS:
            raise NumericError(
                f"step {verdict.step}: {MAX_BAD_STEPS} steps in a row had no finite gradient, got "
                f"a norm of {verdict.grad_norm}",
                verdict.step,
            )
        if verdict.loss_scale < FLOOR:
            raise NumericError(
                f"step {verdict.step}: the loss scale of fp16 fell below {FLOOR:g}, got "
                f"{verdict.loss_scale:g}",
                verdict.step,
            )

    def begin_anew(self) -> None:
        """After a roll-back: no bad steps yet, the first loss scale."""
        self.guard.forget()
        self.scale.raise_to_initial()

    def _norm(self, shared: list[Tensor], split: list[Tensor]) -> Tensor:
        """The 2-norm of all gradients, whoever holds them."""
        norm = nn.utils.get_total_norm(shared)
        if not self.split:
            return norm
        square = nn.utils.get_total_norm(split).square() if split else torch.zeros_like(norm)
        return (norm.square() + self.sum_over_ranks(square)).sqrt()


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Of those that have one."""
    return [p.grad for p in parameters if p.grad is not None]


def make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zeros as SGD's momentum before the first step, which may be a bad one.

    Fused SGD fills it at its first step, whatever that step is worth, and for all parameters.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault(
                "momentum_buffer", torch.zeros_like(parameter, memory_format=torch.preserve_format)
            )
