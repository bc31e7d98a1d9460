"""Shards: tar files of about a gigabyte that utterances are packed into.

A shard is a USTAR archive that any tool opens. How an utterance is packed is its codec:

- pcm: a member `<id>.wav` of 16-bit PCM. A stretch is one read of whole seconds.
- flac: members `<id>.000.flac`, `<id>.001.flac`, ... of 4 s each, decodable alone; two thirds of
  the size and several times the work. A stretch is one read of the members that hold it.
- fbank: a member `<id>.npy` of float32 log mel features, (T, F). A stretch is read by seconds.

Each second (pcm, fbank) or member (flac) is a block with a CRC-32, checked at every read by
`packed.py`.
Letters: S samples, T frames, F mel bins, K blocks.
"""

import io
import struct
import tarfile
import zlib
from dataclasses import dataclass
from typing import BinaryIO, Literal
from urllib.parse import quote

import numpy as np

from speakerlab.data import audio
from speakerlab.data.arrays import stable_hash

Codec = Literal["pcm", "flac", "fbank"]
FLAC_SECONDS = 4
MAX_NAME = 90  # of 100 bytes in a USTAR header; endings take the rest
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


class ShardWriter:
    """Appends utterances to a file that is a whole tar archive once it is closed."""

    def __init__(self, file: BinaryIO, layout: Layout) -> None:
        self.file, self.layout, self.at = file, layout, 0
        self.start, self.num_units = list[int](), list[int]()  # first byte and length of each
        self.blocks: list[tuple[int, int, int]] = []  # first byte, size, CRC

    def arrays(self) -> dict[str, np.ndarray]:
        """What a reader has to know of the utterances of a shard, in their order."""
        block_K3 = np.array(self.blocks, dtype=np.int64).reshape(-1, 3)
        return {
            "start": np.array(self.start, dtype=np.int64),
            "num_units": np.array(self.num_units, dtype=np.int64),
            "crc": block_K3[:, 2].astype(np.uint32),
            "block_start": block_K3[:, 0],
            "block_size": block_K3[:, 1].astype(np.int32),
        }

    def add(self, utterance: str, units: np.ndarray) -> None:
        """units: wave_S, int16, or feats_TF, float32."""
        layout, name = self.layout, member_name(utterance)
        self.num_units.append(len(units))
        if layout.codec == "flac":
            for number, first in enumerate(range(0, len(units), layout.block_units)):
                block = units[first : first + layout.block_units]
                data = audio.to_flac(block, layout.sample_rate)
                at = self._member(f"{name}.{number:03d}.flac", b"", data)
                self.start += [at] if number == 0 else []
                self.blocks.append((at, len(data), zlib.crc32(data)))
            return
        data = np.ascontiguousarray(units, "<f4" if layout.codec == "fbank" else "<i2").tobytes()
        if layout.codec == "fbank":
            at = self._member(f"{name}.npy", _npy_header(units), data)
        else:
            at = self._member(f"{name}.wav", _wav_header(len(data), layout.sample_rate), data)
        self.start.append(at)
        size = layout.block_units * layout.unit_bytes
        for begin in range(0, len(data), size):
            block = data[begin : begin + size]
            self.blocks.append((at + begin, len(block), zlib.crc32(block)))

    def close(self) -> None:
        """Write the two empty blocks that end a tar archive."""
        self.file.write(bytes(2 * PAD))

    def _member(self, name: str, head: bytes, data: bytes) -> int:
        """Write a member; return the byte at which its data begin."""
        info = tarfile.TarInfo(name)  # no owner, no date: equal audio gives equal bytes
        info.size = len(head) + len(data)
        header = info.tobuf(tarfile.USTAR_FORMAT)
        self.file.write(header + head + data + bytes(-info.size % PAD))
        first = self.at + len(header) + len(head)
        self.at += len(header) + info.size + -info.size % PAD
        return first


def member_name(utterance: str) -> str:
    """The id as part of a file name, without its ending: unusual characters as %XX."""
    name = quote(utterance, safe=" +,=@")
    return name if len(name) <= MAX_NAME else f"{name[:60]}~{stable_hash(utterance):016x}"


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
