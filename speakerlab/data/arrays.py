"""Named arrays in one file that processes map and share. Out: views, of a file that is whole.

The format is safetensors; its metadata holds facts as JSON and a CRC-32 of everything, checked when
the file is opened.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors.numpy import save_file

from speakerlab.core.atomic import replacing

DTYPES = {"U8": "<u1", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}
BLOCK_BYTES = 1 << 22
Arrays = Mapping[str, np.ndarray]


def write_arrays(path: Path, arrays: Arrays, facts: Mapping[str, object]) -> None:
    """One file, whole or not at all; `facts` are plain values."""
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    text = json.dumps(facts)
    crc = zlib.crc32(text.encode())
    for name in sorted(packed):
        array = packed[name]
        crc = zlib.crc32(array.data, _crc_of_kind(crc, name, array))
    with replacing(path) as partial:
        partial.touch()  # of the usual mode; safetensors writes files that only their owner reads
        mode = partial.stat().st_mode
        save_file(packed, partial, metadata={"facts": text, "crc32": str(crc)})
        partial.chmod(mode)


def map_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """(arrays, facts) of a file of `write_arrays`; the arrays are views of the mapped file.

    Raises ValueError with one line where the file is not such a file, or not as it was written.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, "u1")
    try:
        length = int(data[:8].view("<u8")[0])
        header = json.loads(data[8 : 8 + length].tobytes())
        metadata = header.pop("__metadata__")
        facts = json.loads(metadata["facts"])
        arrays = {name: _view(data[8 + length :], entry) for name, entry in header.items()}
        starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
        crc = zlib.crc32(metadata["facts"].encode())
        # Read, not mapped: else all of it would count as this process's memory.
        with path.open("rb") as file:
            for name in sorted(arrays):
                crc = _crc_of_kind(crc, name, arrays[name])
                crc = _crc_of_bytes(crc, file, starts[name], arrays[name].nbytes)
        if str(crc) != metadata["crc32"]:
            raise ValueError("another checksum")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: is damaged, got '{error}'; remove it and run the stage that wrote it again"
        ) from error
    return arrays, facts


def _view(data: np.ndarray, entry: Mapping[str, object]) -> np.ndarray:
    """An array of the mapped bytes; sizes that do not fit are a ValueError of numpy."""
    begin, end = entry["data_offsets"]  # pyright: ignore[reportGeneralTypeIssues]
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"{len(data)} bytes of {end}")
    return data[begin:end].view(DTYPES[str(entry["dtype"])]).reshape(entry["shape"])  # pyright: ignore


def _crc_of_kind(crc: int, name: str, array: np.ndarray) -> int:
    return zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)


def _crc_of_bytes(crc: int, file: BinaryIO, start: int, size: int) -> int:
    file.seek(start)
    while size > 0 and (block := file.read(min(size, BLOCK_BYTES))):
        size -= len(block)
        crc = zlib.crc32(block, crc)
    return crc
