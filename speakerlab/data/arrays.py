"""Named arrays and strings in one file.

The format is safetensors; its metadata holds facts as JSON and a CRC-32 of everything, checked when
the file is read.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from speakerlab.core.atomic import replacing
from speakerlab.core.reading import parse_json


class Strings(Sequence[str]):
    """Many strings in two arrays, which forked workers share without a copy."""

    def __init__(self, blob: np.ndarray, ends: np.ndarray) -> None:
        """Take blob, uint8, all strings in UTF-8 in a row, and where each begins, and the end."""
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
    """Return 64 bits that depend on the text alone, not on a seed, process or machine."""
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
    metadata = {"facts": text, "crc32": _checksum(text, packed)}
    with replacing(path) as partial:  # `save_file` would write one that only its owner may read
        partial.write_bytes(save(packed, metadata))


def read_arrays(
    path: Path, names: Iterable[str] = (), *, like: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (arrays and strings, facts) of a file of `write_arrays`.

    names: arrays that it must have. like: type of its facts, of `keys`. Raises ValueError with one
    line where the file is damaged or of another version.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            arrays: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = parse_json(metadata["facts"], dict[str, Any], like=like, where="facts")
        if _checksum(metadata["facts"], arrays) != metadata["crc32"]:
            raise ValueError("another checksum")
        for name in [name[: -len(".blob")] for name in arrays if name.endswith(".blob")]:
            arrays[name] = Strings(arrays.pop(f"{name}.blob"), arrays.pop(f"{name}.ends"))
        if missing := sorted({*names} - arrays.keys()):
            raise ValueError(f"no {missing[0]}")
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: is damaged ({error}); remove it and run the stage that wrote it again"
        ) from error
    return arrays, facts


def _checksum(facts: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Return a CRC-32 of everything in a file, in decimal digits."""
    crc = zlib.crc32(facts.encode())
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.data, crc)
    return str(crc)
