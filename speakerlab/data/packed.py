"""The index of a data directory's shards. In: rows of its columns. Out: stretches of them.

`<data directory>/shards/` holds packed audio, `<data directory>/features/` stored features; each
has its tar files and `index.safetensors`. The index is mapped, so processes of a host share it.
Letters: N utterances, K blocks, S samples, T frames, F mel bins.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from speakerlab.data.arrays import map_arrays, write_arrays
from speakerlab.data.columns import Strings
from speakerlab.data.shards import Layout, Place, read_units

INDEX = "index.safetensors"
Kind = Literal["waves", "features"]
FOLDERS: dict[Kind, str] = {"waves": "shards", "features": "features"}


@dataclass(frozen=True, eq=False)
class Packed:
    """Where every utterance of a data directory lies in its shards, in the order of the columns."""

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

    def num_units(self, row: int) -> int:
        """Samples, or frames, of an utterance."""
        return int(self.num_units_N[row])

    def cut_short(self) -> Iterator[Path]:
        """Shards that are not there, or smaller than what should be in them."""
        end_N = self.start_N + self.num_units_N * self.layout.unit_bytes
        least = np.zeros(len(self.shards), dtype=np.int64)
        np.maximum.at(least, self.shard_N, end_N)
        for name, size in zip(self.shards, least.tolist()):
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                yield path

    def read(self, row: int, first: int, count: int) -> np.ndarray:
        """wave_S, int16, or feats_TF, float32: `count` units from unit `first`."""
        blocks = slice(int(self.block_N[row]), int(self.block_N[row + 1]))
        place = Place(
            path=f"{self.folder}/{self.shards[self.shard_N[row]]}",
            utterance=self.ids[row],
            start=int(self.start_N[row]),
            num_units=int(self.num_units_N[row]),
            crc_K=self.crc_K[blocks],
            block_start_K=self.block_start_K[blocks],
            block_size_K=self.block_size_K[blocks],
        )
        return read_units(place, self.layout, first, count)

    def write(self) -> None:
        """The index, whole or not at all."""
        names = ("shard_N", "start_N", "num_units_N", "block_N", "crc_K")
        arrays = {name: getattr(self, name) for name in (*names, "block_start_K", "block_size_K")}
        arrays |= Strings.of(self.shards).arrays("shard") | self.ids.arrays("id")
        known = {"layout": asdict(self.layout), "sha256": self.sha256, "facts": self.facts}
        write_arrays(self.folder / INDEX, arrays, known)


def read_packed(folder: Path, kind: Kind) -> Packed | None:
    """The shards of a data directory, or None where there are none (any more, or yet)."""
    place = folder / FOLDERS[kind]
    if not (place / INDEX).exists():
        return None
    arrays, known = map_arrays(place / INDEX)
    values: dict[str, Any] = known
    strings = {name: Strings.from_arrays(arrays, name) for name in ("id", "shard")}
    for name in ("id", "shard"):
        del arrays[f"{name}.blob"], arrays[f"{name}.ends"]
    return Packed(
        folder=place,
        layout=Layout(**values["layout"]),
        sha256=values["sha256"],
        facts=values["facts"],
        shards=tuple(strings["shard"]),
        ids=strings["id"],
        **arrays,
    )
