"""The end of a step: from gradients to parameters, and sums of the metrics until the next row.

The gradients are unscaled and clipped; if they are not finite, the step is bad. A bad step leaves
parameters, momentum, BatchNorm statistics and the metrics of crops unchanged and is not repeated,
so a bad batch never ends a run. The norm is taken after gradients are averaged over ranks, so every
rank makes the same decision.

No step waits for a GPU here: fused optimizers, as all of ours, skip a bad step by themselves
(`found_inf`), and the host reads the verdict one step late, without waiting for the current step.
The loss scale keeps gradients in fp16 from vanishing; unlike torch's, it covers all ranks.
Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv 1710.03740, section 3.2.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakerlab.training.distributed import Ranks
from speakerlab.training.task import MicroBatch, TaskOutput
from speakerlab.training.waiting import WaitWatch

log = logging.getLogger(__name__)
MAX_BAD_STEPS = 20  # in a row
INITIAL_SCALE = 2.0**16  # halves at a bad step
GROWTH_STEPS = 2000  # good steps in a row after which the scale doubles
MIN_SCALE = 1.0  # at this scale, an overflow is not caused by the scale

# Multiplies a list of tensors in place, with few kernels instead of one per tensor.
multiply_all = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]


class NumericError(RuntimeError):
    """Too many steps in a row without a finite gradient, or weights that are not finite."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step  # a bad step, which is computed again to find the cause


class Update(NamedTuple):
    """Outcome of one step, on the device."""

    grad_norm: Tensor
    is_bad: Tensor  # 1.0 or 0.0


class Updater:
    """Update of the parameters of `module` by their gradients, once per step; counts bad steps.

    Keeps a copy of BatchNorm's statistics from before the step. split: parameters whose rows are
    split over the ranks; sum_over_ranks: a collective, for the norm of their gradients.
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
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.scales_loss = scale_loss

        # All counts are on the device: reading them on the host would wait for the GPU.
        def zero_count() -> Tensor:
            return torch.zeros((), dtype=torch.int64, device=device)

        first_scale = INITIAL_SCALE if scale_loss else 1.0
        self.loss_scale = torch.full((), first_scale, device=device)
        self.good_steps = zero_count()  # since the loss scale changed
        self.skipped = zero_count()  # bad steps in total
        self.bad_in_a_row = zero_count()

        # BatchNorm's statistics change in the forward pass, before the step is known to be bad.
        self.statistics = flat_statistics(module)
        self.saved_statistics = [torch.empty_like(flat) for flat in self.statistics]

        # On a GPU the host reads the verdict on a step one step late. Until then, the number of the
        # step, its values on the host, and the event that marks the end of their copy are kept.
        self.reads_late = device.type == "cuda"
        self.pending_verdict: tuple[int, Tensor, torch.cuda.Event] | None = None

        # Each rank has different rows of the split parameters, and a copy of the shared parameters.
        # Their gradients enter the norm in different ways.
        self.split_parameters = list(split)
        split_ids = {id(parameter) for parameter in split}
        self.shared_parameters: list[nn.Parameter] = []
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in split_ids:
                self.shared_parameters.append(parameter)
        self.sum_over_ranks = sum_over_ranks

    def before_step(self) -> None:
        """Save the statistics; call before the first micro-batch of a step."""
        with record_function("step/guard"):
            for saved, flat in zip(self.saved_statistics, self.statistics):
                saved.copy_(flat)

    def restore(self) -> None:
        """Reset BatchNorm's statistics to their values before the step."""
        for saved, flat in zip(self.saved_statistics, self.statistics):
            flat.copy_(saved)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on; in fp16, multiplied by the loss scale."""
        return loss * self.loss_scale if self.scales_loss else loss

    def step(self, lr: float) -> Update:
        """Apply the gradients, or skip the step on every rank if they are not finite."""
        optimizer: Any = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        with record_function("step/optimizer/clip"):
            norm = self._unscale_and_clip()
        with record_function("step/optimizer/verdict"):
            is_bad = self._judge(norm)
        with record_function("step/optimizer/update"):
            # torch marks fused optimizers with this attribute. Their kernel reads `found_inf` on
            # the device, and leaves parameters and momentum unchanged if it is not 0: the host need
            # not wait.
            is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
            if is_fused:
                optimizer.grad_scale = None
                optimizer.found_inf = is_bad
                optimizer.step()
            elif not is_bad:  # waits for a GPU
                optimizer.step()
        if self.scales_loss:
            self._adapt_scale(is_bad)
        optimizer.zero_grad(set_to_none=True)
        return Update(norm, is_bad)

    def _unscale_and_clip(self) -> Tensor:
        """Divide the gradients by the loss scale, clip them, and return their unclipped norm."""
        shared_gradients = _gradients_of(self.shared_parameters)
        split_gradients = _gradients_of(self.split_parameters)
        if self.scales_loss:
            all_gradients = [*shared_gradients, *split_gradients]
            multiply_all(all_gradients, self.loss_scale.reciprocal())

        norm = nn.utils.get_total_norm(shared_gradients)
        if self.split_parameters:
            # Every rank has gradients of different rows: add the squares of all ranks.
            split_square = torch.zeros_like(norm)
            if split_gradients:
                split_norm = nn.utils.get_total_norm(split_gradients)
                split_square = split_norm.square()
            square = norm.square() + self.sum_over_ranks(split_square)
            norm = square.sqrt()

        # A norm that is not finite spoils all gradients here. Such a step is skipped anyway.
        parameters = [*self.shared_parameters, *self.split_parameters]
        nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
        return norm

    def _judge(self, grad_norm: Tensor) -> Tensor:
        """Return 1.0 if the step is bad, else 0.0, on the device; undo a bad step's statistics."""
        # Not `norm >= inf`, which is false for NaN.
        is_bad = ~(grad_norm < math.inf)
        for saved, flat in zip(self.saved_statistics, self.statistics):
            torch.where(is_bad, saved, flat, out=flat)
        self.skipped += is_bad
        # One more after a bad step, 0 after a good one, without a branch on the host.
        self.bad_in_a_row.add_(1).mul_(is_bad)
        return is_bad.float()

    def _adapt_scale(self, is_bad: Tensor) -> None:
        """Halve the loss scale after a bad step, double it after `GROWTH_STEPS` good ones."""
        # All on the device, without a branch on the host, where the verdict arrives later.
        is_good = is_bad == 0
        self.good_steps.add_(1).mul_(is_good)
        is_growing = self.good_steps >= GROWTH_STEPS
        half_if_bad = 1 - is_bad / 2
        factor = torch.where(is_growing, 2.0, half_if_bad)
        self.loss_scale.mul_(factor)
        self.good_steps.mul_(~is_growing)

    def check(self, step: int, update: Update) -> None:
        """Raise NumericError after too many bad steps in a row, or when the loss scale is lost."""
        # One tensor, so that one copy brings all values to the host.
        values = torch.stack(
            [
                update.grad_norm,
                self.bad_in_a_row,
                self.loss_scale,
            ]
        )
        verdict = self._copy_to_host(step, values)
        if verdict is None:
            return
        # On a GPU, the verdict is on an earlier step than `step`.
        judged_step, (norm, bad_in_a_row, scale) = verdict
        if bad_in_a_row >= MAX_BAD_STEPS:
            raise NumericError(
                f"step {judged_step}: {MAX_BAD_STEPS} steps in a row without a finite"
                f" gradient, last norm {norm}",
                judged_step,
            )
        if scale < MIN_SCALE:
            raise NumericError(
                f"step {judged_step}: the fp16 loss scale fell to {scale:g}, below"
                f" {MIN_SCALE:g}",
                judged_step,
            )

    def _copy_to_host(
        self, step: int, values: Tensor
    ) -> tuple[int, list[float]] | None:
        """Return a step and its values on the host.

        On a GPU: the values of the previous step, available without waiting; None at first.
        """
        if not self.reads_late:
            return step, values.tolist()

        previous = self.pending_verdict
        is_copied = torch.cuda.Event()
        # Only a copy to pinned memory does not block the host. The event marks its end.
        host_values = torch.empty(
            values.shape,
            dtype=values.dtype,
            pin_memory=True,
        )
        host_values.copy_(values, non_blocking=True)
        is_copied.record()
        self.pending_verdict = (step, host_values, is_copied)
        if previous is None:
            return None
        previous_step, previous_values, is_previous_copied = previous
        is_previous_copied.synchronize()
        return previous_step, previous_values.tolist()

    def reset(self) -> None:
        """Forget the bad steps in a row and restore the first loss scale, after a roll-back."""
        self.bad_in_a_row.zero_()
        self.pending_verdict = None
        if self.scales_loss:
            self.loss_scale.fill_(INITIAL_SCALE)
            self.good_steps.zero_()

    def state(self) -> dict[str, Any]:
        """Return the loss scale and the counts of bad steps as plain values."""
        return {
            "loss_scale": self.loss_scale.item(),
            "good_steps": self.good_steps.item(),
            "skipped": self.skipped.item(),
            "bad_in_a_row": self.bad_in_a_row.item(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the values that `state` returned; the loss scale only if this run has one."""
        self.skipped.fill_(state["skipped"])
        self.bad_in_a_row.fill_(state["bad_in_a_row"])
        if self.scales_loss:
            self.loss_scale.fill_(state["loss_scale"])
            self.good_steps.fill_(state["good_steps"])
            # A smaller scale would end the resumed run at its first step.
            self.loss_scale.clamp_(min=MIN_SCALE)


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of the parameters that have one; frozen parameters have none."""
    return [p.grad for p in parameters if p.grad is not None]


class _Statistic(NamedTuple):
    """A buffer of a BatchNorm layer."""

    layer: nn.Module
    name: str
    buffer: Tensor


def flat_statistics(module: nn.Module) -> list[Tensor]:
    """Make BatchNorm's buffers views of one tensor per dtype; return these tensors.

    A step then saves or restores hundreds of buffers with two kernels. Names and values stay.
    """
    # A flat tensor has one dtype: means and variances are floats, the counters of batches integers.
    statistics: dict[torch.dtype, list[_Statistic]] = {}
    for layer in module.modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001
            continue
        for name, buffer in layer.named_buffers(recurse=False):
            statistics_of_dtype = statistics.setdefault(buffer.dtype, [])
            statistics_of_dtype.append(_Statistic(layer, name, buffer))

    flat_tensors: list[Tensor] = []
    for statistics_of_dtype in statistics.values():
        flat_buffers: list[Tensor] = []
        sizes: list[int] = []
        for statistic in statistics_of_dtype:
            flat_buffers.append(statistic.buffer.flatten())
            sizes.append(statistic.buffer.numel())
        flat = torch.cat(flat_buffers)
        pieces = flat.split(sizes)
        for statistic, values in zip(statistics_of_dtype, pieces):
            # `data`: autograd would treat the update of one layer as a change of all.
            view = values.view_as(statistic.buffer).data
            setattr(statistic.layer, statistic.name, view)
        flat_tensors.append(flat)
    return flat_tensors


class MetricSums:
    """Sums of metrics since the last row.

    They are saved with the run, so that a resumed run writes the same rows. The crops of bad steps
    are left out, because their loss may be NaN.
    """

    CROP_NAMES = ("loss", "correct", "crops", "silent")  # sums over crops
    STEP_NAMES = ("grad_norm", "clipped", "skipped", "steps")  # sums over steps
    NAMES = CROP_NAMES + STEP_NAMES

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # On the device, so that adding to them does not wait for it. In fp64, so that long sums
        # lose no digits.
        self.sums = torch.zeros(
            len(self.NAMES),
            dtype=torch.float64,
            device=ranks.device,
        )
        # Views of the two parts of `sums`.
        num_crop_sums = len(self.CROP_NAMES)
        self.sums_of_crops = self.sums[:num_crop_sums]
        self.sums_of_steps = self.sums[num_crop_sums:]
        # The crops of the current step wait here until the step is known to be good or bad.
        self.step_sums = torch.zeros_like(self.sums_of_crops)
        self.started_at = time.monotonic()
        self.wait_watch = WaitWatch()

    def add_micro_batch(self, output: TaskOutput, inputs: MicroBatch) -> None:
        """Add the crops of a micro-batch, without waiting for the device."""
        num_crops = len(inputs.batch.label_B)
        loss = output.loss.detach() * num_crops
        crops = torch.full_like(loss, num_crops)
        # In the order of `CROP_NAMES`.
        values = [loss, output.num_correct, crops, inputs.silent]
        self.step_sums += torch.stack(values)

    def add_step(self, update: Update, clip_norm: float) -> None:
        """Add a step; a bad step only counts as skipped."""
        # A mask instead of a product: 0 * NaN is NaN.
        is_skipped = update.is_bad > 0
        self.step_sums.masked_fill_(is_skipped, 0.0)
        self.sums_of_crops.add_(self.step_sums)
        self.step_sums.zero_()

        # Steps are the same on every rank, and sums are added over ranks: rank 0 counts them.
        if self.ranks.rank == 0:
            norm = update.grad_norm.masked_fill(is_skipped, 0.0)
            is_clipped = norm > clip_norm
            steps = torch.ones_like(norm)
            # In the order of `STEP_NAMES`.
            values = [norm, is_clipped, update.is_bad, steps]
            self.sums_of_steps.add_(torch.stack(values))

    def load(self, sums: list[float]) -> None:
        """Restore the sums of all ranks from a checkpoint; rank 0 holds them."""
        self.step_sums.zero_()
        loaded = torch.tensor(sums, dtype=torch.float64)
        self.sums.copy_(loaded)
        # The sums are over all ranks. If each rank held them, the next row would count them again.
        if self.ranks.rank:
            self.sums.zero_()

    def take_row(self, step: int, wait_seconds: float) -> dict[str, Any]:
        """Return the means over all ranks since the last row, and begin the next row.

        A row in which every step was skipped has no loss, accuracy or gradient norm.
        """
        values = self.ranks.sum(self.sums).tolist()
        sums = dict(zip(self.NAMES, values))
        seconds = time.monotonic() - self.started_at
        self.wait_watch.add_row(step, wait_seconds=wait_seconds, seconds=seconds)
        self.sums.zero_()
        self.started_at = time.monotonic()

        row: dict[str, Any] = {}
        crops = sums["crops"]
        good_steps = sums["steps"] - sums["skipped"]
        if good_steps:
            row["loss"] = round(sums["loss"] / crops, 6)
            row["accuracy"] = round(sums["correct"] / crops, 6)
            row["grad_norm"] = round(sums["grad_norm"] / good_steps, 6)
        row["clipped"] = sums["clipped"] / sums["steps"]
        row["silent"] = int(sums["silent"])
        row["crops_per_second"] = round(crops / seconds, 1)
        row["data_wait"] = round(wait_seconds / seconds, 4)
        return row
