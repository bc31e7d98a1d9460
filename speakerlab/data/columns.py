"""The utterances of one data directory as arrays, mapped from a file and not loaded.

In: checked tables. Out: `Columns`, rows in the order of a hash of the utterance id. All processes
of a host that map the file share one copy of it in the page cache.
Letters: N utterances, F files.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.core.atomic import file_sha256
from speakerlab.core.reading import keys
from speakerlab.data.arrays import Strings, map_arrays, stable_hash, write_arrays
from speakerlab.data.tables import read_durations, read_rejected, read_segments, read_table

NAME = "columns.safetensors"  # in the data directory, made from its tables
# Fields of `Columns` in the file, where their names are singular: id, folder, file_name, speaker.
STORED = ("ids", "hash_N", "folders", "file_names", "folder_F", "file_N")
STORED += ("start_N", "num_samples_N", "speaker_N", "speakers")
KNOWN = keys(tables=dict[str, tuple[int, int, str]], sample_rate=int, sha256=str)
TABLES = ("wav.scp", "segments", "utt2spk", "utt2dur", "rejected.tsv")


@dataclass(frozen=True, eq=False)
class Columns:
    """One data directory; rows are ordered by a hash of their id, so order has no meaning."""

    ids: Strings
    hash_N: np.ndarray  # uint64, rising
    folders: Strings
    file_names: Strings
    folder_F: np.ndarray  # int32, index into `folders`
    file_N: np.ndarray  # int32, index into `file_names` and `folder_F`
    start_N: np.ndarray  # int64, first sample within the file
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32, index into `speakers`
    speakers: tuple[str, ...]  # sorted
    sample_rate: int
    sha256: str = ""  # of everything but the paths, which may differ between hosts

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, row: int) -> str:
        """Return the path of the recording that an utterance is (a part of)."""
        file = int(self.file_N[row])
        return self.folders[int(self.folder_F[file])] + self.file_names[file]


def read_columns(folder: Path, *, sample_rate: int) -> Columns:
    """Return the columns of a checked data directory, mapped if the stored ones are fresh.

    Raises FileNotFoundError where it was not checked, ValueError where it has changed since.
    """
    if (folder / NAME).exists():
        names = [field.removesuffix("s") for field in STORED]
        arrays, facts = map_arrays(folder / NAME, names, like=KNOWN)
        if is_fresh(folder, facts) and facts["sample_rate"] == sample_rate:
            columns = {field: arrays[field.removesuffix("s")] for field in STORED}
            columns["speakers"] = tuple(columns["speakers"])
            return Columns(**columns, sample_rate=sample_rate, sha256=facts["sha256"])
    return compile_columns(folder, sample_rate=sample_rate)


def store_columns(folder: Path, *, sample_rate: int) -> Columns:
    """Return the columns, after storing them beside the tables if the stored ones are stale."""
    columns = read_columns(folder, sample_rate=sample_rate)
    if isinstance(columns.hash_N, np.memmap):
        return columns
    arrays = {field.removesuffix("s"): getattr(columns, field) for field in STORED}
    arrays["speaker"] = Strings.of(columns.speakers)
    known = {"sample_rate": sample_rate, "sha256": columns.sha256}
    write_arrays(folder / NAME, arrays, {"tables": describe_tables(folder), **known})
    return columns


def describe_tables(folder: Path) -> dict[str, list[object]]:
    """Return [size, time of change, sha256] of each table, which `is_fresh` compares."""
    described: dict[str, list[object]] = {}
    for name in TABLES:
        if (folder / name).exists():
            stat = (folder / name).stat()
            described[name] = [stat.st_size, stat.st_mtime_ns, file_sha256(folder / name)]
    return described


def is_fresh(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether the tables are those that were described; content decides where times differ."""
    known = facts["tables"]
    if {name for name in TABLES if (folder / name).exists()} != known.keys():
        return False
    for name, (size, changed, sha256) in known.items():
        stat = (folder / name).stat()
        if stat.st_size != size:
            return False
        if stat.st_mtime_ns != changed and file_sha256(folder / name) != sha256:
            return False
    return True


def compile_columns(folder: Path, *, sample_rate: int) -> Columns:
    rows = sorted(_list_rows(folder, sample_rate))
    ids, paths, owners = ([str(row[field]) for row in rows] for field in (1, 2, 3))
    speakers, files = sorted(set(owners)), list(dict.fromkeys(paths))
    split = [path.rpartition("/") for path in files]
    parents = [parent + slash for parent, slash, _ in split]
    folders = list(dict.fromkeys(parents))
    columns = Columns(
        ids=Strings.of(ids),
        hash_N=np.array([row[0] for row in rows], dtype=np.uint64),
        folders=Strings.of(folders),
        file_names=Strings.of(name for _, _, name in split),
        folder_F=_indices(parents, folders),
        file_N=_indices(paths, files),
        start_N=np.array([row[4] for row in rows], dtype=np.int64),
        num_samples_N=np.array([row[5] for row in rows], dtype=np.int64),
        speaker_N=_indices(owners, speakers),
        speakers=tuple(speakers),
        sample_rate=sample_rate,
    )
    digest = hashlib.sha256("\n".join(columns.speakers).encode())
    ids, lengths = columns.ids, columns.num_samples_N
    for column in (ids.blob, ids.ends, columns.start_N, lengths, columns.speaker_N):
        digest.update(column.data)
    return replace(columns, sha256=digest.hexdigest())


def _indices(values: list[str], known: list[str]) -> np.ndarray:
    index = {value: i for i, value in enumerate(known)}
    return np.array([index[value] for value in values], dtype=np.int32)


def _list_rows(folder: Path, sample_rate: int) -> Iterator[tuple[int, str, str, str, int, int]]:
    """Yield (hash, id, path, speaker, first sample, samples) of each utterance kept."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: does not exist; check the path, or run stage 1")
    if not (folder / "utt2dur").exists():
        raise FileNotFoundError(
            f"{folder}: has not been checked (no utt2dur); run stage 1, or `speakerlab check`"
        )
    wavs, seconds = read_table(folder / "wav.scp"), read_durations(folder)
    speakers = read_table(folder / "utt2spk") if (folder / "utt2spk").exists() else {}
    segments = read_segments(folder / "segments")
    rejected = read_rejected(folder)
    utterances = (segments or wavs).keys()
    changed = (utterances - seconds.keys() - rejected.keys()) | (seconds.keys() - utterances)
    if changed:
        raise ValueError(
            f"{folder}: has changed since it was checked, e.g. {min(changed)}; run stage 1, or "
            "`speakerlab check`"
        )
    unknown = seconds.keys() - speakers.keys() - rejected.keys() if speakers else set()
    if unknown:
        raise ValueError(f"{folder}/utt2spk: {min(unknown)} has no speaker; add its line")
    for utterance in seconds.keys() - rejected.keys():
        recording, start, _ = segments.get(utterance, (utterance, 0.0, 0.0))
        if recording not in wavs:
            raise ValueError(f"{folder}/wav.scp: lacks {recording}, of {utterance}; add its line")
        first, length = start * sample_rate, seconds[utterance] * sample_rate
        speaker = speakers.get(utterance, utterance)
        where = wavs[recording], speaker, round(first), round(length)
        yield stable_hash(utterance), utterance, *where
