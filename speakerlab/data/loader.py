"""From crops to batches, read ahead by worker processes. In: a data set, an order. Out: `Batch`.

How many workers there are follows from the CPUs and the shared memory that this process may use.
Letters: B rows of the batch, S samples, M masks.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from speakerlab.core import process
from speakerlab.core.batch import Batch, Crop
from speakerlab.data.dataset import TrainCrops
from speakerlab.data.sampler import MicroBatches, Slot
from speakerlab.data.watchdog import SHARED_MEMORY, Board, Hop, Watch, free_shared_memory, watched

log = logging.getLogger(__name__)
MAX_WORKERS = 8
MICRO_BATCHES_AHEAD = 4  # read ahead by each worker
IN_FLIGHT = 1.5  # batches in shared memory for each that is read ahead: some are being taken out
NCCL_BYTES = 64 << 20  # of shared memory for each GPU of several on a host
TENSORS = 24  # in a batch; each takes whole pages
PAGE_BYTES = 4096


def auto_workers(local_ranks: int) -> int:
    """Workers for each rank of this host: its share of the CPUs, one left for the rank itself."""
    return max(1, min(MAX_WORKERS, process.available_cpus() // local_ranks - 1))


def batch_bytes(crops: TrainCrops, micro_batch: int) -> int:
    """Shared memory of one batch in which every crop is of the longest kind."""
    draws = crops.draws
    longest = max(map(draws.read_samples, range(len(draws.speeds))))
    noise = 0 if crops.noise_bank is None else draws.crop_samples
    frames = draws.crop_frames  # of stored features, which come instead of the waves
    wave = 4 * frames * crops.num_bins if frames else 2 * (longest + noise)
    row = wave + 8 * (12 + draws.num_masks)
    return micro_batch * row + TENSORS * PAGE_BYTES


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


def collate(crops: Sequence[Crop], *, num_speeds: int) -> Batch:
    """Stack crops; rows are padded to the longest, and the rows of each operation listed."""
    longest = max(len(crop.wave_S) for crop in crops)
    wave_BS = np.zeros((len(crops), longest), dtype=np.int16)
    for row, crop in zip(wave_BS, crops):
        row[: len(crop.wave_S)] = crop.wave_S
    with_room = [i for i, crop in enumerate(crops) if crop.room >= 0]
    noisy = [crop for crop in crops if crop.noises]
    cut = [crop.noise_S for crop in noisy if crop.noise_S is not None]
    feats = [crop.feats_TF for crop in crops if crop.feats_TF is not None]
    with_codec = [i for i, crop in enumerate(crops) if crop.codec >= 0]
    return Batch(
        wave_BS=torch.from_numpy(wave_BS),
        feats_BTF=torch.from_numpy(np.stack(feats) if feats else np.empty((0, 0, 0), "f4")),
        label_B=_ints(crop.label for crop in crops),
        speed_rows=tuple(
            _ints(i for i, crop in enumerate(crops) if crop.speed == speed)
            for speed in range(num_speeds)
        ),
        room_rows=_ints(with_room),
        room_R=_ints(crops[i].room for i in with_room),
        noise_rows=_ints(i for i, crop in enumerate(crops) if crop.noises),
        noise_V=_ints(noise for crop in noisy for noise in crop.noises),
        noise_start_V=_ints(start for crop in noisy for start in crop.noise_starts),
        noise_of_V=_ints(i for i, crop in enumerate(noisy) for _ in crop.noises),
        noise_NS=torch.from_numpy(np.stack(cut) if cut else np.empty((0, 0), dtype=np.int16)),
        snr_db_N=torch.tensor([crop.snr_db for crop in noisy], dtype=torch.float32),
        telephone_rows=_ints(i for i, crop in enumerate(crops) if crop.telephone),
        codec_rows=_ints(with_codec),
        codec_C=_ints(crops[i].codec for i in with_codec),
        mask_BM2=torch.from_numpy(np.stack([crop.mask_M2 for crop in crops])),
        position_B=_ints(crop.position for crop in crops),
        row_B=_ints(crop.row for crop in crops),
    )


class NotedCrops(Dataset[Crop]):
    """The crops, each noted on the board when its reading begins."""

    def __init__(self, crops: TrainCrops, board: Board) -> None:
        self.crops, self.board = crops, board

    def __getitem__(self, slot: Slot) -> Crop:
        self.board.note(Hop.READING, slot[2])
        return self.crops[slot]


def noted(crops: Sequence[Crop], *, make: Callable[[Sequence[Crop]], Batch], board: Board) -> Batch:
    """make(crops), noted on the board."""
    board.note(Hop.COLLATING)
    batch = make(crops)
    board.note(Hop.IDLE)
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

    A batch that does not come for `stall_seconds` is told, and why; a worker that died is a
    ValueError.
    """
    board = Board(num_workers)
    loader = DataLoader(
        NotedCrops(crops, board),
        batch_sampler=order,
        num_workers=num_workers,
        collate_fn=partial(
            noted, make=partial(collate, num_speeds=len(crops.draws.speeds)), board=board
        ),
        pin_memory=pin_memory,
        prefetch_factor=MICRO_BATCHES_AHEAD if num_workers else None,
        worker_init_fn=start_worker,
        # Forked, whatever Python's default: the columns of the manifest are shared, not copied.
        multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
    )
    manifest = crops.manifest
    watch = Watch(board, lambda row: f"{manifest.ids[row]} ({manifest.paths[row]})")
    batches = cast("DataLoader[Batch]", loader)  # collate makes batches of crops
    return watched(batches, watch, stall_seconds=stall_seconds)


def start_worker(_worker: int) -> None:
    """A worker dies with its rank, leaves signals to it and uses one thread."""
    process.die_with_parent()
    process.leave_signals_to_parent()
    torch.set_num_threads(1)


def _ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
