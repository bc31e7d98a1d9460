"""Features of the next micro-batch, made on a GPU while the step before is still being computed.

In: micro-batches of crops. Out: what the task's forward pass takes. On a CPU each is made when it
is asked for. Values are the same either way: the generators are set for each micro-batch, and its
forward pass goes on drawing where its front end stopped. Letters: B rows, T frames, F mel bins.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from speakerlab.core.batch import Batch
from speakerlab.core.regions import region
from speakerlab.training.task import SpeakerTask

log = logging.getLogger(__name__)
MAX_WAIT = 0.2  # share of its time that training may wait for data before it is told
JUDGED_SECONDS = 30.0  # the share is taken over so long
TOLD_SECONDS = 600.0  # and after it was told, over so long


class Inputs(NamedTuple):
    """One micro-batch after the front end."""

    feats_BTF: Tensor
    label_B: Tensor
    silent: Tensor  # scalar, crops that got no noise
    draws: Tensor  # state of the device's generator
    row_B: Tensor  # rows of the manifest, on the CPU


class Prefetcher:
    """Runs the front end of `task` over batches, one ahead where `overlap` is set.

    begin: told the number of a micro-batch before anything is drawn for it; it seeds the generators
    and sets the mode of the modules.
    """

    def __init__(
        self,
        task: SpeakerTask,
        batches: Iterable[Batch],
        *,
        device: torch.device,
        begin: Callable[[int], None],
        first: int = 0,
        overlap: bool | None = None,
    ) -> None:
        self.task, self.batches, self.device = task, iter(batches), device
        self.begin, self.number = begin, first
        self.overlap = device.type == "cuda" if overlap is None else overlap
        self.stream: torch.cuda.Stream | None = None
        if self.overlap and device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            # The front end's constants were put there by the main stream.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.ahead: Inputs | None = None
        self.wait_seconds = 0.0
        self.idle: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def take(self) -> Inputs:
        """The next micro-batch; the generators are where its front end left them.

        Raises StopIteration after the last one.
        """
        if self.ahead is None:
            inputs = self._make()
        else:
            inputs, self.ahead = self.ahead, None
            self.begin(self.number)  # others may have drawn or changed modes since
            self._set_draws(inputs.draws)
        self.number += 1
        if self.stream is not None:
            main = torch.cuda.current_stream(self.device)
            main.wait_stream(self.stream)
            for tensor in (inputs.feats_BTF, inputs.label_B, inputs.silent):
                tensor.record_stream(main)
        return inputs

    def look_ahead(self) -> None:
        """Begin the next micro-batch, if there is one; call it when a backward pass is queued."""
        if not self.overlap:
            return
        try:
            self.ahead = self._make()
        except StopIteration:
            self.ahead = None

    def close(self) -> None:
        """End what reads ahead; no batch is taken after it."""
        self.ahead = None
        if isinstance(self.batches, Generator):
            self.batches.close()

    def take_wait_seconds(self) -> float:
        """How long the device had nothing to do for want of a batch, since the last call."""
        for began, ended in self.idle:
            ended.synchronize()
            self.wait_seconds += began.elapsed_time(ended) / 1000
        taken, self.wait_seconds = self.wait_seconds, 0.0
        self.idle.clear()
        return taken

    def _make(self) -> Inputs:
        with region("step/data wait"):
            batch = self._next_batch()
        self.begin(self.number)
        with self._on_stream():
            row_B = batch.row_B
            with region("step/transfer"):
                batch = batch.to(self.device)
            with region("step/front end"):
                feats_BTF = self.task.features(batch)
                silent = self.task.take_silent()
        return Inputs(feats_BTF, batch.label_B, silent, self._get_draws(), row_B)

    def _next_batch(self) -> Batch:
        """The next batch; what counts as waiting is only time in which the device is idle."""
        if self.device.type != "cuda":
            asked_at = time.monotonic()
            batch = next(self.batches)
            self.wait_seconds += time.monotonic() - asked_at
            return batch
        main = torch.cuda.current_stream(self.device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        main.record_event(began)  # once all that was asked for is computed
        batch = next(self.batches)
        main.record_event(ended)
        self.idle.append((began, ended))
        return batch

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _get_draws(self) -> Tensor:
        """State of the generator that the device's modules draw from."""
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def _set_draws(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


class WaitTeller:
    """One line, now and then, where training waits for its data more than a fifth of the time."""

    def __init__(self) -> None:
        self.wait_seconds = self.seconds = 0.0
        self.judged_seconds = JUDGED_SECONDS
        self.started = False

    def add(self, step: int, wait_seconds: float, seconds: float) -> None:
        """Count a log window; the first, in which the workers start, is left out."""
        if not self.started:
            self.started = True
            return
        self.wait_seconds += wait_seconds
        self.seconds += seconds
        if self.seconds < self.judged_seconds:
            return
        share, over = self.wait_seconds / self.seconds, self.seconds
        self.wait_seconds = self.seconds = 0.0
        self.judged_seconds = JUDGED_SECONDS
        if share > MAX_WAIT:
            self.judged_seconds = TOLD_SECONDS
            log.warning(
                "step %d: training waits for data, got %.0f %% of the last %.0f s; give it more "
                "CPUs, raise runtime.num_workers or pack the audio (docs/hardware.md)",
                *(step, 100 * share, over),
            )
