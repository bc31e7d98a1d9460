"""The utterances of one data directory as arrays, mapped from a file and not loaded.

In: checked tables. Out: `Columns`, rows in the order of a hash of the utterance id. All processes
of a host that map the file share one copy of it, which is the page cache's.
Letters: N utterances, F files, D folders.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakerlab.core.atomic import file_sha256
from speakerlab.data.arrays import Arrays, map_arrays, write_arrays
from speakerlab.data.in_step import Rows, read_in_step
from speakerlab.data.strings import Paths, Strings, stable_hash
from speakerlab.data.tables import read_rejected, read_segments, read_table

NAME = "columns.safetensors"  # in the data directory, made from its tables
TABLES = ("wav.scp", "segments", "utt2spk", "utt2dur", "rejected.tsv")


@dataclass(frozen=True, eq=False)
class Columns:
    """One data directory; rows are ordered by a hash of their id, so order has no meaning."""

    ids: Strings
    hash_N: np.ndarray  # uint64, rising
    files: Paths
    file_N: np.ndarray  # int32, index into `files`
    start_N: np.ndarray  # int64, first sample within the file
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32, index into `speakers`
    speakers: tuple[str, ...]  # sorted
    sample_rate: int
    sha256: str  # of everything but the paths, which may differ between hosts

    def __len__(self) -> int:
        return len(self.ids)

    def write(self, path: Path, facts: Mapping[str, object]) -> None:
        """One file, whole or not at all; `facts` are plain values."""
        arrays = {
            **self.ids.arrays("id"),
            **self.files.arrays(),
            **Strings.of(self.speakers).arrays("speaker"),
            **{name: getattr(self, name) for name in ("hash_N", "file_N", "start_N")},
            **{name: getattr(self, name) for name in ("num_samples_N", "speaker_N")},
        }
        known = {"sample_rate": self.sample_rate, "sha256": self.sha256}
        write_arrays(path, arrays, {**facts, **known})

    @classmethod
    def from_arrays(cls, arrays: Arrays, facts: Mapping[str, object]) -> "Columns":
        sample_rate, sha256 = facts["sample_rate"], facts["sha256"]
        assert isinstance(sample_rate, int) and isinstance(sha256, str)
        return cls(
            ids=Strings.from_arrays(arrays, "id"),
            hash_N=arrays["hash_N"],
            files=Paths.from_arrays(arrays),
            file_N=arrays["file_N"],
            start_N=arrays["start_N"],
            num_samples_N=arrays["num_samples_N"],
            speaker_N=arrays["speaker_N"],
            speakers=tuple(Strings.from_arrays(arrays, "speaker")),
            sample_rate=sample_rate,
            sha256=sha256,
        )


def read_columns(folder: Path, *, sample_rate: int) -> Columns:
    """The columns of a checked data directory, mapped where they were stored and still hold.

    Raises FileNotFoundError where it was not checked, ValueError where it has changed since.
    """
    stored = _read_stored(folder, sample_rate)
    return compile_columns(folder, sample_rate=sample_rate) if stored is None else stored


def store_columns(folder: Path, *, sample_rate: int) -> Columns:
    """The same, stored beside the tables where they were not."""
    stored = _read_stored(folder, sample_rate)
    if stored is not None:
        return stored
    columns = compile_columns(folder, sample_rate=sample_rate)
    columns.write(folder / NAME, {"tables": describe_tables(folder)})
    return columns


def _read_stored(folder: Path, sample_rate: int) -> Columns | None:
    path = folder / NAME
    if not path.exists():
        return None
    arrays, facts = map_arrays(path)
    if not is_fresh(folder, facts) or facts["sample_rate"] != sample_rate:
        return None
    return Columns.from_arrays(arrays, facts)


def describe_tables(folder: Path) -> dict[str, list[object]]:
    """[size, time of change, sha256] of each table, by which `is_fresh` knows them again."""
    described: dict[str, list[object]] = {}
    for name in TABLES:
        if (folder / name).exists():
            stat = (folder / name).stat()
            described[name] = [stat.st_size, stat.st_mtime_ns, file_sha256(folder / name)]
    return described


def is_fresh(folder: Path, facts: Mapping[str, object]) -> bool:
    """Whether the tables are those that were described; content decides where times differ."""
    known = facts.get("tables")
    if not isinstance(known, dict):
        return False
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
    """The columns from the tables."""
    rows = read_in_step(folder, sample_rate=sample_rate) or _read_rows(folder, sample_rate)
    columns = Columns(**rows._asdict(), sample_rate=sample_rate, sha256="")
    return Columns(**{**vars(columns), "sha256": _digest(columns)})


def _digest(columns: Columns) -> str:
    digest = hashlib.sha256("\n".join(columns.speakers).encode())
    for column in (columns.ids.blob, columns.ids.ends, columns.start_N):
        digest.update(column.data)
    digest.update(columns.num_samples_N.data)
    digest.update(columns.speaker_N.data)
    return digest.hexdigest()


def _read_rows(folder: Path, sample_rate: int) -> Rows:
    """The rows of tables in any order, with or without segments."""
    rows = _list_rows(folder, sample_rate)
    rows.sort()
    speakers = tuple(sorted({row[3] for row in rows}))
    index = {speaker: i for i, speaker in enumerate(speakers)}
    paths = list(dict.fromkeys(row[2] for row in rows))
    file_index = {path: i for i, path in enumerate(paths)}
    return Rows(
        ids=Strings.of(row[1] for row in rows),
        hash_N=np.array([row[0] for row in rows], dtype=np.uint64),
        files=Paths.of(paths),
        file_N=np.array([file_index[row[2]] for row in rows], dtype=np.int32),
        start_N=np.array([row[4] for row in rows], dtype=np.int64),
        num_samples_N=np.array([row[5] for row in rows], dtype=np.int64),
        speaker_N=np.array([index[row[3]] for row in rows], dtype=np.int32),
        speakers=speakers,
    )


def _list_rows(folder: Path, sample_rate: int) -> list[tuple[int, str, str, str, int, int]]:
    """(hash, id, path, speaker, first sample, number of samples) of each utterance kept."""
    if not (folder / "utt2dur").exists():
        raise FileNotFoundError(
            f"{folder}: has not been checked, got no utt2dur; run stage 1, or `speakerlab check`"
        )
    wavs, seconds = read_table(folder / "wav.scp"), read_table(folder / "utt2dur")
    speakers = read_table(folder / "utt2spk") if (folder / "utt2spk").exists() else {}
    segments = read_segments(folder / "segments")
    rejected = read_rejected(folder)
    utterances = (segments or wavs).keys()
    changed = (utterances - seconds.keys() - rejected.keys()) | (seconds.keys() - utterances)
    if changed:
        raise ValueError(
            f"{folder}: has changed since it was checked, got {min(changed)}; run stage 1, or "
            "`speakerlab check`"
        )
    nobody = seconds.keys() - speakers.keys() - rejected.keys() if speakers else set()
    if nobody:
        raise ValueError(
            f"{folder}/utt2spk: an utterance has no speaker, got {min(nobody)}; add its line"
        )
    rows = []
    for utterance, duration in seconds.items():
        if utterance in rejected:
            continue
        recording, start, _ = segments.get(utterance, (utterance, 0.0, 0.0))
        rows.append(
            (
                stable_hash(utterance),
                utterance,
                wavs[recording],
                speakers.get(utterance, utterance),
                round(start * sample_rate),
                round(float(duration) * sample_rate),
            )
        )
    return rows
