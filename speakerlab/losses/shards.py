"""Rows of classes that are split over ranks: their initial values, and the sampling of classes.

Rank r of W holds ceil(C / W) rows from r * ceil(C / W) on; the last ranks may hold fewer or none.
With C = 10 and W = 4 the ranks hold 3, 3, 3 and 1 rows.
Letters: C classes, D embedding, N rows of a rank, S rows of a block, W ranks.
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
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB


class Shards(Protocol):
    """This rank's number, and collectives over all ranks; gradients do not pass through them.

    All ranks must call the same collectives in the same order, with tensors of one shape. With a
    single rank, a collective returns its argument.
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


def draw_rows(
    row_range: tuple[int, int],
    *,
    num_classes: int,
    embed_dim: int,
) -> Tensor:
    """Return the rows (N, D) of a range that `xavier_uniform_` would draw, bit for bit.

    row_range: the first row, and the one after the last. All classes are drawn, so that the
    generator advances as for an unsplit head, but only one block of them is held at a time.
    """
    first_row, end_row = row_range
    # Glorot's bound, with its products in the order of torch.
    deviation = math.sqrt(2.0 / (num_classes + embed_dim))
    bound = math.sqrt(3.0) * deviation

    rows_ND = torch.empty(end_row - first_row, embed_dim)
    for start, stop in blocks_of(num_classes):
        block_SD = torch.empty(stop - start, embed_dim)
        block_SD.uniform_(-bound, bound)

        # Copy the overlap of this block and the range.
        overlap_start = max(start, first_row)
        overlap_end = min(stop, end_row)
        if overlap_start < overlap_end:
            drawn_SD = block_SD[overlap_start - start : overlap_end - start]
            rows_ND[overlap_start - first_row : overlap_end - first_row] = drawn_SD
    return rows_ND


def sample_classes(
    class_range: tuple[int, int],
    *,
    key: int,
    share: float,
    device: torch.device,
) -> Tensor:
    """Draw classes by `key`; return booleans (N,), of which about a `share` is true.

    class_range: the first class, and the one after the last. Each class is decided by a hash of the
    key and the number of the class, so the draw is the same for any split of the rows, and on every
    device.
    """
    # SplitMix64: output n of a generator is mix(seed + n * GAMMA). Here n is the class, counted
    # from 1, and the seed is itself the first output of a generator seeded with the key.
    first_state = torch.tensor(_signed(key + GAMMA))
    seed = int(_mix(first_state))

    first_class, end_class = class_range
    number_N = torch.arange(first_class + 1, end_class + 1, device=device)
    state_N = number_N * _signed(GAMMA) + seed
    hash_N = _mix(state_N)

    # 63 bits, so that the comparison of signed integers is one of unsigned integers.
    uniform_N = _shift_right(hash_N, 1)
    return uniform_N < math.floor(share * 2.0**63)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64; its products wrap around as unsigned ones do."""
    x = x ^ _shift_right(x, 30)
    x = x * _signed(FIRST_MULTIPLIER)
    x = x ^ _shift_right(x, 27)
    x = x * _signed(SECOND_MULTIPLIER)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with 0; the shift of int64 copies the sign."""
    kept_bits = 64 - bits
    mask = (1 << kept_bits) - 1
    return (x >> bits) & mask


def _signed(bits: int) -> int:
    """Return the int64 with the lowest 64 bits of a number; torch has no arithmetic on uint64."""
    bits %= 1 << 64
    is_negative = bits >> 63
    return bits - (1 << 64) if is_negative else bits
