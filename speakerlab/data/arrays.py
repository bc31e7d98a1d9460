"""Named arrays and strings in one file that processes map and share.

The format is safetensors; its metadata holds facts as JSON and a CRC-32 of everything, checked when
the file is opened.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from speakerlab.core.atomic import replacing
from speakerlab.core.reading import parse_json

DTYPES = {"U8": "<u1", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}


class Strings(Sequence[str]):
    """Many strings in two arrays, which forked workers share without a copy."""

    def __init__(self, blob: np.ndarray, ends: np.ndarray) -> None:
        """blob: uint8, all strings in UTF-8 in a row; ends: where each begins, and the end."""
        self.blob, self.ends = blob, ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> "Strings":
        encoded = [string.encode() for string in strings]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        index = range(len(self))[index]
        return self.blob[self.ends[index] : self.ends[index + 1]].tobytes().decode()


def stable_hash(text: str) -> int:
    """64 bits that depend on the text alone: on no seed, process or machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray | Strings], facts: Mapping[str, object]
) -> None:
    """Write one file atomically; `facts` are plain values."""
    packed: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if isinstance(array, Strings):
            packed |= {f"{name}.blob": array.blob, f"{name}.ends": array.ends}
        else:
            packed[name] = np.ascontiguousarray(array)
    text = json.dumps(facts)
    crc = zlib.crc32(text.encode())
    for name in sorted(packed):
        crc = zlib.crc32(packed[name].data, _crc_of_kind(crc, name, packed[name]))
    with replacing(path) as partial:
        partial.touch()  # of the usual mode; safetensors writes files that only their owner reads
        mode = partial.stat().st_mode
        save_file(packed, partial, metadata={"facts": text, "crc32": str(crc)})
        partial.chmod(mode)


def map_arrays(
    path: Path, names: Iterable[str] = (), *, like: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays and strings, facts) of a file of `write_arrays`, as views of the mapped file.

    names: arrays that it must have. like: type of its facts, of `keys`. Raises ValueError with one
    line where the file is damaged or of another version.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, "u1")
    try:
        length = int(data[:8].view("<u8")[0])
        header = json.loads(data[8 : 8 + length].tobytes())
        metadata = header.pop("__metadata__")
        facts = parse_json(metadata["facts"], dict[str, Any], like=like, where="facts")
        arrays: dict[str, Any] = {}
        crc = zlib.crc32(metadata["facts"].encode())
        for name, entry in sorted(header.items()):
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if not 8 + length <= begin <= end <= len(data):
                raise ValueError(f"{len(data)} bytes of {end}")
            arrays[name] = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
            crc = zlib.crc32(arrays[name].data, _crc_of_kind(crc, name, arrays[name]))
        if str(crc) != metadata["crc32"]:
            raise ValueError("another checksum")
        for name in [name[: -len(".blob")] for name in arrays if name.endswith(".blob")]:
            arrays[name] = Strings(arrays.pop(f"{name}.blob"), arrays.pop(f"{name}.ends"))
        if missing := sorted({*names} - arrays.keys()):
            raise ValueError(f"no {missing[0]}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: is damaged ({error}); remove it and run the stage that wrote it again"
        ) from error
    return arrays, facts


def _crc_of_kind(crc: int, name: str, array: np.ndarray) -> int:
    return zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
