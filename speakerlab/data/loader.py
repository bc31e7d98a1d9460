"""From crops to batches, read ahead by worker processes. In: a data set, an order. Out: `Batch`.

How many workers there are follows from the CPUs and the shared memory that this process may use.
Letters: B rows of the batch, S samples.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from speakerlab.core import process
from speakerlab.core.batch import Batch, Crop, Draw, Draws
from speakerlab.data.dataset import TrainCrops
from speakerlab.data.sampler import MicroBatches, Slot
from speakerlab.data.watchdog import (
    POLL_SECONDS,
    SHARED_MEMORY,
    Board,
    Hop,
    Watch,
    free_shared_memory,
    watched,
)

log = logging.getLogger(__name__)
MAX_WORKERS = 8
MICRO_BATCHES_AHEAD = 4  # read ahead by each worker
IN_FLIGHT = 1.5  # batches in shared memory for each that is read ahead: some are being taken out
NCCL_BYTES = 64 << 20  # of shared memory for each GPU of several on a host
TENSORS = 48  # in a batch, at most; each takes whole pages
PAGE_BYTES = 4096
TRIED_CROPS = 100  # whose draws are looked at for their size
ROW_BYTES = 96  # of a row, beside its wave and draws


def auto_workers(local_ranks: int) -> int:
    """Workers for each rank of this host: its share of the CPUs, one left for the rank itself."""
    return max(1, min(MAX_WORKERS, process.available_cpus() // local_ranks - 1))


def batch_bytes(crops: TrainCrops, micro_batch: int) -> int:
    """Shared memory of one batch in which every crop is of the longest kind seen in a few."""
    frames = crops.crop_frames  # of stored features, which come instead of the waves
    wave = 4 * frames * crops.manifest.num_bins if frames else 2 * max(crops.read_samples)
    tried = [crops.draw((0, position, 0)).draws.values() for position in range(TRIED_CROPS)]
    drawn = [sum(np.asarray(v).nbytes for d in draws for v in d.values.values()) for draws in tried]
    return micro_batch * (wave + max(drawn) + ROW_BYTES) + TENSORS * PAGE_BYTES


def fit_workers(
    wanted: int,
    *,
    bytes_per_batch: int,
    local_ranks: int,
    is_fixed: bool,
    on_gpus: bool = False,
    folder: Path = SHARED_MEMORY,
) -> int:
    """How many of `wanted` workers a rank can have for what `folder` has left; 0: none at all.

    Raises ValueError where it has too little for all of them and their number is fixed.
    """
    fixed = NCCL_BYTES * local_ranks if on_gpus and local_ranks > 1 else 0
    each = round(local_ranks * MICRO_BATCHES_AHEAD * bytes_per_batch * IN_FLIGHT)
    free = free_shared_memory(folder)
    if wanted == 0 or free < 0 or fixed + wanted * each <= free:
        return wanted
    fitting = max(0, (free - fixed) // each)
    if is_fixed or fixed > free:
        need = -(-(fixed + wanted * each) >> 20)
        raise ValueError(
            f"runtime.num_workers: {wanted} for each of {local_ranks} ranks need {need} MiB "
            f"of {folder}, got {free >> 20} MiB free; enlarge it (docker run --shm-size="
            f"{2 * need}m, or --ipc=host) or lower runtime.num_workers (0 needs none)"
        )
    text = (
        "%d data workers a rank instead of %d: %s has %d MiB free, each needs %d (see --shm-size)"
    )
    log.info(text, fitting, wanted, folder, free >> 20, -(-each >> 20))
    return fitting


def collate(crops: Sequence[Crop]) -> Batch:
    """Stack crops; rows are padded to the longest, and the rows of each augmentation listed."""
    waves, feats, numbers = list[np.ndarray](), list[np.ndarray](), list[tuple[int, int, int]]()
    draws_of: dict[tuple[str, int], list[tuple[int, Draw]]] = {}
    for row, crop in enumerate(crops):
        waves.append(crop.wave_S)
        numbers.append((crop.label, crop.position, crop.row))
        feats += [] if crop.feats_TF is None else [crop.feats_TF]
        for name, draw in crop.draws.items():
            draws_of.setdefault((name, draw.group), []).append((row, draw))
    wave_BS = np.zeros((len(crops), max(map(len, waves))), dtype=np.int16)
    for padded_S, wave_S in zip(wave_BS, waves):
        padded_S[: len(wave_S)] = wave_S
    stacked: dict[str, list[Draws]] = {}
    for (name, group), drawn in sorted(draws_of.items(), key=itemgetter(0)):
        rows, draws = zip(*drawn)
        values: dict[str, torch.Tensor] = {}
        for key, value in draws[0].values.items():
            column = list(map(itemgetter(key), map(attrgetter("values"), draws)))
            is_array = isinstance(value, np.ndarray)  # floats become float32
            values[key] = torch.from_numpy(np.stack(column)) if is_array else torch.tensor(column)
        stacked.setdefault(name, []).append(Draws(torch.tensor(rows), values, group))
    label_B, position_B, row_B = torch.tensor(numbers).T.contiguous()
    return Batch(
        wave_BS=torch.from_numpy(wave_BS),
        feats_BTF=torch.from_numpy(np.stack(feats) if feats else np.empty((0, 0, 0), "f4")),
        label_B=label_B,
        position_B=position_B,
        row_B=row_B,
        draws=stacked,
    )


class NotedBatches(Dataset[Batch]):
    """Batches by their slots, made in a worker that notes on the board what it does."""

    def __init__(self, crops: TrainCrops, board: Board) -> None:
        self.crops, self.board = crops, board

    def __getitem__(self, slots: list[Slot]) -> Batch:
        worker, crops = cast(Any, get_worker_info()).id, list[Crop]()
        for slot in slots:
            self.board.note(worker, Hop.READING, slot[2])
            crops.append(self.crops[slot])
        self.board.note(worker, Hop.COLLATING)
        batch = collate(crops)
        self.board.note(worker, Hop.IDLE)
        return batch


def train_loader(
    crops: TrainCrops,
    order: MicroBatches,
    *,
    num_workers: int,
    pin_memory: bool,
    stall_seconds: float = 60.0,
) -> Iterator[Batch]:
    """One pass over `order`, in order, read ahead by `num_workers` processes (0: none).

    With workers, a warning says what delays a batch for `stall_seconds`, and one that died is a
    ValueError.
    """
    if not num_workers:
        for slots in order:
            batch = collate(list(map(crops.__getitem__, slots)))
            yield batch.pin_memory() if pin_memory else batch
        return
    board, manifest = Board(num_workers), crops.manifest
    loader = DataLoader(
        NotedBatches(crops, board),
        sampler=order,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=MICRO_BATCHES_AHEAD,
        timeout=min(POLL_SECONDS, stall_seconds),
        worker_init_fn=start_worker,
        # Forked, so that the columns of the manifest are shared and not copied.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    watch = Watch(board, lambda row: f"{manifest.ids[row]} ({manifest.paths[row]})")
    yield from watched(loader, watch, stall_seconds=stall_seconds)


def start_worker(_worker: int) -> None:
    """Have a worker die with its rank, leave signals to it and use one thread."""
    process.die_with_parent()
    process.leave_signals_to_parent()
    torch.set_num_threads(1)
