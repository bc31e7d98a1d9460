"""From crops to batches, read ahead by worker processes. In: a data set, an order. Out: `Batch`.

Letters: B rows of the batch, S samples, M masks.
"""

import signal
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from speakerlab import process
from speakerlab.batch import Batch, Crop
from speakerlab.data.dataset import TrainCrops
from speakerlab.data.sampler import MicroBatches

MAX_WORKERS = 8
MICRO_BATCHES_AHEAD = 4  # read ahead by each worker


def auto_workers(local_ranks: int) -> int:
    """Workers for each rank of this host: its share of the CPUs, one left for the rank itself."""
    return max(1, min(MAX_WORKERS, process.available_cpus() // local_ranks - 1))


def collate(crops: Sequence[Crop], *, num_speeds: int) -> Batch:
    """Stack crops; rows are padded to the longest, and the rows of each operation listed."""
    longest = max(len(crop.wave_S) for crop in crops)
    wave_BS = np.zeros((len(crops), longest), dtype=np.int16)
    for row, crop in zip(wave_BS, crops):
        row[: len(crop.wave_S)] = crop.wave_S
    with_room = [i for i, crop in enumerate(crops) if crop.room >= 0]
    with_noise = [i for i, crop in enumerate(crops) if crop.noise >= 0]
    return Batch(
        wave_BS=torch.from_numpy(wave_BS),
        label_B=_ints(crop.label for crop in crops),
        speed_rows=tuple(
            _ints(i for i, crop in enumerate(crops) if crop.speed == speed)
            for speed in range(num_speeds)
        ),
        room_rows=_ints(with_room),
        room_R=_ints(crops[i].room for i in with_room),
        noise_rows=_ints(with_noise),
        noise_N=_ints(crops[i].noise for i in with_noise),
        noise_start_N=_ints(crops[i].noise_start for i in with_noise),
        snr_db_N=torch.tensor([crops[i].snr_db for i in with_noise], dtype=torch.float32),
        mask_BM2=torch.from_numpy(np.stack([crop.mask_M2 for crop in crops])),
        position_B=_ints(crop.position for crop in crops),
        row_B=_ints(crop.row for crop in crops),
    )


def train_loader(
    crops: TrainCrops, order: MicroBatches, *, num_workers: int, pin_memory: bool
) -> DataLoader[Batch]:
    """One pass over `order`, in order, read ahead by `num_workers` processes (0: none)."""
    loader = DataLoader(
        crops,
        batch_sampler=order,
        num_workers=num_workers,
        collate_fn=partial(collate, num_speeds=len(crops.draws.speeds)),
        pin_memory=pin_memory,
        prefetch_factor=MICRO_BATCHES_AHEAD if num_workers else None,
        worker_init_fn=start_worker,
    )
    return cast("DataLoader[Batch]", loader)  # collate makes batches of crops


def start_worker(_worker: int) -> None:
    """A worker dies with its rank, ignores Ctrl-C (the rank handles it) and uses one thread."""
    process.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
