"""From a batch to its loss: augmented micro-batches on the device, and the task that they train.

On a GPU each micro-batch is prepared while earlier work is still running. Augmentation draws
nothing itself (a batch carries its draws), so values do not depend on when it runs.
Letters: B rows, S samples, T frames, F mel bins, D embedding.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from speakerlab.core.batch import Batch
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision
from speakerlab.training.schedules import Schedule


class Augment(Protocol):
    """Augmentation of batches: a module without parameters (frontend/augment/base.py)."""

    def __call__(self, batch: Batch) -> Tensor:
        """Return augmented waves (B, S)."""
        ...

    def voices(self, batch: Batch) -> Tensor:
        """Return waves (B, S) with only the changes that make another voice of them."""
        ...

    def features(self, feats_BTF: Tensor, batch: Batch) -> Tensor:
        """Return masked features (SpecAugment)."""
        ...

    def take_silent(self) -> Tensor:
        """Return the number of crops since the last call that were too silent to be changed."""
        ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the banks of noises and rooms, and other constants, by their names."""
        ...


class MicroBatch(NamedTuple):
    """Input of the task's forward pass, and metrics of this input."""

    x_B: Tensor  # float32, augmented waves (B, S), or stored features (B, T, F)
    # Scalar: number of crops left without noise, because they or the noise are silent.
    silent: Tensor
    batch: Batch  # on the device


class Inputs(Iterator[MicroBatch]):
    """Iterates over augmented micro-batches, which a GPU makes on a second stream.

    crop_targets: takes a batch and its augmented waves, and returns the batch with its targets;
    None where no teacher hears the crops.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        augment: Augment,
        *,
        device: torch.device,
        crop_targets: Callable[[Batch, Tensor], Batch] | None = None,
    ) -> None:
        self.batches = batches
        self.augment = augment
        self.device = device
        self.crop_targets = crop_targets
        # On a second stream, the next micro-batch is copied and augmented while the main stream
        # still computes the backward pass of the last one.
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            main_stream = torch.cuda.current_stream(device)
            self.stream = torch.cuda.Stream(device)
            # The main stream copies the augmentation's constants to the GPU: wait for them.
            self.stream.wait_stream(main_stream)
        self.wait_seconds = 0.0
        # Two events around each time that the GPU may have waited for a batch. The time between
        # them can only be read when the GPU has passed both.
        self.idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch; raise StopIteration after the last one."""
        micro_batch = self._make()
        if self.stream is not None:
            main_stream = torch.cuda.current_stream(self.device)
            main_stream.wait_stream(self.stream)
            # The memory belongs to the second stream, which would reuse it as soon as Python drops
            # the tensors. The allocator must know that the main stream still reads them.
            for leaf in tree_leaves(micro_batch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(main_stream)
        return micro_batch

    def close(self) -> None:
        """Stop reading ahead; no micro-batch is taken after it."""
        if isinstance(self.batches, Generator):
            self.batches.close()

    def take_wait_seconds(self) -> float:
        """Return how long the device was idle for lack of a batch since the last call."""
        for begin, end in self.idle:
            end.synchronize()
            milliseconds = begin.elapsed_time(end)
            self.wait_seconds += milliseconds / 1000
        self.idle.clear()
        wait_seconds = self.wait_seconds
        self.wait_seconds = 0.0
        return wait_seconds

    @torch.no_grad()
    def _make(self) -> MicroBatch:
        """Read the next batch, move it to the device and augment it there."""
        with record_function("step/data wait"):
            batch = self._next_batch()
        stream_context: Any = nullcontext()
        if self.stream is not None:
            stream_context = torch.cuda.stream(self.stream)
        with stream_context:
            with record_function("step/transfer"):
                if self.device.type != "cpu":
                    batch = batch.to(self.device)
            with record_function("step/front end"):
                has_features = len(batch.feats_BTF) > 0
                x_B = batch.feats_BTF if has_features else self.augment(batch)
                silent = self.augment.take_silent()
            if self.crop_targets is not None:
                batch = self.crop_targets(batch, x_B)
        return MicroBatch(x_B, silent, batch)

    def _next_batch(self) -> Batch:
        """Return the next batch; only time in which the device is idle counts as waiting."""
        if self.device.type != "cuda":
            started_at = time.monotonic()
            batch = next(self.batches)
            self.wait_seconds += time.monotonic() - started_at
            return batch

        # The host runs ahead of the GPU, so the host's clock cannot measure the GPU's waiting. The
        # GPU reaches `begin` after the work that is queued now. If it is still busy when the batch
        # arrives, it reaches `end` right after `begin`, and the wait cost no time.
        main_stream = torch.cuda.current_stream(self.device)
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        main_stream.record_event(begin)
        batch = next(self.batches)
        main_stream.record_event(end)
        self.idle.append((begin, end))
        return batch


class TaskOutput(NamedTuple):
    """Result of the forward pass of one micro-batch."""

    loss: Tensor  # scalar, fp32, mean over the rows
    num_correct: Tensor  # scalar


class Task(nn.Module):
    """All modules of a training; `forward` computes the loss of a micro-batch. DDP wraps the task.

    embedder: the module that is validated and published. crops_each: number of crops that a batch
    has of each utterance.
    """

    crops_each = 1

    def __init__(
        self, *, augment: Augment, embedder: nn.Module, precision: Precision
    ) -> None:
        super().__init__()
        # `Any`, because other packages use more of it than `Augment` lists.
        self.augment: Any = augment
        self.embedder = embedder
        self.head: Any = None  # only a classification has one
        self.set_precision(precision)
        # Parameters whose rows are split over the ranks, by their name in the task.
        self.split_parameters: dict[str, nn.Parameter] = {}
        # DDP broadcasts rank 0's buffers at the start. Banks of noise and rooms are the same on
        # every rank, and too large for that. DDP finds the names to skip in this attribute.
        banks = [f"augment.{name}" for name, _ in augment.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = banks

    def set_precision(self, precision: Precision) -> None:
        """Set the number format of the forward passes from now on."""
        self.precision = precision
        self.autocast = precision.autocast()

    def masking_of(self, batch: Batch | None) -> Callable[[Tensor], Tensor] | None:
        """Return the function that masks features (SpecAugment) by a batch's draws.

        None without a batch. Features exist only inside of the embedder, which calls the function.
        """
        if batch is None:
            return None
        return partial(self.augment.features, batch=batch)

    def adopt_loaded_weights(self) -> None:
        """Prepare for weights that were loaded into the embedder; called before the first step."""

    def begin_step(self, step: int, schedule: Schedule, key: int) -> None:
        """Prepare for a step, before its first micro-batch; key: seed of its random draws."""

    def drop_gradients(self, *, frozen: bool) -> None:
        """Remove gradients of parameters that do not learn in this step, before the update."""

    def end_step(self, is_bad: Tensor) -> None:
        """Finish a step after the update; is_bad: 1.0 if it was skipped, else 0.0."""

    def measure(self, ranks: Ranks) -> dict[str, float]:
        """Return more metrics of the last step; every rank must call it."""
        return {}


class SpeakerTask(Task):
    """Speaker classification.

    embedder: takes x_B and a function that masks features, or None, and returns emb_BD. head: see
    `losses/__init__.py`; if it `is_split`, each rank holds the rows of some classes.
    """

    def __init__(
        self, *, augment: Augment, embedder: nn.Module, head: Any, precision: Precision
    ) -> None:
        super().__init__(augment=augment, embedder=embedder, precision=precision)
        self.head = head
        # No other rank holds these rows. Their gradients are complete without the other ranks, and
        # averaging them with other rows would be wrong: DDP must leave them alone.
        if head.is_split:
            for name, parameter in head.named_parameters():
                self.split_parameters[f"head.{name}"] = parameter
        self._ddp_params_and_buffers_to_ignore += list(self.split_parameters)

    def begin_step(self, step: int, schedule: Schedule, key: int) -> None:
        self.head.begin_step(key)

    def drop_gradients(self, *, frozen: bool) -> None:
        # With gradients of zero the optimizer would still apply momentum and weight decay.
        if frozen:
            self.embedder.zero_grad(set_to_none=True)

    def forward(
        self,
        x_B: Tensor,
        label_B: Tensor,
        margin: float,
        *,
        batch: Batch | None = None,
        frozen: bool = False,
    ) -> TaskOutput:
        """Return the loss of augmented waves (B, S), or of stored features (B, T, F).

        batch: with the draws of SpecAugment; None: no masks. frozen: only the head learns.
        """
        mask_features = self.masking_of(batch)
        gradient_context = torch.no_grad() if frozen else nullcontext()
        with self.autocast, record_function("step/forward/embedder"):
            with gradient_context:
                emb_BD: Tensor = self.embedder(x_B, mask_features)
            # DDP waits for a gradient of every parameter, also of the frozen ones.
            if frozen:
                emb_BD = emb_BD + _zero_of(self.embedder)
        # Outside of autocast: the margin and the softmax need fp32.
        with record_function("step/forward/head"):
            loss, decided = self.head(emb_BD, label_B, margin)
            num_correct = self.head.count_correct(decided, label_B)
        return TaskOutput(loss, num_correct)


def _zero_of(module: nn.Module) -> Tensor:
    """Return a scalar 0 that depends on every parameter of a module, with a gradient of zero."""
    # One value of each parameter is enough.
    first_values: list[Tensor] = []
    for parameter in module.parameters():
        first_index = (0,) * parameter.dim()
        first_values.append(parameter[first_index])
    return 0 * torch.stack(first_values).sum()
