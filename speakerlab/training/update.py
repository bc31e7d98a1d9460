"""From gradients to parameters: unscale, clip, skip the step if it is not finite, step.

A bad step leaves parameters, momentum and BatchNorm statistics unchanged and is not repeated, so a
bad batch never ends a run. The norm is taken after gradients are averaged over ranks, so every rank
makes the same decision.

Nothing here waits for a GPU: fused optimizers, as all of ours, skip a bad step by themselves
(`found_inf`), and the host reads the verdict one step late, not waiting for what it just queued.
The loss scale keeps gradients in fp16 from vanishing; unlike torch's, it covers all ranks.
Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv 1710.03740, section 3.2.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakerlab.core.registry import Registry

MAX_BAD_STEPS = 20  # in a row
INITIAL_SCALE = 2.0**16  # halves at a bad step
GROWTH_STEPS = 2000  # good steps in a row after which the scale doubles
MIN_SCALE = 1.0  # a gradient that overflows unscaled is not the scale's fault

OF_SCALE, OF_STEPS = ("loss_scale", "good_steps"), ("skipped", "bad_in_a_row")  # saved

multiply_all = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]


class NumericError(RuntimeError):
    """Too many steps in a row without a finite gradient, or weights that are not finite."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step  # a bad one


class Update(NamedTuple):
    """Outcome of one step, on the device."""

    grad_norm: Tensor
    is_bad: Tensor  # 1.0 or 0.0


class Updater:
    """Moves the parameters of `module` by their gradients, once per step; counts bad steps.

    Keeps a copy of BatchNorm's statistics from before the step. split: parameters of which each
    rank holds its own rows; sum_over_ranks: for their norm.
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
        self.optimizer, self.clip_norm, self.scales_loss = optimizer, clip_norm, scale_loss
        self.loss_scale = torch.full((), INITIAL_SCALE if scale_loss else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)  # since it changed
        self.statistics = flat_statistics(module)
        self.saved = [torch.empty_like(flat) for flat in self.statistics]
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # bad steps in total
        self.bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.late = device.type == "cuda"  # the host learns the verdict one step late
        self.pending: tuple[int, Tensor, torch.cuda.Event] | None = None
        self.split = list(split)
        ids = {id(parameter) for parameter in split}
        self.shared = [p for p in module.parameters() if p.requires_grad and id(p) not in ids]
        self.sum_over_ranks = sum_over_ranks

    def before_step(self) -> None:
        """Save the statistics; call before the first micro-batch of a step."""
        with record_function("step/guard"):
            for saved, flat in zip(self.saved, self.statistics):
                saved.copy_(flat)

    def restore(self) -> None:
        """Reset BatchNorm's statistics to those from before the step."""
        for saved, flat in zip(self.saved, self.statistics):
            flat.copy_(saved)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss * self.loss_scale if self.scales_loss else loss

    def step(self, lr: float) -> Update:
        """Apply the gradients, or skip the step on every rank if they are not finite."""
        optimizer: Any = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        with record_function("step/optimizer/clip"):
            gradients = [p.grad for p in self.shared if p.grad is not None]
            own_rows = [p.grad for p in self.split if p.grad is not None]
            if self.scales_loss:
                multiply_all([*gradients, *own_rows], self.loss_scale.reciprocal())
            norm = nn.utils.get_total_norm(gradients)
            if self.split:  # the rows of every rank count
                square = torch.zeros_like(norm)
                if own_rows:
                    square = nn.utils.get_total_norm(own_rows).square()
                norm = (norm.square() + self.sum_over_ranks(square)).sqrt()
            nn.utils.clip_grads_with_norm_([*self.shared, *self.split], self.clip_norm, norm)
        with record_function("step/optimizer/verdict"):
            is_bad = self._judge(norm)
        with record_function("step/optimizer/update"):
            if getattr(optimizer, "_step_supports_amp_scaling", False):  # torch's mark: it is fused
                optimizer.grad_scale, optimizer.found_inf = None, is_bad
                optimizer.step()
            elif not is_bad:  # waits for a GPU
                optimizer.step()
        if self.scales_loss:
            self._adapt_scale(is_bad)
        optimizer.zero_grad(set_to_none=True)
        return Update(norm, is_bad)

    def _judge(self, grad_norm: Tensor) -> Tensor:
        """Return 1.0 if the step is bad, else 0.0, on the device; undo a bad step's statistics."""
        is_bad = ~(grad_norm < math.inf)
        for saved, flat in zip(self.saved, self.statistics):
            torch.where(is_bad, saved, flat, out=flat)
        self.skipped += is_bad
        self.bad_in_a_row.add_(1).mul_(is_bad)
        return is_bad.float()

    def check(self, step: int, update: Update) -> None:
        """Raise NumericError after too many bad steps in a row, or when the loss scale is lost."""
        values = (update.grad_norm, self.bad_in_a_row, self.loss_scale)
        known = self._on_host(step, torch.stack(values))
        if known is None:
            return
        step, (norm, bad_in_a_row, scale) = known
        if bad_in_a_row >= MAX_BAD_STEPS:
            text = f"{MAX_BAD_STEPS} steps in a row without a finite gradient, last norm {norm}"
            raise NumericError(f"step {step}: {text}", step)
        if scale < MIN_SCALE:
            text = f"the fp16 loss scale fell to {scale:g}, below {MIN_SCALE:g}"
            raise NumericError(f"step {step}: {text}", step)

    def _on_host(self, step: int, values: Tensor) -> tuple[int, list[float]] | None:
        """Return (step, values) on the host; on a GPU of the step before, None at the first."""
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
        return step, values.tolist()

    def reset(self) -> None:
        """Forget the bad steps in a row and restore the first loss scale, after a roll-back."""
        self.bad_in_a_row.zero_()
        self.pending = None
        if self.scales_loss:
            self.loss_scale.fill_(INITIAL_SCALE)
            self.good_steps.zero_()

    def state(self) -> dict[str, Any]:
        """Return the loss scale and the counts of bad steps as plain values."""
        return {name: getattr(self, name).item() for name in (*OF_SCALE, *OF_STEPS)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; a loss scale only where this run scales too."""
        for name in (*OF_SCALE, *OF_STEPS) if self.scales_loss else OF_STEPS:
            getattr(self, name).fill_(state[name])
        self.loss_scale.clamp_(min=MIN_SCALE)

    def _adapt_scale(self, is_bad: Tensor) -> None:
        self.good_steps.add_(1).mul_(is_bad == 0)
        grows = self.good_steps >= GROWTH_STEPS
        self.loss_scale.mul_(torch.where(grows, 2.0, 1 - is_bad / 2))
        self.good_steps.mul_(~grows)


def flat_statistics(module: nn.Module) -> list[Tensor]:
    """Make BatchNorm's buffers parts of one tensor per type, which are returned.

    A step then saves or restores hundreds of buffers with two kernels. Names and values stay.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
    owned = [(layer, *named) for layer in layers for named in layer.named_buffers(recurse=False)]
    flats = list[Tensor]()
    for dtype in dict.fromkeys(buffer.dtype for _, _, buffer in owned):
        alike = [one for one in owned if one[2].dtype == dtype]
        flats.append(torch.cat([buffer.flatten() for _, _, buffer in alike]))
        parts = flats[-1].split([buffer.numel() for _, _, buffer in alike])
        for (layer, name, buffer), part in zip(alike, parts):
            # `data`: autograd would take the update of one layer for a change of all.
            setattr(layer, name, part.view_as(buffer).data)
    return flats


def sgd(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = True,
    weight_decay: float = 1e-4,
) -> torch.optim.Optimizer:
    """Build stochastic gradient descent with (Nesterov) momentum."""
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    optimizer = torch.optim.SGD(parameters, lr=lr, fused=True, **options)
    # torch would fill the momentum at the first step, even if that step is bad.
    for parameter in optimizer.param_groups[0]["params"] if momentum else ():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
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
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return torch.optim.AdamW(parameters, lr=lr, fused=True, **options)


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = Registry(
    __name__.rpartition(".")[0], {"sgd": "update:sgd", "adamw": "update:adamw"}
)
