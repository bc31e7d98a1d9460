"""Crops, batches and draws, which pass from the data workers to training.

Letters: B rows of the batch, R rows that an augmentation changes, S samples, T frames, F mel bins.
Every random draw travels here; the modules that apply the draws are deterministic.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

ALIGNMENT = 256  # bytes; that of CUDA's memory

MISSING = -1  # in place of an element, where arrays of a batch have different lengths


class Draw(NamedTuple):
    """What one augmentation drew for one crop: numbers or arrays, by name.

    Crops of one `group` are changed together: the shapes of their values must be equal, but for
    the first axis, which is padded with `MISSING`. `apply` knows the group on the host, without
    waiting for a GPU.
    """

    values: Mapping[str, Any]  # int, float or numpy.ndarray
    group: int = 0


class Draws(NamedTuple):
    """The draws of one group of rows, stacked: each value has R rows."""

    rows: Tensor  # (R,) int64, rows of the batch, ascending
    values: dict[str, Tensor]
    group: int = 0

    def split(self, num_rows: int) -> "list[Draws]":
        """Return the same draws, `num_rows` at a time."""
        starts = range(0, len(self.rows), num_rows)
        pieces = [slice(start, start + num_rows) for start in starts]
        return [tree_map_only(Tensor, itemgetter(piece), self) for piece in pieces]


@dataclass(frozen=True, slots=True)
class Crop:
    """One training sample as read from disk, and everything that is to be done to it."""

    wave_S: np.ndarray  # int16; round(crop samples x speed) long, empty before it is read
    feats_TF: np.ndarray | None  # float32, stored features instead of the wave
    first: int  # sample of the utterance that the crop begins with
    label: int  # class, the speed's block included
    position: int  # slot in the epoch's global order
    row: int  # row of the manifest
    draws: Mapping[str, Draw]  # by the augmentation's name; only of those that change this crop


class Batch(NamedTuple):
    """One micro-batch. The loader lists the rows to change, so that a GPU waits for no index.

    Its tensors go to a GPU as one buffer: each copy takes microseconds, however small it is.
    """

    wave_BS: Tensor  # int16, rows padded with zeros to the longest
    feats_BTF: Tensor  # float32, stored features; (0, 0, 0) where they are made of the waves
    label_B: Tensor  # int64
    position_B: Tensor  # (B,) int64
    row_B: Tensor  # (B,) int64
    draws: Mapping[str, list[Draws]]  # by the augmentation's name

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on `device`; the copy does not block where the memory is pinned."""
        if self.label_B.device == device:
            return self
        tensors = [leaf for leaf in tree_leaves(self) if isinstance(leaf, Tensor)]
        is_packed = len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1
        packed = self if is_packed else self.pack()
        first = packed.label_B
        whole = first.view(torch.uint8).as_strided((first.untyped_storage().nbytes(),), (1,), 0)
        buffer = whole.to(device, non_blocking=True)
        return packed.map(lambda t: _view(buffer, int(t.storage_offset()) * t.element_size(), t))

    def pin_memory(self) -> "Batch":
        """Return the same batch in page-locked memory (called by torch's loader)."""
        return self.pack(pin=True)

    def pack(self, *, pin: bool = False) -> "Batch":
        """Return the same batch in one buffer, `pin`: of page-locked memory."""
        starts, total = list[int](), 0
        for leaf in tree_leaves(self):
            if isinstance(leaf, Tensor):
                starts.append(total)
                total += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT
        buffer, start = torch.empty(total, dtype=torch.uint8, pin_memory=pin), iter(starts)
        return self.map(lambda tensor: _view(buffer, next(start), tensor).copy_(tensor))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return tree_map_only(Tensor, function, self)


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the part of a buffer of bytes that holds a tensor `like` this one."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
