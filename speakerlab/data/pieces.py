"""Stretches of recordings that are embedded whole. In: spans of them. Out: wave_S, int16, of each.

Letters: S samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.utils.data import Dataset

from speakerlab.data import audio
from speakerlab.data.manifest import Manifest

Span = tuple[int, int, int]  # index of a piece, first sample within it, number of samples


@dataclass(frozen=True)
class Piece:
    """A stretch of an audio file."""

    path: str
    start: int
    num_samples: int

    def read(self) -> np.ndarray:
        return audio.read(self.path, self.start, self.num_samples)


@dataclass(frozen=True)
class Stretch:
    """A stretch of an utterance, packed or not."""

    manifest: Manifest
    row: int
    start: int
    num_samples: int

    def read(self) -> np.ndarray:
        return self.manifest.read(self.row, self.start, self.num_samples)


class Pieces(Dataset[np.ndarray]):
    """wave_S, int16, of a span of a piece, which need not be read whole."""

    def __init__(self, pieces: Sequence[Piece | Stretch]) -> None:
        self.pieces = pieces

    def __getitem__(self, span: Span) -> np.ndarray:
        index, first, num_samples = span
        piece = self.pieces[index]
        return replace(piece, start=piece.start + first, num_samples=num_samples).read()
