"""Crops, batches and draws, which pass from the data workers to training.

Letters: B rows of the batch, R rows that an augmentation changes, S samples, T frames (of features,
of a teacher or of a segmentation network; each has its own rate), F mel bins, D dimensions of a
teacher, C channels of its frames, K local speakers.

Every random draw travels here; the modules that apply the draws are deterministic.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

ALIGNMENT = 256  # bytes; the alignment of CUDA's memory

MISSING = -1  # in place of an element, where arrays of a batch have different lengths


class Draw(NamedTuple):
    """Random values of one augmentation for one crop: numbers or arrays, by name.

    Crops of one `group` are changed together: the shapes of their values must be equal except for
    the first axis, which is padded with `MISSING`. The group is a number on the host, so `apply`
    reads it without waiting for a GPU.
    """

    values: Mapping[str, Any]  # int, float or numpy.ndarray
    group: int = 0


class Draws(NamedTuple):
    """The draws of one group of rows, stacked: each value has R rows."""

    rows: Tensor  # (R,) int64, rows of the batch, ascending
    values: dict[str, Tensor]
    group: int = 0


class PlacedTurn(NamedTuple):
    """Part of an utterance at a place of a simulated conversation; times in samples."""

    row: int
    first: int  # in the utterance
    num_samples: int
    start: int  # in the window; may be negative
    speaker: int  # from 0, in the window
    gain_db: float


@dataclass(frozen=True, slots=True)
class Crop:
    """Training sample as read from disk, and the draws of all its augmentations."""

    # int16; round(crop samples x speed) long, empty before it is read.
    wave_S: np.ndarray
    feats_TF: np.ndarray | None  # float32, stored features instead of the wave
    first: int  # sample of the utterance that the crop begins with
    label: int  # class, the speed's block included
    position: int  # slot in the epoch's global order
    row: int  # row of the manifest
    # By the augmentation's name; an augmentation that does not change this crop has no draw.
    draws: Mapping[str, Draw]
    # float32, a teacher's embedding of the utterance; None without a stored one.
    target_D: np.ndarray | None = None
    # float16, a teacher's frames of the crop; None before they are read, and without stored ones.
    target_CT: np.ndarray | None = None
    # int8, who speaks in each output frame of a segmentation network; None for other tasks.
    speech_KT: np.ndarray | None = None
    # Of a simulated conversation (data/conversations.py); none of a crop of one utterance.
    turns: tuple[PlacedTurn, ...] = ()


class Batch(NamedTuple):
    """Micro-batch. The loader lists the rows to change, so that no index comes from the GPU.

    Its tensors go to a GPU as one buffer: even the smallest copy takes microseconds.
    """

    wave_BS: Tensor  # int16, rows padded with zeros to the longest
    # float32, stored features; (0, 0, 0) where features are computed from the waves.
    feats_BTF: Tensor
    label_B: Tensor  # int64
    position_B: Tensor  # (B,) int64
    row_B: Tensor  # (B,) int64
    draws: Mapping[str, list[Draws]]  # by the augmentation's name
    # float32, embeddings of a teacher (training/distillation.py); None without a teacher.
    target_BD: Tensor | None = None
    # Frames of a teacher, float16 where they are stored; None unless `distil.frame_weight` is set.
    target_BCT: Tensor | None = None
    # int8, who speaks in each frame (data/conversations.py); None unless the task is segmentation.
    speech_BKT: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on `device`; the copy does not block where the memory is pinned."""
        if self.label_B.device == device:
            return self
        packed = self if self._is_packed() else self.pack()

        # The bytes of the whole buffer; every tensor is a view of it.
        label_B = packed.label_B
        num_bytes = label_B.untyped_storage().nbytes()
        label_bytes = label_B.view(torch.uint8)
        host_buffer = label_bytes.as_strided(
            size=(num_bytes,),
            stride=(1,),
            storage_offset=0,
        )
        buffer = host_buffer.to(device, non_blocking=True)

        def find_in_buffer(tensor: Tensor) -> Tensor:
            first_element = int(tensor.storage_offset())
            start = first_element * tensor.element_size()
            return _view(buffer, start, tensor)

        return packed.map(find_in_buffer)

    def _is_packed(self) -> bool:
        """Return whether all tensors lie in one buffer."""
        buffers: set[int] = set()
        for leaf in tree_leaves(self):
            if isinstance(leaf, Tensor):
                buffers.add(leaf.untyped_storage()._cdata)
        return len(buffers) == 1

    def pin_memory(self) -> "Batch":
        """Return the same batch in page-locked memory (called by torch's loader)."""
        return self.pack(pin=True)

    def pack(self, *, pin: bool = False) -> "Batch":
        """Return the same batch in one buffer; pin: in page-locked memory."""
        starts: list[int] = []
        num_bytes = 0
        for leaf in tree_leaves(self):
            if isinstance(leaf, Tensor):
                starts.append(num_bytes)
                aligned_blocks = -(-leaf.nbytes // ALIGNMENT)  # rounded up
                num_bytes += aligned_blocks * ALIGNMENT
        buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)

        # `map` visits the tensors in the same order as the loop above.
        next_start = iter(starts)

        def copy_to_buffer(tensor: Tensor) -> Tensor:
            place = _view(buffer, next(next_start), tensor)
            return place.copy_(tensor)

        return self.map(copy_to_buffer)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return tree_map_only(Tensor, function, self)


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the part of a buffer of bytes that holds a tensor `like` this one."""
    end = start + like.nbytes
    elements = buffer[start:end].view(like.dtype)
    return elements.view(like.shape)
