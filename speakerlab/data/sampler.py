"""Which utterance stands at which position of an epoch, and which positions a rank reads at a step.

In: the lengths of the utterances and a key (seed, attempt, epoch). Out: (epoch, position, row).
Everything is a function of its key: to resume is to start at another step.
Letters: N utterances, P positions of an epoch. G is the global batch.
"""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

BLOCK_ROWS = 4096  # consecutive rows, so that packed audio is read in long runs
WINDOW_BLOCKS = 8  # rows are shuffled within so many blocks

Slot = tuple[int, int, int]  # epoch, position, row
ORDER_KEY = 1 << 62  # stands where a sample's key has its position: no epoch is that long


class EpochOrder:
    """The global order of every epoch; the same for any number of ranks and workers.

    An utterance of d seconds gets floor(d / crop + u) slots an epoch, u uniform: the u of all
    utterances come from one draw by systematic sampling, so that an epoch's length does not vary.
    """

    def __init__(
        self,
        num_samples_N: np.ndarray,
        *,
        crop_samples: int,
        global_batch: int,
        seed: int,
        attempt: int = 0,
        epoch_samples: float | None = None,
    ) -> None:
        corpus_samples = float(num_samples_N.sum())
        scale = 1.0 if epoch_samples is None else epoch_samples / corpus_samples
        self.crops_end_N = np.cumsum(num_samples_N) * (scale / crop_samples)
        self.global_batch, self.key = global_batch, (seed, attempt)
        self.num_crops = int(self.crops_end_N[-1])
        self.steps_per_epoch = self.num_crops // global_batch
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"training.global_batch: an epoch must hold at least one batch, got "
                f"{self.num_crops} crops for {global_batch}; lower it or raise training.epoch_hours"
            )

    @property
    def num_dropped(self) -> int:
        """Crops of the incomplete last step, which is left out."""
        return self.num_crops % self.global_batch

    def rows(self, epoch: int) -> np.ndarray:
        """rows_P, int64: the row of the manifest at each position of this epoch."""
        rng = np.random.default_rng([*self.key, epoch, ORDER_KEY])
        ends_N = np.floor(self.crops_end_N + rng.random()).astype(np.int64)
        slots_N = np.diff(ends_N, prepend=0)
        num_rows = len(slots_N)
        num_blocks = -(-num_rows // BLOCK_ROWS)
        order: list[np.ndarray] = []
        blocks = rng.permutation(num_blocks)
        for first in range(0, num_blocks, WINDOW_BLOCKS):
            window = [
                np.arange(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, num_rows))
                for block in blocks[first : first + WINDOW_BLOCKS]
            ]
            rows = np.concatenate(window)
            order.append(rng.permutation(np.repeat(rows, slots_N[rows])))
        return np.concatenate(order)


class MicroBatches(Sampler[list[Slot]]):
    """The micro-batches of one rank from `start_step` to `stop_step`, counted over all epochs.

    Step k of an epoch takes positions [kG, (k + 1)G), cut into consecutive micro-batches;
    micro-batch m goes to rank m mod world size, at accumulation m div world size.
    """

    def __init__(
        self,
        order: EpochOrder,
        *,
        start_step: int,
        stop_step: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        assert order.global_batch % (micro_batch * world_size) == 0
        self.order, self.steps = order, range(start_step, stop_step)
        self.micro_batch = micro_batch
        self.numbers = range(rank, order.global_batch // micro_batch, world_size)

    def __len__(self) -> int:
        return len(self.steps) * len(self.numbers)

    def __iter__(self) -> Iterator[list[Slot]]:
        current, rows_P = -1, np.empty(0, dtype=np.int64)
        for step in self.steps:
            epoch, step_in_epoch = divmod(step, self.order.steps_per_epoch)
            if epoch != current:
                current, rows_P = epoch, self.order.rows(epoch)
            for number in self.numbers:
                first = step_in_epoch * self.order.global_batch + number * self.micro_batch
                positions = range(first, first + self.micro_batch)
                yield [(epoch, position, int(rows_P[position])) for position in positions]
