"""Rows of classes split over ranks: which rank has which, drawing and sampling.

Rank r of W has ceil(C / W) rows from r * ceil(C / W) on; the last ranks may have fewer or none.
Letters: C classes, D embedding, N rows of a rank, W ranks.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

# Rows handled at a time: 12 MB where an embedding has 192 values.
BLOCK_ROWS = 16384
# The multipliers and shifts of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, "mix64variant13").
GAMMA = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER, SECOND_MULTIPLIER = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Shards(Protocol):
    """This rank among the others, and collectives without gradients.

    All ranks call the same in the same order, with tensors of one shape. With one rank, they return
    their argument.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def max(self, values: Tensor) -> Tensor: ...

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate along the first axis, in the order of ranks."""
        ...


def blocks_of(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield (first, one after the last) of each block of rows."""
    for first in range(0, num_rows, BLOCK_ROWS):
        yield first, min(first + BLOCK_ROWS, num_rows)


def draw_rows(rows: tuple[int, int], *, num_classes: int, embed_dim: int) -> Tensor:
    """Return rows (N, D) of what `xavier_uniform_` draws for all classes, bit for bit."""
    first, last = rows
    bound = math.sqrt(3.0) * math.sqrt(2.0 / (num_classes + embed_dim))
    own_ND = torch.empty(last - first, embed_dim)
    for start, stop in blocks_of(num_classes):
        block = torch.empty(stop - start, embed_dim).uniform_(-bound, bound)
        low, high = max(start, first), min(stop, last)
        if low < high:
            own_ND[low - first : high - first] = block[low - start : high - start]
    return own_ND


def take_part(rows: tuple[int, int], *, key: int, share: float, device: torch.device) -> Tensor:
    """Draw classes first..last - 1 by `key`: booleans (N,), of which a `share` is true.

    Each is decided by a hash of the key and its number, so the draw is the same for any split of
    the rows, and on every device.
    """
    start = int(_mix(torch.tensor(_signed(key + GAMMA))))
    class_N = torch.arange(rows[0] + 1, rows[1] + 1, device=device)
    bits_N = _shifted(_mix(class_N * _signed(GAMMA) + start), 1)
    return bits_N < math.floor(share * 2.0**63)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64, which wrap around as unsigned integers do."""
    x = (x ^ _shifted(x, 30)) * _signed(FIRST_MULTIPLIER)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND_MULTIPLIER)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with 0; the shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned word, taken modulo 2^64."""
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word
