"""One optimizer step: forward and backward of its micro-batches, then the update.

Every random draw of the model is a function of (seed, attempt, step, micro-batch). A step can
therefore be computed again: after a resume, or to find what was not finite.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from speakerlab.training.run_state import RunState
from speakerlab.training.schedules import Schedule
from speakerlab.training.task import MicroBatch
from speakerlab.training.update import Update

BACK_OFF = 0.5  # factor on the learning rate at each roll-back

# Part of the seeds of two streams of random numbers: dither and dropout in the model, and the
# classes that a sampled head draws. Without it, both streams might start from the same seed and be
# correlated. The values are arbitrary, but other values would change the results of every run.
MODEL_KEY = 0xD207
HEAD_KEY = 0x4EAD


class OptimizerStep:
    """Takes the optimizer step with the number `state.step`, which the trainer increases.

    accumulation: micro-batches of a step on this rank. memory_guard: context that handles running
    out of memory. report_progress: called after each micro-batch with the number of completed
    steps; it grows by 1 / accumulation each time.
    """

    def __init__(
        self,
        *,
        state: RunState,
        schedule: Schedule,
        accumulation: int,
        seed: int,
        memory_guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        report_progress: Callable[[float], None] = lambda step: None,
    ) -> None:
        self.state = state
        self.task = state.task
        self.updater = state.updater
        self.schedule = schedule
        self.accumulation = accumulation
        self.seed = seed
        self.memory_guard = memory_guard
        self.report_progress = report_progress
        # The module that computes the loss: the task. Where several ranks train, `Trainer.start`
        # sets it to DDP around the task, once the weights are loaded.
        self.model: Any = state.task
        # Listed once, because walking through the tree of modules takes time in every step.
        self.modules: list[nn.Module] = list(state.task.modules())

    def take(self, micro_batches: Iterator[MicroBatch]) -> Update:
        """Take one step: forward and backward per micro-batch, then the update."""
        step = self.state.step
        lr = self.lr_at(step)
        margin = self.schedule.margin_at(step)
        frozen = step < self.schedule.frozen_steps  # only the head learns
        self.begin(step)

        # Each backward pass adds to the gradients.
        with self.memory_guard():
            for index in range(self.accumulation):
                # Waits for data. x_B are the waves, (B, S), or stored features, (B, T, F).
                micro_batch = next(micro_batches)
                seed = self.model_seed(step, index)
                torch.manual_seed(seed)

                with self._gradient_exchange(index):
                    with record_function("step/forward"):
                        output = self.model(
                            micro_batch.x_B,
                            micro_batch.batch.label_B,
                            margin,
                            batch=micro_batch.batch,  # for the draws of SpecAugment
                            frozen=frozen,
                        )
                    with record_function("step/backward"):
                        # A mean over all micro-batches, as if they were one batch.
                        loss = output.loss / self.accumulation
                        self.updater.scale_loss(loss).backward()

                self.state.sums.add_micro_batch(output, micro_batch)
                done = (index + 1) / self.accumulation  # share of this step
                self.report_progress(step + done)

        # Parameters that do not learn in this step lose their gradients, so that the optimizer
        # leaves them alone.
        self.task.drop_gradients(frozen=frozen)
        with record_function("step/optimizer"):
            # Unscales and clips the gradients; skips the step if they are not finite.
            update = self.updater.step(lr)
            # In self-supervised training, moves the teacher, unless the step was bad.
            self.task.end_step(is_bad=update.is_bad)
        self.state.sums.add_step(update, self.updater.clip_norm)
        return update

    def begin(self, step: int) -> None:
        """Set modes, draw the classes of a sampled head, save BatchNorm's statistics."""
        # `task.train()` would set the mode of hundreds of modules, which takes microseconds each,
        # although nearly all are in training mode already. So only the others are set.
        for module in self.modules:
            if not module.training:
                module.training = True
        # In training mode, BatchNorm would change the statistics of a frozen embedder.
        if step < self.schedule.frozen_steps:
            self.task.embedder.eval()
        head_key = self._key(step, HEAD_KEY)
        self.task.begin_step(step, self.schedule, head_key)
        # Saves BatchNorm's statistics, which are put back if the step turns out to be bad.
        self.updater.before_step()

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, lowered by each roll-back so far."""
        factor = BACK_OFF**self.state.attempt
        return self.schedule.lr_at(step) * factor

    def model_seed(self, step: int, index: int) -> int:
        """Return the seed of dither and dropout in a micro-batch of this rank."""
        ranks = self.state.ranks
        # Counted over all ranks: 2 ranks with 1 micro-batch each draw the same numbers as 1 rank
        # with 2 micro-batches.
        number = index * ranks.world_size + ranks.rank
        return self._key(step, number, MODEL_KEY)

    def _key(self, *numbers: int) -> int:
        """Return a hash of the run's seed, the attempt and `numbers`, from 0 to 2**63 - 1."""
        sequence = np.random.SeedSequence([self.seed, self.state.attempt, *numbers])
        (hash_64_bits,) = sequence.generate_state(1, np.uint64)
        # Without the lowest bit, it fits into a signed integer of 64 bits.
        return int(hash_64_bits) >> 1

    def _gradient_exchange(self, index: int) -> AbstractContextManager[None]:
        """Let DDP average the gradients over the ranks in the last backward pass only.

        Gradients add up on each rank before, so that a step sends them once.
        """
        is_last = index == self.accumulation - 1
        is_ddp = self.model is not self.task
        if is_last or not is_ddp:
            return nullcontext()
        return self.model.no_sync()
