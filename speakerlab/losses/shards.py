"""Rows of classes split over ranks: which rank has which, drawing, sampling, gathering, resharding.

Rank r of W has ceil(C / W) rows from r * ceil(C / W) on; the last ranks may have fewer or none. No
rank ever needs all rows at once, except rank 0 in `gather_rows`.

Letters: C classes, D embedding, N rows of a rank, W ranks.
"""

import math
from collections.abc import Iterable, Iterator
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


def rows_of(rank: int, *, num_classes: int, world_size: int) -> tuple[int, int]:
    """Return the first row of a rank and the one after its last."""
    each = math.ceil(num_classes / world_size)
    return min(rank * each, num_classes), min((rank + 1) * each, num_classes)


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


def gather_rows(own: Tensor, *, num_classes: int, shards: Shards) -> Tensor | None:
    """Return all rows on rank 0, on the CPU; None on the others. Every rank must call it.

    They are gathered in blocks, of which W are held at a time.
    """
    own, world_size = own.detach(), shards.world_size
    whole = torch.empty(num_classes, *own.shape[1:], dtype=own.dtype) if shards.rank == 0 else None
    spans = [rows_of(r, num_classes=num_classes, world_size=world_size) for r in range(world_size)]
    for start, stop in blocks_of(spans[0][1]):
        padded = own.new_zeros(stop - start, *own.shape[1:])
        part = own[start:stop]
        padded[: len(part)] = part
        blocks = shards.gather(padded).chunk(world_size)
        for (first, last), block in zip(spans, blocks):
            num_rows = min(last - first, stop) - start
            if whole is not None and num_rows > 0:
                whole[first + start : first + start + num_rows] = block[:num_rows]
    return whole


def reshard(
    blocks: Iterable[tuple[int, Tensor]], *, rows: tuple[int, int], num_classes: int
) -> Tensor:
    """Return rows first..last - 1 from blocks (first row, rows) of any number of ranks.

    For weights and an optimizer's state. Only the overlap of a block is read, which matters for
    tensors mapped to a file. Raises ValueError if rows are missing or there are too many.
    """
    blocks = list(blocks)
    spans = sorted((start, start + len(part)) for start, part in blocks if len(part))
    edges = [0, *(edge for span in spans for edge in span), num_classes]
    if edges[::2] != edges[1::2]:
        found = ", ".join(f"{start} to {stop}" for start, stop in spans) or "none"
        raise ValueError(
            f"rows of the head: found {found}, not 0 to {num_classes}, each once; use a "
            "checkpoint of which every rank wrote its part"
        )
    first, last = rows
    own = blocks[0][1].new_empty(last - first, *blocks[0][1].shape[1:])
    for start, block in blocks:
        low, high = max(start, first), min(start + len(block), last)
        if low < high:
            own[low - first : high - first] = block[low - start : high - start]
    return own
