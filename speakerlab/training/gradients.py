"""From the micro-batches of a step to the gradients of its loss, on one rank or on several.

In: batches in order, the task. Out: `.grad`, meaned over the global batch, and sums for metrics.
Whatever a model draws follows from (seed, attempt, step, micro-batch) and from nothing before it.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speakerlab.core.batch import Batch
from speakerlab.core.regions import region
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks
from speakerlab.training.guard import Guard
from speakerlab.training.prefetch import Prefetcher
from speakerlab.training.task import SpeakerTask, TaskOutput

DRAWS_KEY = 0xD207  # keeps the model's own draws apart from those of the data ...
HEAD_KEY = 0x4EAD  # ... and those of the classes that take part apart from both


class Gradients:
    """Forward and backward passes of `task` over batches(first step, attempt).

    throw_away_batch: one of the shape of all, on the device. frozen_steps: so many at the start
    have gradients of the head alone.
    """

    def __init__(
        self,
        *,
        task: SpeakerTask,
        plan: BatchPlan,
        ranks: Ranks,
        batches: Callable[[int, int], Iterable[Batch]],
        throw_away_batch: Batch,
        frozen_steps: int,
        seed: int,
    ) -> None:
        self.task, self.plan, self.ranks, self.batches = task, plan, ranks, batches
        self.throw_away_batch, self.frozen_steps, self.seed = throw_away_batch, frozen_steps, seed
        self.module: nn.Module = task  # what is called; DDP's from `join` on
        self.attempt = 0
        self.modules = list(task.modules())
        self.at: int | None = None  # the step whose gradients are being made, while they are

    def join(self, guard: Guard) -> None:
        """Have the ranks mean their gradients; parameters become those of rank 0.

        One pass is thrown away: DDP regroups its gradients after the first, and the first step
        after a resume would else add up in another order than it did before.
        """
        self.module = self.ranks.wrap(self.task)
        if not isinstance(self.module, DistributedDataParallel):
            return
        self.task.train()
        guard.before_step()
        batch = self.throw_away_batch
        output: TaskOutput = self.module(self.task.features(batch), batch.label_B, 0.0)
        output.loss.backward()
        guard.restore()
        self.task.zero_grad(set_to_none=True)

    def inputs(self, start_step: int, attempt: int) -> Prefetcher:
        """The micro-batches of this rank from a step on, ready for the forward pass."""
        self.attempt = attempt
        return Prefetcher(
            self.task,
            self.batches(start_step, attempt),
            device=self.ranks.device,
            begin=self._begin,
            first=start_step * self.plan.accumulation,
        )

    def make(
        self,
        step: int,
        inputs: Prefetcher,
        *,
        margin: float,
        scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> Tensor:
        """Fill `.grad` for one step.

        scaled: what is done to a loss before its backward pass. Returns this rank's sums over
        crops: loss, right ones, crops, and crops that got no noise.
        """
        self.at = step
        frozen = step < self.frozen_steps
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        for index in range(self.plan.accumulation):
            feats_BTF, label_B, silent, *_ = inputs.take()
            last = index == self.plan.accumulation - 1
            with self._reducing(now=last):
                with region("step/forward"):
                    output: TaskOutput = self.module(feats_BTF, label_B, margin, frozen=frozen)
                with region("step/backward"):
                    scaled(output.loss / self.plan.accumulation).backward()
            inputs.look_ahead()
            rows = len(label_B)
            sums[0] += output.loss.detach() * rows
            sums[1] += output.num_correct
            sums[2] += rows
            sums[3] += silent
        if frozen:  # no gradient, unlike one of zero: no momentum and no weight decay either
            self.task.embedder.zero_grad(set_to_none=True)
        self.at = None
        return sums

    def _reducing(self, *, now: bool) -> AbstractContextManager[None]:
        """Gradients are averaged over ranks in the last micro-batch only."""
        if now or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()

    def _begin(self, number: int) -> None:
        """Modes and generators for this rank's micro-batch `number`, counted over all steps.

        Dropout and dither draw from a generator seeded by what they are drawn for.
        """
        step, index = divmod(number, self.plan.accumulation)
        if index == 0:
            begin_training(self.modules)
            self.task.head.begin_step(self._key_of(step, HEAD_KEY))
            if step < self.frozen_steps:
                self.task.embedder.eval()  # BatchNorm keeps its statistics
        micro_batch = index * self.ranks.world_size + self.ranks.rank
        torch.manual_seed(self._key_of(step, micro_batch, DRAWS_KEY))

    def _key_of(self, *numbers: int) -> int:
        """63 bits that are those of this attempt and these numbers alone."""
        words = np.random.SeedSequence([self.seed, self.attempt, *numbers])
        return int(words.generate_state(1, np.uint64)[0]) >> 1


def begin_training(modules: Iterable[nn.Module]) -> None:
    """What `train()` of a module does to these, all that it has; only what is not so yet is set.

    To set a module's attribute takes microseconds, and it is done at each step.
    """
    for module in modules:
        if not module.training:
            module.training = True
