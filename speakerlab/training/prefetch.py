"""Micro-batches on the device, augmented; on a GPU each is made while the one before is computed.

Augmentation draws nothing itself (a batch carries its draws), so values do not depend on when it
runs. Letters: B rows, S samples, T frames, F mel bins.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from speakerlab.core.batch import Batch


class MicroBatch(NamedTuple):
    """What the task's forward pass takes, and what is reported about it."""

    wave_BS: Tensor  # float32, augmented; or stored features (B, T, F)
    silent: Tensor  # scalar, crops left without noise because they or the noise are silent
    batch: Batch  # on the device


class Prefetcher(Iterator[MicroBatch]):
    """Iterates over augmented micro-batches; on a GPU `prefetch` makes the next one ahead.

    augment: Batch -> wave_BS, with a method `take_silent`.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        augment: Any,
        *,
        device: torch.device,
        overlap: bool | None = None,
    ) -> None:
        self.batches, self.augment, self.device = batches, augment, device
        self.overlap = device.type == "cuda" if overlap is None else overlap
        self.stream: torch.cuda.Stream | None = None
        if self.overlap and device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            # The constants of the augmentation were put there by the main stream.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.ahead: MicroBatch | None = None
        self.wait_seconds = 0.0
        self.idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch; raise StopIteration after the last one."""
        inputs, self.ahead = self.ahead or self._make(), None
        if self.stream is not None:
            main = torch.cuda.current_stream(self.device)
            main.wait_stream(self.stream)

            def record(tensor: Tensor) -> Tensor:  # its memory is in use until `main` is done
                tensor.record_stream(main)
                return tensor

            inputs.batch.map(record)
            for tensor in (inputs.wave_BS, inputs.silent):
                record(tensor)
        return inputs

    def prefetch(self) -> None:
        """Begin the next micro-batch, if there is one; call it once a backward pass is queued."""
        if self.overlap:
            try:
                self.ahead = self._make()
            except StopIteration:
                self.ahead = None

    def close(self) -> None:
        """Stop reading ahead; no micro-batch is taken after it."""
        self.ahead = None
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
            with record_function("step/front end"):
                stored = len(batch.feats_BTF) > 0
                wave_BS = batch.feats_BTF if stored else self.augment(batch)
                silent = self.augment.take_silent()
        return MicroBatch(wave_BS, silent, batch)

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
