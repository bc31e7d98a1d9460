"""From a batch to its loss: augmented micro-batches on the device, and the task that they train.

On a GPU each micro-batch is made while what was queued before is still being computed. Augmentation
draws nothing itself (a batch carries its draws), so values do not depend on when it runs.
Letters: B rows, S samples, T frames, F mel bins, D embedding.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from speakerlab.core.batch import Batch
from speakerlab.training.distributed import Ranks
from speakerlab.training.precision import Precision, without_autotuning
from speakerlab.training.schedules import Schedule


class MicroBatch(NamedTuple):
    """What the task's forward pass takes, and what is reported about it."""

    x_B: Tensor  # float32, augmented waves (B, S), or stored features (B, T, F)
    silent: Tensor  # scalar, crops left without noise because they or the noise are silent
    batch: Batch  # on the device


class Inputs(Iterator[MicroBatch]):
    """Iterates over augmented micro-batches, which a GPU makes on a stream of their own.

    augment: Batch -> wave_BS, with a method `take_silent`.
    """

    def __init__(self, batches: Iterator[Batch], augment: Any, *, device: torch.device) -> None:
        self.batches, self.augment, self.device = batches, augment, device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            # The constants of the augmentation were put there by the main stream.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.wait_seconds = 0.0
        self.idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch; raise StopIteration after the last one."""
        inputs = self._make()
        if self.stream is not None:
            main = torch.cuda.current_stream(self.device)
            main.wait_stream(self.stream)
            for leaf in tree_leaves(inputs):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(main)  # its memory is in use until `main` is done
        return inputs

    def close(self) -> None:
        """Stop reading ahead; no micro-batch is taken after it."""
        if isinstance(self.batches, Generator):
            self.batches.close()

    def take_wait_seconds(self) -> float:
        """Return how long the device was idle for lack of a batch since the last call."""
        for began, ended in self.idle:
            ended.synchronize()
            self.wait_seconds += began.elapsed_time(ended) / 1000
        taken, self.wait_seconds = self.wait_seconds, 0.0
        self.idle.clear()
        return taken

    @torch.no_grad()
    def _make(self) -> MicroBatch:
        with record_function("step/data wait"):
            batch = self._next_batch()
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            with record_function("step/transfer"):
                if self.device.type != "cpu":
                    batch = batch.to(self.device)
            # The number of rows to resample varies.
            with record_function("step/front end"), without_autotuning():
                stored = len(batch.feats_BTF) > 0
                x_B = batch.feats_BTF if stored else self.augment(batch)
                silent = self.augment.take_silent()
        return MicroBatch(x_B, silent, batch)

    def _next_batch(self) -> Batch:
        """Return the next batch; only time in which the device is idle counts as waiting."""
        if self.device.type != "cuda":
            asked_at = time.monotonic()
            batch = next(self.batches)
            self.wait_seconds += time.monotonic() - asked_at
            return batch
        main = torch.cuda.current_stream(self.device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        main.record_event(began)  # after all that is queued
        batch = next(self.batches)
        main.record_event(ended)
        self.idle.append((began, ended))
        return batch


class TaskOutput(NamedTuple):
    loss: Tensor  # scalar, fp32, mean over the rows
    num_correct: Tensor  # scalar


class Task(nn.Module):
    """What a training trains; `forward` takes a micro-batch to its loss and is what DDP wraps.

    augment: Batch -> wave_BS, without parameters, so it runs ahead of `forward`. embedder: the one
    that is validated and published. crops_each: crops of an utterance in a batch.
    """

    crops_each = 1

    def __init__(self, *, augment: Any, embedder: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.augment, self.embedder = augment, embedder
        self.head: Any = None  # of a classification
        self.set_precision(precision)
        self.split: dict[str, nn.Parameter] = {}  # parameters of which other ranks have other rows
        # Banks of noise and rooms are the same on every rank and too large to be broadcast.
        banks = [f"augment.{name}" for name, _ in augment.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = banks

    def set_precision(self, precision: Precision) -> None:
        self.precision, self.autocast = precision, precision.autocast()

    def restart(self) -> None:
        """Adopt other weights of the embedder, before the first step."""

    def begin_step(self, step: int, schedule: Schedule, key: int) -> None:
        """Prepare for a step, before its first micro-batch; key: for what it draws."""

    def drop_gradients(self, *, frozen: bool) -> None:
        """Remove gradients of parameters that do not learn in this step, before the update."""

    def end_step(self, is_bad: Tensor) -> None:
        """Finish a step after the update; is_bad: 1.0 if it was skipped, else 0.0."""

    def measure(self, ranks: Ranks) -> dict[str, float]:
        """Return more metrics of the last step; every rank must call it."""
        return {}


class SpeakerTask(Task):
    """Speaker classification.

    The augmentation's `features` masks features. embedder: x_B and such a function -> emb_BD. head:
    see `losses/__init__.py`; `is_split`: other ranks hold other rows of it.
    """

    def __init__(
        self, *, augment: Any, embedder: nn.Module, head: Any, precision: Precision
    ) -> None:
        super().__init__(augment=augment, embedder=embedder, precision=precision)
        self.head = head
        # Rows that only this rank holds: their gradients are complete without the other ranks.
        own_rows = head.named_parameters() if head.is_split else ()
        self.split = {f"head.{name}": p for name, p in own_rows}
        self._ddp_params_and_buffers_to_ignore += self.split

    def begin_step(self, step: int, schedule: Schedule, key: int) -> None:
        self.head.begin_step(key)

    def drop_gradients(self, *, frozen: bool) -> None:
        if frozen:  # none instead of zeros: no momentum and no weight decay either
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
        with self.autocast, record_function("step/forward/embedder"):
            with torch.no_grad() if frozen else nullcontext():
                emb_BD: Tensor = self.embedder(x_B, self._masks(batch))
            if frozen:  # gradients of zero, because DDP waits for one of every parameter
                firsts = [p[(0,) * p.dim()] for p in self.embedder.parameters()]
                emb_BD = emb_BD + 0 * torch.stack(firsts).sum()
        return self._classify(emb_BD, label_B, margin)

    def features(self, x_B: Tensor, batch: Batch) -> Tensor:
        """Return feats_BTF, the part of `forward` before the backbone."""
        embedder: Any = self.embedder
        with self.autocast, record_function("step/forward/embedder"):
            return embedder.features(x_B, self._masks(batch))

    def classify(self, feats_BTF: Tensor, label_B: Tensor, margin: Tensor) -> TaskOutput:
        """Return the loss of features, the part of `forward` from the backbone on."""
        embedder: Any = self.embedder
        with self.autocast, record_function("step/forward/embedder"):
            emb_BD: Tensor = embedder.embed_features(feats_BTF)
        return self._classify(emb_BD, label_B, margin)

    def _masks(self, batch: Batch | None) -> Callable[[Tensor], Tensor] | None:
        return None if batch is None else partial(self.augment.features, batch=batch)

    def _classify(self, emb_BD: Tensor, label_B: Tensor, margin: float | Tensor) -> TaskOutput:
        with record_function("step/forward/head"):
            loss, decided = self.head(emb_BD, label_B, margin)
            return TaskOutput(loss, self.head.count_correct(decided, label_B))
