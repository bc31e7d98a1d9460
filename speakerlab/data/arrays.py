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
        """Take the UTF-8 bytes of all strings, concatenated (uint8), and the bounds of each.

        String i is blob[ends[i] : ends[i + 1]]; ends[0] is 0.
        """
        self.blob = blob
        self.ends = ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> "Strings":
        encoded = [string.encode() for string in strings]
        lengths = [len(content) for content in encoded]  # in bytes, not characters
        ends = np.cumsum([0, *lengths], dtype=np.int64)
        joined = b"".join(encoded)
        return cls(np.frombuffer(joined, dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        index = range(len(self))[index]  # negative indices, and IndexError
        start = self.ends[index]
        end = self.ends[index + 1]
        encoded = self.blob[start:end].tobytes()
        return encoded.decode()


def stable_hash(text: str) -> int:
    """Return 64 bits that depend on the text alone, not on a seed, process or machine."""
    # Not Python's `hash`, which depends on a seed of the process.
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray | Strings], facts: Mapping[str, object]
) -> None:
    """Write one file atomically; `facts` are plain values."""
    packed: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if isinstance(array, Strings):
            packed[f"{name}.blob"] = array.blob
            packed[f"{name}.ends"] = array.ends
        else:
            packed[name] = np.ascontiguousarray(array)
    text = json.dumps(facts)
    metadata = {
        "facts": text,
        "crc32": _checksum(text, packed),
    }
    # Not `save_file`, which writes a file that only its owner may read.
    with replacing(path) as partial:
        partial.write_bytes(save(packed, metadata))


def read_arrays(
    path: Path, names: Iterable[str] = (), *, like: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (arrays and strings, facts) of a file of `write_arrays`.

    names: required arrays. like: type of its facts, made by `keys`. Raises ValueError with one line
    if the file is damaged or of another version.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            stored_names = list(file.keys())
            arrays: dict[str, Any] = {}
            for name in stored_names:
                arrays[name] = file.get_tensor(name)
        text = metadata["facts"]
        facts = parse_json(text, dict[str, Any], like=like, where="facts")
        checksum = _checksum(text, arrays)
        if checksum != metadata["crc32"]:
            raise ValueError("another checksum")

        # Strings are stored as two arrays; see `write_arrays`.
        for stored_name in stored_names:
            if stored_name.endswith(".blob"):
                name = stored_name.removesuffix(".blob")
                blob = arrays.pop(f"{name}.blob")
                ends = arrays.pop(f"{name}.ends")
                arrays[name] = Strings(blob, ends)
        missing = set(names) - arrays.keys()
        if missing:
            raise ValueError(f"no {min(missing)}")
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: is damaged ({error}); remove it and run the stage that wrote it"
            " again"
        ) from error
    return arrays, facts


def _checksum(facts: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Return a CRC-32 of everything in a file, in decimal digits."""
    crc = zlib.crc32(facts.encode())
    # By name, because safetensors returns the arrays in another order than they were given.
    for name in sorted(arrays):
        array = arrays[name]
        header = f"{name} {array.dtype.str} {array.shape}".encode()
        crc = zlib.crc32(header, crc)
        crc = zlib.crc32(array.data, crc)
    return str(crc)
