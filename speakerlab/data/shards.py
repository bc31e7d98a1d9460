"""Shards: tar files of about a gigabyte that hold the utterances of a data directory.

`<data directory>/shards/` holds packed audio, `<data directory>/features/` stored features; each
has USTAR archives, which any tool opens, and `index.safetensors`. The codec says how an utterance
is stored:

- pcm: a member `<id>.wav` of 16-bit PCM. A stretch is one read of whole seconds.
- flac: members `<id>.000.flac`, `<id>.001.flac`, ... of 4 s each, decodable alone; two thirds of
  the size and several times the work. A stretch is one read of the members that hold it.
- fbank: a member `<id>.npy` of float32 log mel features, (T, F). A stretch is read by seconds.

Each second (pcm, fbank) or member (flac) is a block with a CRC-32, checked at every read.
Letters: N utterances, K blocks, S samples, T frames, F mel bins.
"""

import fcntl
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal
from urllib.parse import quote

import numpy as np

from speakerlab.core.reading import keys
from speakerlab.data import audio
from speakerlab.data.arrays import Strings, read_arrays, stable_hash, write_arrays

Codec = Literal["pcm", "flac", "fbank"]
FLAC_SECONDS = 4
MAX_NAME = 90  # of 100 bytes in a USTAR header; endings take the rest
INDEX = "index.safetensors"
WAVES, FEATURES = "shards", "features"  # folders in a data directory
MAX_OPEN = 64  # shards that a process keeps open
AGAIN = "and pack again (speakerlab pack)"
READERS = ".readers.lock"  # in the data directory, shared by the processes that read its shards


@dataclass(frozen=True)
class Layout:
    """How the utterances of a set of shards are laid out."""

    codec: Codec
    sample_rate: int
    block_units: int  # samples or frames in a block; the last of an utterance may have fewer
    unit_bytes: int  # of a sample or frame; 0 where blocks are compressed

    @classmethod
    def of_waves(cls, codec: Codec, *, sample_rate: int) -> "Layout":
        if codec == "flac":
            return cls(codec, sample_rate, FLAC_SECONDS * sample_rate, 0)
        return cls(codec, sample_rate, sample_rate, 2)

    @property
    def folder(self) -> str:
        return FEATURES if self.codec == "fbank" else WAVES


# Arrays and facts of the index.
ARRAYS = ("shard", "id", "shard_N", "start_N", "num_units_N", "block_N", "crc_K")
ARRAYS += ("block_start_K", "block_size_K")
KNOWN = keys(layout=Layout, sha256=str, facts=dict[str, Any])


class ShardWriter:
    """Appends utterances to a file that is a whole tar archive once `tar` is closed."""

    def __init__(self, file: BinaryIO, layout: Layout) -> None:
        self.file, self.layout = file, layout
        self.tar = tarfile.TarFile(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)
        self.start, self.num_units = list[int](), list[int]()  # first byte and length of each
        self.blocks: list[tuple[int, int, int]] = []  # first byte, size, CRC

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a reader needs of the utterances of a shard, in their order."""
        block_K3 = np.array(self.blocks, dtype=np.int64).reshape(-1, 3)
        return {
            "start": np.array(self.start, dtype=np.int64),
            "num_units": np.array(self.num_units, dtype=np.int64),
            "crc": block_K3[:, 2].astype(np.uint32),
            "block_start": block_K3[:, 0],
            "block_size": block_K3[:, 1].astype(np.int32),
        }

    def add(self, utterance: str, units: np.ndarray) -> None:
        """Add an utterance; units: wave_S, int16, or feats_TF, float32."""
        layout, name = self.layout, member_name(utterance)
        self.num_units.append(len(units))
        if layout.codec == "flac":
            for number, first in enumerate(range(0, len(units), layout.block_units)):
                block = units[first : first + layout.block_units]
                data = audio.encode(block, layout.sample_rate, "FLAC")
                at = self._member(f"{name}.{number:03d}.flac", data)
                self.start += [at] if number == 0 else []
                self.blocks.append((at, len(data), zlib.crc32(data)))
            return
        if layout.codec == "fbank":
            buffer, ending = io.BytesIO(), "npy"
            np.save(buffer, np.ascontiguousarray(units, "<f4"))
            content = buffer.getvalue()
        else:
            content, ending = audio.encode(units, layout.sample_rate, "WAV"), "wav"
        header = len(content) - len(units) * layout.unit_bytes
        at = self._member(f"{name}.{ending}", content)
        self.start.append(at + header)
        size = layout.block_units * layout.unit_bytes
        for begin in range(header, len(content), size):
            block = content[begin : begin + size]
            self.blocks.append((at + begin, len(block), zlib.crc32(block)))

    def _member(self, name: str, content: bytes) -> int:
        """Write a member; return the byte at which its content begins."""
        info = tarfile.TarInfo(name)  # no owner, no date: equal audio gives equal bytes
        info.size = len(content)
        first = self.file.tell() + tarfile.BLOCKSIZE
        self.tar.addfile(info, io.BytesIO(content))
        return first


def member_name(utterance: str) -> str:
    """Return the id as part of a file name, without its ending: unusual characters as %XX."""
    name = quote(utterance, safe=" +,=@")
    return name if len(name) <= MAX_NAME else f"{name[:60]}~{stable_hash(utterance):016x}"


@lru_cache(MAX_OPEN)
def open_shard(path: str) -> io.FileIO:
    """Open a shard; forked processes may share the file because `pread` leaves its position."""
    try:
        return io.FileIO(path)
    except OSError as error:
        raise FileNotFoundError(
            f"{path}: cannot be opened ({error.strerror}); restore it, or remove "
            f"{Path(path).parent} {AGAIN}"
        ) from None


def is_packed(folder: Path) -> bool:
    return any((folder / name).exists() for name in (WAVES, FEATURES))


@cache
def keep(folder: Path) -> IO[str] | None:
    """Keep the shards of a data directory from being replaced until this process ends."""
    for mode in ("a+", "r"):  # "r": of another user
        with suppress(OSError):
            file = (folder / READERS).open(mode)
            fcntl.lockf(file, fcntl.LOCK_SH)
            return file
    return None  # on a read-only file system


@contextmanager
def unread(folder: Path) -> Iterator[None]:
    """Refuse, with ValueError, to replace shards that another process reads; let none begin."""
    if not is_packed(folder):
        yield
        return
    with (folder / READERS).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"{folder}: a training or an extraction reads its shards, which would be replaced; "
                "wait until it has ended, or use another data directory"
            ) from None
        yield


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

    def cut_short(self) -> Iterator[Path]:
        """Return the shards that are missing, or smaller than what should be in them."""
        end_N = self.start_N + self.num_units_N * self.layout.unit_bytes
        least = np.zeros(len(self.shards), dtype=np.int64)
        np.maximum.at(least, self.shard_N, end_N)
        for name, size in zip(self.shards, least.tolist()):
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                yield path

    def read(self, row: int, first: int, count: int) -> np.ndarray:
        """Read wave_S, int16, or feats_TF, float32: `count` units from `first` on, in one read.

        Raises ValueError naming shard, utterance and byte where what is read is not what was
        written, FileNotFoundError where the shard is gone.
        """
        layout, path = self.layout, f"{self.folder}/{self.shards[self.shard_N[row]]}"
        num_units = int(self.num_units_N[row])
        assert 0 <= first <= first + count <= num_units
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
        shard = open_shard(path)  # held: another thread may open more than are kept open
        data = memoryview(os.pread(shard.fileno(), wanted, begin))
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
        arrays = {name: getattr(self, name) for name in ARRAYS[2:]}
        arrays |= {"shard": Strings.of(self.shards), "id": self.ids}
        known = {"layout": asdict(self.layout), "sha256": self.sha256, "facts": self.facts}
        write_arrays(self.folder / INDEX, arrays, known)


def read_packed(place: Path) -> Packed | None:
    """Return the shards in a folder of a data directory, or None where there are none."""
    if not (place / INDEX).exists():
        return None
    arrays, known = read_arrays(place / INDEX, ARRAYS, like=KNOWN)
    known["layout"] = Layout(**known["layout"])
    shards, ids = tuple(arrays.pop("shard")), arrays.pop("id")
    return Packed(folder=place, shards=shards, ids=ids, **known, **arrays)
