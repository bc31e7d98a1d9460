"""Packed audio: utterances in tar files of about a gigabyte, read a stretch at a time.

In: utterances, one after the other. Out: `shard-00000.tar` and what is known of its members.
A shard is a USTAR archive that any tool opens. What an utterance is packed as is its codec:

- pcm: a member `<id>.wav` of 16-bit PCM. A stretch is one read of whole seconds.
- flac: members `<id>.000.flac`, `<id>.001.flac`, ... of 4 s each, decodable alone; two thirds of
  the size and several times the work. A stretch is one read of the members that hold it.
- fbank: a member `<id>.npy` of float32 log mel features, (T, F). A stretch is read by seconds.

Each second (pcm, fbank) or member (flac) is a block with a CRC-32, checked at every read.
Letters: S samples, T frames, F mel bins, K blocks.
"""

import io
import os
import struct
import tarfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import quote

import numpy as np

from speakerlab.data import audio
from speakerlab.data.columns import stable_hash

Codec = Literal["pcm", "flac", "fbank"]
FLAC_SECONDS = 4
MAX_NAME = 90  # of 100 bytes in a USTAR header; endings take the rest
MAX_OPEN = 64  # shards that a process keeps open
PAD = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Layout:
    """How the utterances of a set of shards are laid out."""

    codec: Codec
    sample_rate: int
    block_units: int  # samples or frames in a block; the last of an utterance may have fewer
    unit_bytes: int  # of a sample or frame; 0 where blocks are compressed

    @classmethod
    def of_waves(cls, codec: Codec, *, sample_rate: int) -> "Layout":
        """For pcm and flac."""
        if codec == "flac":
            return cls(codec, sample_rate, FLAC_SECONDS * sample_rate, 0)
        return cls(codec, sample_rate, sample_rate, 2)

    @classmethod
    def of_features(cls, *, sample_rate: int, frame_shift: int, num_bins: int) -> "Layout":
        """For fbank; frame_shift in samples."""
        return cls("fbank", sample_rate, sample_rate // frame_shift, 4 * num_bins)

    def num_blocks(self, num_units: int) -> int:
        return -(-num_units // self.block_units)


@dataclass
class Written:
    """What a reader has to know of the utterances of a shard, in their order."""

    start: list[int] = field(default_factory=list)  # first byte of an utterance
    num_units: list[int] = field(default_factory=list)
    block_start: list[int] = field(default_factory=list)  # flac: first byte of a block
    block_size: list[int] = field(default_factory=list)
    block_crc: list[int] = field(default_factory=list)


class ShardWriter:
    """Appends utterances to a file that is a whole tar archive once it is closed."""

    def __init__(self, file: BinaryIO, layout: Layout) -> None:
        self.file, self.layout = file, layout
        self.at, self.written = 0, Written()

    def add(self, utterance: str, units: np.ndarray) -> None:
        """units: wave_S, int16, or feats_TF, float32."""
        layout, name = self.layout, member_name(utterance)
        self.written.num_units.append(len(units))
        blocks = [
            units[first : first + layout.block_units]
            for first in range(0, len(units), layout.block_units)
        ]
        if layout.codec == "flac":
            for number, block in enumerate(blocks):
                data = audio.to_flac(block, layout.sample_rate)
                first = self._member(f"{name}.{number:03d}.flac", b"", data)
                if number == 0:
                    self.written.start.append(first)
                self._block(first, data)
            return
        data = np.ascontiguousarray(units, "<f4" if layout.codec == "fbank" else "<i2").tobytes()
        head, ending = (
            (_npy_header(units), "npy")
            if layout.codec == "fbank"
            else (_wav_header(len(data), layout.sample_rate), "wav")
        )
        first = self._member(f"{name}.{ending}", head, data)
        self.written.start.append(first)
        size = layout.block_units * layout.unit_bytes
        for begin in range(0, len(data), size):
            self._block(first + begin, data[begin : begin + size])

    def close(self) -> None:
        """Two empty blocks end a tar archive."""
        self.file.write(bytes(2 * PAD))
        self.at += 2 * PAD

    def _member(self, name: str, head: bytes, data: bytes) -> int:
        """Write a member; the byte at which its data begin."""
        info = tarfile.TarInfo(name)  # no owner, no date: equal audio gives equal bytes
        info.size = len(head) + len(data)
        header = info.tobuf(tarfile.USTAR_FORMAT)
        self.file.write(header + head + data + bytes(-info.size % PAD))
        first = self.at + len(header) + len(head)
        self.at += len(header) + info.size + -info.size % PAD
        return first

    def _block(self, first: int, data: bytes) -> None:
        self.written.block_start.append(first)
        self.written.block_size.append(len(data))
        self.written.block_crc.append(zlib.crc32(data))


def member_name(utterance: str) -> str:
    """The id as part of a file name, without its ending: unusual characters as %XX."""
    name = quote(utterance, safe=" +,=@")
    return name if len(name) <= MAX_NAME else f"{name[:60]}~{stable_hash(utterance):016x}"


class OpenShards:
    """Files kept open by this process, the least recently used closed when there are many."""

    def __init__(self) -> None:
        self.handles: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, first: int, size: int) -> bytes:
        """`size` bytes from byte `first`; forked processes may share a handle, no position moves.

        Raises FileNotFoundError, or ValueError where the file ends before.
        """
        data = os.pread(self._open(path), size, first)
        if len(data) < size:
            raise ValueError(
                f"{path}: ends early, got {len(data)} of {size} bytes at byte {first}; "
                f"remove {Path(path).parent} and pack again (speakerlab pack)"
            )
        return data

    def close(self) -> None:
        """Forget all; other files may have taken their places."""
        while self.handles:
            os.close(self.handles.popitem()[1])

    def _open(self, path: str) -> int:
        if path in self.handles:
            self.handles.move_to_end(path)
            return self.handles[path]
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise FileNotFoundError(
                f"{path}: cannot be opened, got '{error.strerror}'; restore it, or remove "
                f"{Path(path).parent} and pack again (speakerlab pack)"
            ) from None
        self.handles[path] = handle
        if len(self.handles) > MAX_OPEN:
            os.close(self.handles.popitem(last=False)[1])
        return handle


open_shards = OpenShards()


@dataclass(frozen=True)
class Place:
    """Where one utterance lies, and what its blocks must sum up to."""

    path: str
    utterance: str
    start: int  # first byte
    num_units: int
    crc_K: np.ndarray  # uint32
    block_start_K: np.ndarray  # int64; flac only, else empty
    block_size_K: np.ndarray


def read_units(place: Place, layout: Layout, first: int, count: int) -> np.ndarray:
    """wave_S, int16, or feats_TF, float32: `count` units from unit `first`.

    Raises ValueError naming shard, utterance and byte where what is read is not what was written.
    """
    if not 0 <= first <= first + count <= place.num_units:
        raise ValueError(
            f"{place.path}: {place.utterance} has {place.num_units} units, got {first} to "
            f"{first + count}; run stage 2 again"
        )
    blocks = range(first // layout.block_units, layout.num_blocks(first + count))
    if layout.codec == "flac":
        units = np.concatenate([np.empty(0, "<i2"), *_flac_blocks(place, layout, blocks)])
    else:
        size = layout.block_units * layout.unit_bytes
        begin = place.start + blocks.start * size
        end = place.start + min(blocks.stop * size, place.num_units * layout.unit_bytes)
        data = memoryview(open_shards.read(place.path, begin, max(end - begin, 0)))
        for i, block in enumerate(blocks):
            _check(place, block, begin + i * size, data[i * size : (i + 1) * size])
        units = np.frombuffer(data, "<f4" if layout.codec == "fbank" else "<i2")
        if layout.codec == "fbank":
            units = units.reshape(-1, layout.unit_bytes // 4)
    offset = first - blocks.start * layout.block_units
    return units[offset : offset + count]


def _flac_blocks(place: Place, layout: Layout, blocks: range) -> list[np.ndarray]:
    """One read of the members and what is between them, then each decoded alone."""
    if not blocks:
        return []
    starts, sizes = place.block_start_K, place.block_size_K
    begin = int(starts[blocks.start])
    end = int(starts[blocks.stop - 1] + sizes[blocks.stop - 1])
    data = memoryview(open_shards.read(place.path, begin, end - begin))
    found = []
    for block in blocks:
        at = int(starts[block])
        member = data[at - begin : at - begin + int(sizes[block])]
        _check(place, block, at, member)
        found.append(audio.from_flac(member))
    return found


def _check(place: Place, block: int, at: int, data: memoryview) -> None:
    if zlib.crc32(data) != place.crc_K[block]:
        raise ValueError(
            f"{place.path}: the checksum is wrong, got another content of {place.utterance} at "
            f"byte {at} (block {block}); check the disk, remove {Path(place.path).parent} and pack "
            "again (speakerlab pack)"
        )


def _wav_header(num_bytes: int, sample_rate: int) -> bytes:
    """RIFF header of mono 16-bit PCM, 44 bytes."""
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", 36 + num_bytes, b"WAVE", b"fmt ", 16, 1, 1),
        *(sample_rate, 2 * sample_rate, 2, 16, b"data", num_bytes),
    )


def _npy_header(feats_TF: np.ndarray) -> bytes:
    """What np.save writes before the numbers."""
    buffer = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": feats_TF.shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()
