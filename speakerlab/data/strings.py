"""Many strings, and many paths, as arrays. In: text. Out: `Strings`, `Paths`, a hash of text.

Letters: F files.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from speakerlab.data.arrays import Arrays

ROWS_AT_ONCE = 1 << 16  # that are moved: an index of each of their bytes takes 8


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
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.blob[self.ends[index] : self.ends[index + 1]].tobytes().decode()

    def take(self, rows: np.ndarray) -> "Strings":
        """The strings of these rows, in their order."""
        begins, lengths = self.ends[rows], self.ends[rows + 1] - self.ends[rows]
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        blob = np.empty(int(ends[-1]), dtype=np.uint8)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            own = lengths[part]
            start, stop = int(ends[first]), int(ends[min(first + ROWS_AT_ONCE, len(rows))])
            moved = np.repeat(begins[part] - ends[:-1][part], own)
            blob[start:stop] = self.blob[np.arange(start, stop) + moved]
        return Strings(blob, ends)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        return {f"{name}.blob": self.blob, f"{name}.ends": self.ends}

    @classmethod
    def from_arrays(cls, arrays: Arrays, name: str) -> "Strings":
        return cls(arrays[f"{name}.blob"], arrays[f"{name}.ends"])


@dataclass(frozen=True)
class Paths:
    """Paths of files, each folder told once."""

    folders: Strings
    names: Strings
    folder_F: np.ndarray  # int32

    @classmethod
    def of(cls, paths: Sequence[str]) -> "Paths":
        index: dict[str, int] = {}
        split = [path.rpartition("/") for path in paths]
        folder_F = [index.setdefault(folder + slash, len(index)) for folder, slash, _ in split]
        names = Strings.of(name for _, _, name in split)
        return cls(Strings.of(index), names, np.array(folder_F, dtype=np.int32))

    def __getitem__(self, index: int) -> str:
        return self.folders[int(self.folder_F[index])] + self.names[index]

    def arrays(self) -> dict[str, np.ndarray]:
        names = self.names.arrays("file_name")
        return {**self.folders.arrays("folder"), **names, "folder_F": self.folder_F}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> "Paths":
        folders, names = (Strings.from_arrays(arrays, name) for name in ("folder", "file_name"))
        return cls(folders, names, arrays["folder_F"])


def stable_hash(text: str) -> int:
    """64 bits that depend on the text alone: on no seed, process or machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
