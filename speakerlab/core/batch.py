"""What passes between the packages: the crop a worker reads, the batch a loader hands to the task.

Letters: B rows of the batch, S samples, M masks, R rows with a room, N rows with noise, V
recordings that the noises are made of, P rows with the telephone's band, C rows with a codec,
T frames, F mel bins.
Every random draw travels here; the modules that apply them draw nothing themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

SILENCE_POWER = 1e-6  # -60 dBFS: an SNR to or of less than this means nothing
CODECS = ("mu-law", "A-law")  # what `codec` counts


@dataclass(frozen=True, slots=True)
class Crop:
    """One training sample as read from disk, and everything that is to be done to it."""

    wave_S: np.ndarray  # int16; round(crop samples x speed) long, empty before it is read
    feats_TF: np.ndarray | None  # float32, stored features instead of the wave
    first: int  # sample of the utterance that the crop begins with
    label: int  # class, the speed's block included
    speed: int  # index into the speeds
    room: int  # index into the rooms, -1 for none
    noises: tuple[int, ...]  # indices into the noises; several are summed (babble)
    noise_starts: tuple[int, ...]  # first sample taken from each, which wraps around at its end
    noise_S: np.ndarray | None  # int16, the noise itself, where the device does not hold them
    snr_db: float
    telephone: bool  # whether only the telephone's band is kept
    codec: int  # index into CODECS, -1 for none
    mask_M2: np.ndarray  # float32 uniforms in [0, 1): the width and the place of each mask
    position: int  # slot in the epoch's global order
    row: int  # row of the manifest


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch. Row lists are made by the loader, so that a GPU never waits for an index."""

    wave_BS: Tensor  # int16, rows padded with zeros to the longest
    feats_BTF: Tensor  # float32, stored features; (0, 0, 0) where they are made of the waves
    label_B: Tensor  # int64
    speed_rows: tuple[Tensor, ...]  # per speed: int64 rows of the batch that have it
    room_rows: Tensor  # (R,) int64 rows of the batch
    room_R: Tensor  # (R,) int64 index of the room
    noise_rows: Tensor  # (N,) int64 rows of the batch
    noise_V: Tensor  # (V,) int64 index of a recording
    noise_start_V: Tensor  # (V,) int64
    noise_of_V: Tensor  # (V,) int64, which of the N the recording is a part of
    noise_NS: Tensor  # (N, S) int16 where the workers cut the noise, (0, 0) where the device does
    snr_db_N: Tensor  # (N,) float32
    telephone_rows: Tensor  # (P,) int64 rows of the batch
    codec_rows: Tensor  # (C,) int64 rows of the batch
    codec_C: Tensor  # (C,) int64 index into CODECS
    mask_BM2: Tensor  # (B, M, 2) float32 uniforms in [0, 1)
    position_B: Tensor  # (B,) int64
    row_B: Tensor  # (B,) int64

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; copies do not block where the memory is pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory (called by the loader)."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            is_tuple = isinstance(value, tuple)
            changed[field.name] = tuple(map(function, value)) if is_tuple else function(value)
        return Batch(**changed)
