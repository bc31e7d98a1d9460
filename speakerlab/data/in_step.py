"""The tables of a data directory read line by line beside one another, straight into arrays.

In: wav.scp, utt2spk and utt2dur that name the same utterances in the same, rising order, as
`write_table` leaves them. Out: `Rows`, or None for tables that are otherwise: those need all of
them in memory as Python's strings, which takes seven times as much.
Letters: N utterances.
"""

from array import array
from collections.abc import Container, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from speakerlab.data.strings import Paths, Strings, stable_hash
from speakerlab.data.tables import SURROGATE, read_rejected

NAMES = ("wav.scp", "utt2spk", "utt2dur")
Line = tuple[str, str]


class Rows(NamedTuple):
    """What the tables say, in rising order of the hash of the id, then of the id."""

    ids: Strings
    hash_N: np.ndarray  # uint64
    files: Paths
    file_N: np.ndarray  # int32
    start_N: np.ndarray  # int64
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32
    speakers: tuple[str, ...]  # sorted


class Texts:
    """Strings as they come, one after another."""

    def __init__(self) -> None:
        self.blob, self.ends = bytearray(), array("q", [0])

    def add(self, text: str) -> None:
        self.blob += text.encode()
        self.ends.append(len(self.blob))

    def take(self, rows: np.ndarray) -> Strings:
        return Strings(np.frombuffer(self.blob, np.uint8), np.array(self.ends)).take(rows)


class Numbered:
    """A few names, met again and again: of each row its number, by when it was met first."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.numbers = array("i")

    def add(self, name: str) -> None:
        self.numbers.append(self.index.setdefault(name, len(self.index)))

    def take(self, rows: np.ndarray) -> np.ndarray:
        return np.array(self.numbers, dtype=np.int32)[rows]


def read_in_step(folder: Path, *, sample_rate: int) -> Rows | None:
    """None where there are segments, a table is missing, or the tables are not in step."""
    if (folder / "segments").exists() or not all((folder / name).exists() for name in NAMES):
        return None
    rejected = read_rejected(folder)
    tables = [_rising_lines(folder / name, leave_out=rejected) for name in NAMES]
    ids, hashes, samples = Texts(), array("Q"), array("q")
    folders, names, speakers, path_hashes = Numbered(), Texts(), Numbered(), array("q")
    for wav, owner, seconds in zip_longest(*tables):
        if wav is None or owner is None or seconds is None or not wav[0] == owner[0] == seconds[0]:
            return None
        ids.add(wav[0])
        hashes.append(stable_hash(wav[0]))
        path_hashes.append(hash(wav[1]))
        parent, slash, name = wav[1].rpartition("/")
        folders.add(parent + slash)
        names.add(name)
        speakers.add(owner[1])
        samples.append(round(float(seconds[1]) * sample_rate))
    if len(np.unique(np.array(path_hashes))) < len(path_hashes):  # files of several utterances
        return None
    hash_N = np.array(hashes, dtype=np.uint64)
    order_N = np.argsort(hash_N, kind="stable")
    speaker_N, known = _renumbered(speakers, order_N, sorted(speakers.index))
    folder_N = folders.take(order_N)
    met, first = np.unique(folder_N, return_index=True)
    by_number = list(folders.index)
    folder_F, parents = _renumbered(
        folders, order_N, [by_number[number] for number in met[np.argsort(first)]]
    )
    return Rows(
        ids=ids.take(order_N),
        hash_N=hash_N[order_N],
        files=Paths(Strings.of(parents), names.take(order_N), folder_F),
        file_N=np.arange(len(order_N), dtype=np.int32),
        start_N=np.zeros(len(order_N), dtype=np.int64),
        num_samples_N=np.array(samples, dtype=np.int64)[order_N],
        speaker_N=speaker_N,
        speakers=tuple(known),
    )


def _renumbered(
    column: Numbered, rows: np.ndarray, names: list[str]
) -> tuple[np.ndarray, list[str]]:
    """(each row's place among `names`, the names)."""
    place = {name: number for number, name in enumerate(names)}
    new = np.array([place[name] for name in column.index], dtype=np.int32)
    return new[column.take(rows)], names


def _rising_lines(path: Path, *, leave_out: Container[str]) -> Iterator[Line | None]:
    """(id, value) of each line; None, and no more, where a line does not rise or is not plain."""
    before = ""
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            words = line.split(maxsplit=1)
            is_text = line.isascii() or not SURROGATE.search(line)
            if len(words) != 2 or words[0] <= before or not is_text:
                yield None
                return
            before = words[0]
            if before not in leave_out:
                yield before, words[1].strip()
