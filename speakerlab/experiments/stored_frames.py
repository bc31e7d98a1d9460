"""Computes the frames of a teacher for whole utterances, once, and keeps them beside the data.

There is a folder of files for each speed that the student hears. Which utterances a file holds
depends only on the data and the teacher. A finished file is used again while both are the same, so
a computation that was interrupted continues, on any number of ranks.

Letters: N utterances, B rows of a batch, S samples, D dimensions of an embedding, C channels of a
frame, T frames.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from speakerlab.core.atomic import check_writable
from speakerlab.core.windows import mean_of_windows, window_bounds
from speakerlab.data.manifest import Manifest, Piece, is_other_audio
from speakerlab.data.target_frames import (
    FrameFile,
    TargetFrames,
    join_frames,
    open_frames,
    write_frames,
)
from speakerlab.experiments.validation import num_readers
from speakerlab.inference.at_speed import at_speed
from speakerlab.inference.batches import embed_batches, group_pieces
from speakerlab.inference.extraction import chunk_bounds
from speakerlab.inference.workers import sharing_threads
from speakerlab.models.frames import FRAME_STEP, NotedFrames
from speakerlab.training.distributed import Ranks

log = logging.getLogger(__name__)
BYTES_OF_VALUE = 2  # float16


class WithFrames(nn.Module):
    """An embedder whose rows are an embedding and, after it, the frames behind it.

    One tensor, so that everything that embeds in batches also gets the frames.
    """

    def __init__(self, embedder: Any, noted: NotedFrames) -> None:
        super().__init__()
        self.embedder = embedder
        self.noted = noted
        self.sample_rate: int = embedder.sample_rate
        self.max_samples: int = embedder.max_samples
        self.embed_dim: int = embedder.embed_dim
        self.batch_key = embedder.batch_key
        self.vad = None  # as of the embedder

    def forward(self, wave_BS: Tensor) -> Tensor:
        emb_BD: Tensor = self.embedder(wave_BS)
        frames_BCT = self.noted.take()
        return torch.cat([emb_BD.float(), frames_BCT.float().flatten(1)], dim=1)


class StoredTargets(NamedTuple):
    """What a teacher has made of whole utterances, heard at one speed."""

    emb_ND: np.ndarray  # float32, of length 1
    frames: TargetFrames


@dataclass(frozen=True)
class FrameStore:
    """The files of one teacher's frames of one set of utterances, heard at one speed.

    embedder: `WithFrames` of the teacher at this speed. num_channels, crop_frames: of the frames of
    a crop. rows_of_files: the utterances of each file, in order. facts: what frames are made of.
    """

    folder: Path
    manifest: Manifest
    embedder: Any
    num_channels: int
    crop_frames: int
    rows_of_files: Sequence[Sequence[int]]
    facts: dict[str, Any]

    def path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"

    def read(self, number: int) -> FrameFile | None:
        """Return a finished file; None if it is missing, or of other utterances or weights."""
        file = open_frames(self.path(number))
        if file is None:
            return None
        file_facts = dict(file.facts)
        facts = dict(self.facts)
        # The audio is compared only where it is known.
        if is_other_audio(file_facts.pop("audio", None), facts.pop("audio", None)):
            return None
        return file if file_facts == facts else None

    def todo(self) -> list[int]:
        """Return the numbers of the files that are to be computed."""
        numbers = range(len(self.rows_of_files))
        return [number for number in numbers if self.read(number) is None]

    def bytes_of(self, numbers: Sequence[int], *, crop_samples: int) -> int:
        """Return how large some files will be, about: speed hardly changes it."""
        num_samples = 0
        for number in numbers:
            rows = self.rows_of_files[number]
            num_samples += int(self.manifest.num_samples_N[rows].sum())
        crop_bytes = BYTES_OF_VALUE * self.num_channels * self.crop_frames
        return num_samples * crop_bytes // crop_samples

    def compute(self, number: int, *, device: torch.device, **options: Any) -> None:
        """Compute and write a file; options: of `embed_batches`."""
        rows = self.rows_of_files[number]
        # What is longer than a window is embedded window by window, and the frames follow.
        windows: list[Piece] = []
        place_of_windows: list[int] = []  # in `rows`
        for place, row in enumerate(rows):
            num_samples = int(self.manifest.num_samples_N[row])
            bounds = window_bounds(num_samples, max_samples=self.embedder.max_samples)
            for first, end in bounds:
                windows.append(Piece(self.manifest, row, first, end - first))
                place_of_windows.append(place)

        batches = list(group_pieces(self.embedder, windows))
        embedded = embed_batches(
            self.embedder,
            windows,
            batches,
            device=device,
            **options,
        )
        emb_of_window: dict[int, np.ndarray] = {}
        frames_of_window: dict[int, np.ndarray] = {}
        for indices, values_BV in embedded:
            for index, values_V in zip(indices, values_BV):
                emb_D, frames_V = np.split(values_V, [self.embedder.embed_dim])
                frames_CT = frames_V.reshape(self.num_channels, -1)
                emb_of_window[index] = emb_D.copy()  # a view would keep the whole batch
                with np.errstate(over="ignore"):  # `write_frames` refuses it
                    frames_of_window[index] = frames_CT.astype(np.float16)

        embeddings: list[list[np.ndarray]] = [[] for _ in rows]
        frames: list[list[np.ndarray]] = [[] for _ in rows]
        for index, place in enumerate(place_of_windows):
            embeddings[place].append(emb_of_window[index])
            frames[place].append(frames_of_window[index])
        write_frames(
            self.path(number),
            [np.concatenate(parts, axis=1) for parts in frames],
            np.stack([mean_of_windows(parts) for parts in embeddings]),
            self.facts,
        )


def stored_frames(
    embedder: Any,
    manifest: Manifest,
    ranks: Ranks,
    *,
    folders: Mapping[float, Path],
    model_sha256: str,
    crop_samples: int,
) -> list[StoredTargets]:
    """Return embeddings and frames of whole utterances at each speed; ranks share the work.

    embedder: of the teacher, in PyTorch, which keeps silence. folders: speed -> where its files
    are. Raises ValueError where the disk is too small.
    """
    assert embedder.vad is None  # `teachers.check_frames` refuses it
    with embedder.noting_frames() as noted:
        # It may be there already, after the held-out utterances were embedded.
        embedder.eval().to(ranks.device)
        # A crop has as many samples at every speed, once it is played.
        crop_1S = torch.zeros(1, crop_samples, device=ranks.device)
        with torch.inference_mode():
            embedder(crop_1S)
        _, num_channels, crop_frames = noted.take().shape

        stores: list[FrameStore] = []
        for speed, folder in folders.items():
            store = _plan_store(
                WithFrames(at_speed(embedder, speed).to(ranks.device), noted),
                manifest,
                folder=folder,
                speed=speed,
                model_sha256=model_sha256,
                num_channels=num_channels,
                crop_frames=crop_frames,
            )
            stores.append(store)
        todo_of_stores = ranks.on_first(lambda: [store.todo() for store in stores])
        ranks.on_first(
            lambda: _check_space(stores, todo_of_stores, crop_samples=crop_samples)
        )
        for store, todo in zip(stores, todo_of_stores):
            if todo:
                _compute_share(store, todo, ranks)
    return [_read_store(store, ranks) for store in stores]


def _plan_store(
    with_frames: WithFrames,
    manifest: Manifest,
    *,
    folder: Path,
    speed: float,
    model_sha256: str,
    num_channels: int,
    crop_frames: int,
) -> FrameStore:
    """Divide the utterances into files."""
    # By length, because utterances of equal length are embedded together.
    rows = np.argsort(-manifest.num_samples_N, kind="stable")
    seconds = manifest.num_samples_N[rows] / manifest.sample_rate
    rows_of_files: list[list[int]] = []
    for first, end in chunk_bounds(seconds.tolist()):
        rows_of_files.append(rows[first:end].tolist())
    facts = {
        "model_sha256": model_sha256,
        "data_sha256": manifest.sha256(),
        "audio": manifest.audio_digest(),
        "precision": "fp32",
        "frame_step": FRAME_STEP,
    }
    # Files that earlier versions wrote have the original speed.
    if speed != 1.0:
        facts["speed"] = speed
    return FrameStore(
        folder=folder,
        manifest=manifest,
        embedder=with_frames,
        num_channels=num_channels,
        crop_frames=crop_frames,
        rows_of_files=rows_of_files,
        facts=facts,
    )


def _check_space(
    stores: Sequence[FrameStore],
    todo_of_stores: Sequence[Sequence[int]],
    *,
    crop_samples: int,
) -> None:
    """Raise ValueError if all files do not fit on the disk; else log how large they are."""
    num_bytes = 0
    for store, todo in zip(stores, todo_of_stores):
        num_bytes += store.bytes_of(todo, crop_samples=crop_samples)
    if not num_bytes:
        return

    for store in stores:
        check_writable(store.path(0))
        store.folder.mkdir(parents=True, exist_ok=True)
    # All of them are in one folder.
    folder = stores[0].folder
    needed_gb = num_bytes / 1e9
    free_gb = shutil.disk_usage(folder).free / 1e9
    if needed_gb > free_gb:
        raise ValueError(
            f"{folder}: the teacher's frames need {needed_gb:.3g} GB, and"
            f" {free_gb:.3g} GB are free; free some, or set augment.speeds=[1.0],"
            " distil.frame_weight=0 or distil.targets=crop"
        )
    log.info(
        "%s: the teacher embeds %d utterances at %d speeds; its frames take %.2f GB",
        folder,
        len(stores[0].manifest),
        len(stores),
        needed_gb,
    )


def _read_store(store: FrameStore, ranks: Ranks) -> StoredTargets:
    """Read what all ranks have written, but for the frames themselves."""
    files: list[FrameFile] = []
    for number in range(len(store.rows_of_files)):
        file = store.read(number)
        if file is None:
            raise ValueError(
                f"{store.path(number)}: rank {ranks.rank} cannot read the frames that a"
                " rank has written; let every host see the same data directories"
            )
        files.append(file)

    shape = (len(store.manifest), store.embedder.embed_dim)
    emb_ND = np.zeros(shape, dtype=np.float32)
    for file, rows in zip(files, store.rows_of_files):
        emb_ND[rows] = file.emb_UD
    norm_N1 = np.linalg.norm(emb_ND, axis=1, keepdims=True)
    return StoredTargets(
        emb_ND=emb_ND / np.maximum(norm_N1, 1e-12),
        frames=join_frames(
            files,
            store.rows_of_files,
            num_samples_N=store.manifest.num_samples_N,
            crop_frames=store.crop_frames,
        ),
    )


def _compute_share(store: FrameStore, todo: Sequence[int], ranks: Ranks) -> None:
    """Compute this rank's share of the files, and wait for the others."""
    with sharing_threads() as num_threads:
        for number in todo[ranks.rank :: ranks.world_size]:
            store.compute(
                number,
                device=ranks.device,
                num_workers=num_readers(store.embedder, ranks),
                num_threads=num_threads,
            )
    ranks.barrier(f"frames {store.folder.name}")
