"""Reading packed audio and stored features: stretches of utterances from the shards of a directory.

`<data directory>/shards/` holds packed audio, `<data directory>/features/` stored features; each
has its tar files and `index.safetensors`. The index is mapped, so processes of a host share it.
Letters: N utterances, K blocks, S samples, T frames, F mel bins.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from speakerlab.data import audio
from speakerlab.data.arrays import Strings, map_arrays, write_arrays
from speakerlab.data.shards import Layout

INDEX = "index.safetensors"
Kind = Literal["waves", "features"]
FOLDERS: dict[Kind, str] = {"waves": "shards", "features": "features"}
MAX_OPEN = 64  # shards that a process keeps open
AGAIN = "and pack again (speakerlab pack)"


class OpenShard:
    """A file that is closed when nobody refers to it."""

    def __init__(self, path: str) -> None:
        self.handle = -1
        try:
            self.handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise FileNotFoundError(
                f"{path}: cannot be opened ({error.strerror}); restore it, or remove "
                f"{Path(path).parent} {AGAIN}"
            ) from None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # no `os` at exit
        if self.handle >= 0:
            close(self.handle)


open_shard = lru_cache(MAX_OPEN)(OpenShard)  # forked processes may share a handle: pread moves none


@dataclass(frozen=True, eq=False)
class Packed:
    """Position of every utterance in the shards of a data directory, in the order of columns."""

    folder: Path
    layout: Layout
    sha256: str  # of the columns that it belongs to
    facts: dict[str, Any]  # how it was made
    shards: tuple[str, ...]  # file names
    ids: Strings
    shard_N: np.ndarray  # int32
    start_N: np.ndarray  # int64, first byte in the shard
    num_units_N: np.ndarray  # int64, samples or frames
    block_N: np.ndarray  # int64, N + 1: where the blocks of each utterance begin
    crc_K: np.ndarray  # uint32
    block_start_K: np.ndarray  # int64; both empty where blocks are not compressed
    block_size_K: np.ndarray  # int32

    def __len__(self) -> int:
        return len(self.start_N)

    def cut_short(self) -> Iterator[Path]:
        """Shards that are missing, or smaller than what should be in them."""
        end_N = self.start_N + self.num_units_N * self.layout.unit_bytes
        least = np.zeros(len(self.shards), dtype=np.int64)
        np.maximum.at(least, self.shard_N, end_N)
        for name, size in zip(self.shards, least.tolist()):
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                yield path

    def read(self, row: int, first: int, count: int) -> np.ndarray:
        """wave_S, int16, or feats_TF, float32: `count` units from unit `first`, in one read.

        Raises ValueError naming shard, utterance and byte where what is read is not what was
        written, FileNotFoundError where the shard is gone.
        """
        layout, path = self.layout, f"{self.folder}/{self.shards[self.shard_N[row]]}"
        num_units = int(self.num_units_N[row])
        if not 0 <= first <= first + count <= num_units:
            raise ValueError(
                f"{path}: {self.ids[row]} has {num_units} units, got {first} to {first + count}; "
                "run stage 2 again"
            )
        blocks = range(first // layout.block_units, -(-(first + count) // layout.block_units))
        block_K = np.arange(blocks.start, blocks.stop) + int(self.block_N[row])
        if layout.codec == "flac":
            starts, sizes = self.block_start_K[block_K], self.block_size_K[block_K]
        else:
            size = layout.block_units * layout.unit_bytes
            begin_K = np.arange(blocks.start, blocks.stop) * size
            sizes = np.minimum(num_units * layout.unit_bytes - begin_K, size)
            starts = int(self.start_N[row]) + begin_K
        if not len(starts):
            is_fbank = layout.codec == "fbank"
            return np.empty((0, layout.unit_bytes // 4), "<f4") if is_fbank else np.empty(0, "<i2")
        begin, wanted = int(starts[0]), int(starts[-1] + sizes[-1] - starts[0])
        data = memoryview(os.pread(open_shard(path).handle, wanted, begin))
        if len(data) < wanted:
            raise ValueError(
                f"{path}: ends early, after {len(data)} of {wanted} bytes at byte {begin}; remove "
                f"{self.folder} {AGAIN}"
            )
        parts = []
        for block, at, size in zip(block_K.tolist(), starts.tolist(), sizes.tolist()):
            parts.append(data[at - begin : at - begin + size])
            if zlib.crc32(parts[-1]) != self.crc_K[block]:
                raise ValueError(
                    f"{path}: the checksum is wrong for {self.ids[row]} at byte {at}; check the "
                    f"disk, remove {self.folder} {AGAIN}"
                )
        if layout.codec == "flac":
            units = np.concatenate(list(map(audio.from_flac, parts)))
        elif layout.codec == "fbank":
            units = np.frombuffer(data, "<f4").reshape(-1, layout.unit_bytes // 4)
        else:
            units = np.frombuffer(data, "<i2")
        offset = first - blocks.start * layout.block_units
        return units[offset : offset + count]

    def write(self) -> None:
        """Write the index atomically."""
        names = ("shard_N", "start_N", "num_units_N", "block_N", "crc_K")
        arrays = {name: getattr(self, name) for name in (*names, "block_start_K", "block_size_K")}
        arrays |= {"shard": Strings.of(self.shards), "id": self.ids}
        known = {"layout": asdict(self.layout), "sha256": self.sha256, "facts": self.facts}
        write_arrays(self.folder / INDEX, arrays, known)


def read_packed(folder: Path, kind: Kind) -> Packed | None:
    """Return the shards of a data directory, or None where there are none."""
    place = folder / FOLDERS[kind]
    if not (place / INDEX).exists():
        return None
    arrays, known = map_arrays(place / INDEX)
    known["layout"] = Layout(**known["layout"])
    shards, ids = tuple(arrays.pop("shard")), arrays.pop("id")
    return Packed(folder=place, shards=shards, ids=ids, **known, **arrays)
