"""Shards: tar files of about a gigabyte that hold the utterances of a data directory.

`<data directory>/shards/` holds packed audio, `<data directory>/features/` stored features; each
has USTAR archives, which any tool opens, and `index.safetensors`. The codec determines how an
utterance is stored:

- pcm: a member `<id>.wav` of 16-bit PCM. A stretch is one read of whole seconds.
- flac: members `<id>.000.flac`, `<id>.001.flac`, ... of 4 s each, decodable alone; two thirds of
  the size and several times the work. A stretch is one read of the members that hold it.
- fbank: a member `<id>.npy` of float32 log mel features, (T, F). A stretch is read by seconds.

Each second (pcm, fbank) or member (flac) is a block with a CRC-32, checked at every read.
The archives and the index may be in an object store instead, see remote.py.
Letters: N utterances, K blocks, S samples, T frames, F mel bins.
"""

import io
import os
import tarfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal
from urllib.parse import quote

import numpy as np

from speakerlab.core.locks import share_lock, try_lock
from speakerlab.core.reading import keys
from speakerlab.data import audio
from speakerlab.data.arrays import Strings, read_arrays, stable_hash, write_arrays
from speakerlab.data.remote import ATTEMPTS, RemoteShards, read_reference

Codec = Literal["pcm", "flac", "fbank"]
FLAC_SECONDS = 4
MAX_NAME = 90  # of 100 bytes in a USTAR header; endings take the rest
INDEX = "index.safetensors"
WAVES, FEATURES = "shards", "features"  # folders in a data directory
MAX_OPEN = 64  # shards that a process keeps open
AGAIN = "and pack again (speakerlab pack)"
# Lock in the data directory, shared by the processes that read its shards.
READERS = ".readers.lock"
_seek_and_read = threading.Lock()  # where a read needs these two calls


@dataclass(frozen=True)
class Layout:
    """How the utterances of a set of shards are laid out."""

    codec: Codec
    sample_rate: int
    # Samples or frames in a block; the last block of an utterance may have fewer.
    block_units: int
    unit_bytes: int  # of a sample or frame; 0 where blocks are compressed

    @classmethod
    def of_waves(cls, codec: Codec, *, sample_rate: int) -> "Layout":
        """Return the layout of packed audio: blocks of 4 s for FLAC, of 1 s for PCM."""
        if codec == "flac":
            return cls(
                codec=codec,
                sample_rate=sample_rate,
                block_units=FLAC_SECONDS * sample_rate,
                unit_bytes=0,
            )
        return cls(
            codec=codec,
            sample_rate=sample_rate,
            block_units=sample_rate,
            unit_bytes=2,
        )

    @property
    def folder(self) -> str:
        return FEATURES if self.codec == "fbank" else WAVES


# Arrays of `Packed` that the index holds under the same names.
COLUMNS = (
    "shard_N",
    "start_N",
    "num_units_N",
    "block_N",
    "crc_K",
    "block_start_K",
    "block_size_K",
)
# All arrays and facts of the index.
ARRAYS = ("shard", "id", *COLUMNS)
FACTS = keys(layout=Layout, sha256=str, facts=dict[str, Any])
# First byte, size in bytes, and CRC of a block.
BlockPlace = tuple[int, int, int]


class ShardWriter:
    """Appends utterances to a file that is a whole tar archive once `tar` is closed."""

    def __init__(self, file: BinaryIO, layout: Layout) -> None:
        self.file = file
        self.layout = layout
        self.tar = tarfile.TarFile(
            fileobj=file,
            mode="w",
            format=tarfile.USTAR_FORMAT,
        )
        # Of each utterance: its first byte, and its samples or frames.
        self.start: list[int] = []
        self.num_units: list[int] = []
        # Of each block: its first byte, its size in bytes and its CRC.
        self.block_start: list[int] = []
        self.block_size: list[int] = []
        self.crc: list[int] = []

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a reader of the shard needs, in the order of the utterances."""
        return {
            "start": np.array(self.start, np.int64),
            "num_units": np.array(self.num_units, np.int64),
            "crc": np.array(self.crc, np.uint32),
            "block_start": np.array(self.block_start, np.int64),
            "block_size": np.array(self.block_size, np.int32),
        }

    def add(self, utterance: str, units: np.ndarray) -> None:
        """Add an utterance; units: wave_S, int16, or feats_TF, float32."""
        name = member_name(utterance)
        num_units = len(units)
        self.num_units.append(num_units)
        if self.layout.codec == "flac":
            self._add_flac(name, units)
        elif self.layout.codec == "fbank":
            feats_TF = np.ascontiguousarray(units, "<f4")
            buffer = io.BytesIO()
            np.save(buffer, feats_TF)
            content = buffer.getvalue()
            self._add_uncompressed(f"{name}.npy", content, num_units)
        else:
            content = audio.encode(units, self.layout.sample_rate, "WAV")
            self._add_uncompressed(f"{name}.wav", content, num_units)

    def _add_flac(self, name: str, wave_S: np.ndarray) -> None:
        """Add an utterance as FLAC members of one block each."""
        sample_rate = self.layout.sample_rate
        block_samples = self.layout.block_units
        first_samples = range(0, len(wave_S), block_samples)
        for number, first in enumerate(first_samples):
            block_S = wave_S[first : first + block_samples]
            content = audio.encode(block_S, sample_rate, "FLAC")
            start = self._write_member(f"{name}.{number:03d}.flac", content)
            if number == 0:
                self.start.append(start)
            self._note_block(start, content)

    def _add_uncompressed(self, member: str, content: bytes, num_units: int) -> None:
        """Add an utterance as one member: a header, then units of equal size."""
        unit_bytes = self.layout.unit_bytes
        block_bytes = self.layout.block_units * unit_bytes
        num_bytes = len(content)
        header_bytes = num_bytes - num_units * unit_bytes
        start = self._write_member(member, content)
        # Readers skip the header: the layout has the same facts.
        self.start.append(start + header_bytes)
        for offset in range(header_bytes, num_bytes, block_bytes):
            block = content[offset : offset + block_bytes]
            self._note_block(start + offset, block)

    def _note_block(self, start: int, block: bytes) -> None:
        """Keep the place and the checksum of a block, for the index."""
        self.block_start.append(start)
        self.block_size.append(len(block))
        self.crc.append(zlib.crc32(block))

    def _write_member(self, name: str, content: bytes) -> int:
        """Write a member; return the byte at which its content begins."""
        info = tarfile.TarInfo(name)  # no owner, no date: equal audio has equal bytes
        info.size = len(content)
        # The header of a member in USTAR is one block.
        first = self.file.tell() + tarfile.BLOCKSIZE
        self.tar.addfile(info, io.BytesIO(content))
        return first


def member_name(utterance: str) -> str:
    """Return the id as part of a file name, without its ending: unusual characters as %XX."""
    name = quote(utterance, safe=" +,=@")
    if len(name) <= MAX_NAME:
        return name
    # The hash distinguishes long ids that begin alike.
    return f"{name[:60]}~{stable_hash(utterance):016x}"


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


def read_range(file: io.FileIO, start: int, num_bytes: int) -> bytes:
    """Return a range of a shard, less where it ends early; threads may share the file."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), num_bytes, start)
    with _seek_and_read:  # on Windows, where each process has a file of its own
        file.seek(start)
        return file.read(num_bytes)


def is_packed(folder: Path) -> bool:
    waves = folder / WAVES
    features = folder / FEATURES
    return waves.exists() or features.exists()


@cache
def hold_shards(folder: Path) -> IO[str] | None:
    """Keep the shards of a data directory from being replaced until this process ends."""
    # The cache keeps the file open, and thereby the lock. A shared lock needs no right to write:
    # "r" opens the file of another user.
    for mode in ("a+", "r"):
        with suppress(OSError):
            file = (folder / READERS).open(mode)
            share_lock(file)
            return file
    return None  # on a read-only file system


@contextmanager
def without_readers(folder: Path) -> Iterator[None]:
    """Raise ValueError if another process reads the shards; else keep readers out in the block."""
    if not is_packed(folder):
        yield
        return
    lock = folder / READERS
    with lock.open("a+") as file:
        if not try_lock(file):
            raise ValueError(
                f"{folder}: a training or an extraction reads its shards, which would"
                " be replaced; wait until it has ended, or use another data directory"
            )
        yield


@dataclass(frozen=True, eq=False)
class Packed:
    """Positions of all utterances of a data directory in its shards, ordered as its columns."""

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
    remote: RemoteShards | None = None  # where the shards are in a store

    def __len__(self) -> int:
        return len(self.start_N)

    def place(self, shard: str) -> str:
        """Return the path or the address of a shard."""
        if self.remote is not None:
            return f"{self.remote.store.url}/{shard}"
        return f"{self.folder}/{shard}"

    @cached_property
    def num_bytes_of_shards(self) -> list[int]:
        """Return the byte at which the last block of each shard ends."""
        if self.layout.codec == "flac":
            # An utterance without samples has no block.
            rows = np.flatnonzero(np.diff(self.block_N))
            last_block = self.block_N[rows + 1] - 1
            end_bytes = self.block_start_K[last_block] + self.block_size_K[last_block]
        else:
            rows = np.arange(len(self))
            end_bytes = self.start_N + self.num_units_N * self.layout.unit_bytes
        # The largest end of the utterances of each shard.
        num_bytes = np.zeros(len(self.shards), dtype=np.int64)
        np.maximum.at(num_bytes, self.shard_N[rows], end_bytes)
        return num_bytes.tolist()

    def cut_short(self) -> Iterator[Path]:
        """Yield the shards that are missing, or smaller than the index requires.

        Of shards behind a read-only address, nothing is known before they are read.
        """
        sizes: dict[str, int] = {}
        if self.remote is not None:
            if self.remote.store.is_read_only:
                return
            sizes = self.remote.store.sizes()
        for name, min_size in zip(self.shards, self.num_bytes_of_shards):
            path = self.folder / name
            if self.remote is None:
                # Not `exists` and then `stat`: another packing may replace the shards in between.
                with suppress(FileNotFoundError):
                    sizes[name] = path.stat().st_size
            if sizes.get(name, -1) < min_size:
                yield path

    def read(self, row: int, first: int, count: int) -> np.ndarray:
        """Read wave_S, int16, or feats_TF, float32: `count` units from `first` on, in one read.

        Raises ValueError with the shard, utterance and byte if the data are damaged or a store does
        not give them, and FileNotFoundError if the shard is missing.
        """
        layout = self.layout
        end = first + count
        assert 0 <= first <= end <= int(self.num_units_N[row])

        # The blocks of the utterance that hold the range.
        first_block = first // layout.block_units
        end_block = -(-end // layout.block_units)  # rounded up
        num_mel_bins = layout.unit_bytes // 4  # of a frame of float32
        if first_block >= end_block:
            if layout.codec == "fbank":
                return np.empty((0, num_mel_bins), "<f4")
            return np.empty(0, "<i2")
        places = self._places(row, first_block, end_block)
        data, blocks = self._read_blocks(row, places)

        # Decode the blocks, then cut off what lies before and after the range.
        if layout.codec == "flac":
            waves = [audio.from_flac(block) for block in blocks]
            units = np.concatenate(waves)
        elif layout.codec == "fbank":
            units = np.frombuffer(data, "<f4").reshape(-1, num_mel_bins)
        else:
            units = np.frombuffer(data, "<i2")
        first_read = first_block * layout.block_units
        return units[first - first_read : end - first_read]

    def _places(self, row: int, first_block: int, end_block: int) -> list[BlockPlace]:
        """Return the places of a range of an utterance's blocks in its shard."""
        layout = self.layout
        number_K = np.arange(first_block, end_block)  # within the utterance
        block_K = number_K + int(self.block_N[row])
        if layout.codec == "flac":
            start_K = self.block_start_K[block_K]
            size_K = self.block_size_K[block_K]
        else:
            # Blocks of equal size follow each other; the last one may be smaller.
            block_bytes = layout.block_units * layout.unit_bytes
            offset_K = number_K * block_bytes
            utterance_bytes = int(self.num_units_N[row]) * layout.unit_bytes
            size_K = np.minimum(utterance_bytes - offset_K, block_bytes)
            start_K = int(self.start_N[row]) + offset_K
        crc_K = self.crc_K[block_K]
        return list(zip(start_K.tolist(), size_K.tolist(), crc_K.tolist()))

    def _read_blocks(
        self, row: int, places: Sequence[BlockPlace]
    ) -> tuple[memoryview, list[memoryview]]:
        """Return what lies from the first of neighbouring blocks to the last, and each block.

        Raises ValueError if a checksum is wrong; a store is asked again before.
        """
        shard = int(self.shard_N[row])
        where = self.place(self.shards[shard])
        fix = f"check the disk, remove {self.folder} {AGAIN}"
        num_attempts = 1
        if self.remote is not None:
            fix = "upload the shards again (speakerlab pack --out)"
            num_attempts = ATTEMPTS

        # Neighbouring blocks lie in a row (with tar headers between FLAC members): one read.
        read_start = places[0][0]
        last_start, last_size, _ = places[-1]
        num_bytes = last_start + last_size - read_start
        damaged_at = None
        for _ in range(num_attempts):
            content = self._read_bytes(shard, read_start, num_bytes)
            data = memoryview(content)  # its slices are no copies
            blocks, damaged_at = check_blocks(data, places)
            if damaged_at is None:
                return data, blocks
            if self.remote is not None:
                self.remote.discard(self.shards[shard], read_start, num_bytes)
        raise ValueError(
            f"{where}: the checksum is wrong for {self.ids[row]} at byte {damaged_at};"
            f" {fix}"
        )

    def _read_bytes(self, shard: int, start: int, num_bytes: int) -> bytes:
        """Read a range of a shard; raise ValueError if it ends early."""
        name = self.shards[shard]
        if self.remote is not None:
            return self.remote.read(
                name,
                start,
                num_bytes,
                shard_bytes=self.num_bytes_of_shards[shard],
            )
        path = self.place(name)
        # Keep a reference to the file, because another thread may evict it from the cache.
        file = open_shard(path)
        content = read_range(file, start, num_bytes)
        if len(content) < num_bytes:
            raise ValueError(
                f"{path}: ends early, after {len(content)} of {num_bytes} bytes at byte"
                f" {start}; remove {self.folder} {AGAIN}"
            )
        return content

    def write(self) -> None:
        """Write the index of the shards."""
        arrays = {name: getattr(self, name) for name in COLUMNS}
        arrays["shard"] = Strings.of(self.shards)
        arrays["id"] = self.ids
        facts = {
            "layout": asdict(self.layout),
            "sha256": self.sha256,
            "facts": self.facts,
        }
        write_arrays(self.folder / INDEX, arrays, facts)


def check_blocks(
    data: memoryview, places: Sequence[BlockPlace]
) -> tuple[list[memoryview], int | None]:
    """Return the blocks in `data`, and the first byte of the first one that is damaged.

    data: the bytes of a shard from the first of the places on.
    """
    read_start, _, _ = places[0]
    blocks: list[memoryview] = []
    for start, size, expected_crc in places:
        offset = start - read_start
        block = data[offset : offset + size]
        if zlib.crc32(block) != expected_crc:
            return blocks, start
        blocks.append(block)
    return blocks, None


def read_packed(place: Path) -> Packed | None:
    """Return the shards in a folder of a data directory, or None where there are none."""
    remote = read_reference(place)
    index = place / INDEX
    if remote is not None:
        index = remote.download_index(INDEX)
    elif not index.exists():
        return None
    arrays, facts = read_arrays(index, ARRAYS, like=FACTS)
    shards = tuple(arrays.pop("shard"))
    ids = arrays.pop("id")
    return Packed(
        folder=place,
        layout=Layout(**facts["layout"]),
        sha256=facts["sha256"],
        facts=facts["facts"],
        shards=shards,
        ids=ids,
        remote=remote,
        **arrays,
    )
