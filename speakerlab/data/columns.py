"""The tables of a data directory as columns, read from text or from arrays beside it.

`speakerlab pack` stores the columns as arrays in `.columns/`. They are mapped into memory, so that
ten million utterances open at once, and the processes of a host share their pages. The text tables
stay the source of truth: arrays of other tables, by size and time or else by content, are ignored.
Letters: N utterances.
"""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.core import done
from speakerlab.core.atomic import replacing_folder, write_text
from speakerlab.core.reading import keys, read_json
from speakerlab.data.arrays import Strings, stable_hash
from speakerlab.data.shards import Packed
from speakerlab.data.tables import (
    read_durations,
    read_rejected,
    read_segments,
    read_table,
)

log = logging.getLogger(__name__)
CHECKED = ".checked"  # record of the last check of a directory (data/checked.py)
STORED = ".columns"  # the folder of the arrays
FACTS = "facts.json"  # in it: what they were made from; written last
# Tables that the columns depend on.
TABLES = ("wav.scp", "segments", "utt2spk", "utt2dur", "rejected.tsv")
STRINGS = ("ids", "paths", "speakers")
ARRAYS = ("hash_N", "start_N", "num_samples_N", "speaker_N")
LIKE = keys(sample_rate=int, stamps=list, digests=list, sha256=str)


@dataclass(frozen=True, eq=False)
class Columns:
    """One data directory; rows are ordered by a hash of their id, so order has no meaning."""

    ids: Strings
    hash_N: np.ndarray  # uint64, rising
    paths: Strings  # of the recording that contains each utterance
    start_N: np.ndarray  # int64, first sample within the recording
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32, index into `speakers`
    speakers: Strings  # sorted
    sha256: str = ""  # of everything but the paths, which may differ between hosts
    waves: Packed | None = None  # where it is packed
    features: Packed | None = None

    def __len__(self) -> int:
        return len(self.ids)


def read_columns(folder: Path, *, sample_rate: int) -> Columns:
    """Return the columns of a checked data directory: the stored ones, or from its text tables.

    Raises FileNotFoundError where it was not checked, ValueError where it has changed since.
    """
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder}: does not exist; check the path, or prepare the data"
        )
    if not (folder / "utt2dur").exists():
        raise FileNotFoundError(
            f"{folder}: has not been checked (no utt2dur); run `speakerlab check"
            f" {folder}`"
        )
    _refuse_other_rate(folder, sample_rate)
    stored = _read_stored(folder, sample_rate)
    if stored is not None:
        return stored
    return _parse(folder, sample_rate)


def _parse(folder: Path, sample_rate: int) -> Columns:
    """Read the text tables."""
    wavs = read_table(folder / "wav.scp")
    seconds = read_durations(folder)
    segments = read_segments(folder / "segments")
    rejected = read_rejected(folder)

    # The check gave each utterance of the tables either a duration or a rejection.
    table_of_ids = segments or wavs
    listed = table_of_ids.keys()
    checked = seconds.keys() | rejected.keys()
    unchecked = listed - checked
    unlisted = seconds.keys() - listed
    changed = unchecked | unlisted
    if changed:
        table = "segments" if segments else "wav.scp"
        raise ValueError(
            f"{folder}/{table}: its utterances are not those of {folder}/utt2dur, e.g. "
            f"{min(changed)}; run `speakerlab check {folder}`"
        )
    utterances = seconds.keys() - rejected.keys()

    # Without utt2spk (noise, rooms) each utterance is its own speaker.
    speaker_of = {utterance: utterance for utterance in utterances}
    if (folder / "utt2spk").exists():
        speaker_of = read_table(folder / "utt2spk")
    without_speaker = utterances - speaker_of.keys()
    if without_speaker:
        raise ValueError(
            f"{folder}/utt2spk: {min(without_speaker)} has no speaker; add its line"
        )

    # Sorted by id first, so that two ids with equal hashes have an order too.
    ids = sorted(sorted(utterances), key=stable_hash)
    recordings: list[str] = []
    starts: list[int] = []  # in samples
    for utterance in ids:
        recording = utterance
        start = 0.0
        if segments:
            recording, start, _ = segments[utterance]
        recordings.append(recording)
        starts.append(round(start * sample_rate))
    missing_recordings = set(recordings) - wavs.keys()
    if missing_recordings:
        raise ValueError(
            f"{folder}/wav.scp: lacks the recording {min(missing_recordings)}; add its"
            " line"
        )

    # Speakers whose utterances are all rejected get no number.
    speaker_of_row = [speaker_of[utterance] for utterance in ids]
    speakers = sorted(set(speaker_of_row))
    number_of = {speaker: number for number, speaker in enumerate(speakers)}
    speaker_numbers = [number_of[speaker] for speaker in speaker_of_row]
    hashes = [stable_hash(utterance) for utterance in ids]
    paths = [wavs[recording] for recording in recordings]
    lengths: list[int] = []  # in samples
    for utterance in ids:
        num_samples = round(seconds[utterance] * sample_rate)
        lengths.append(num_samples)
    columns = Columns(
        ids=Strings.of(ids),
        hash_N=np.array(hashes, np.uint64),
        paths=Strings.of(paths),
        start_N=np.array(starts, np.int64),
        num_samples_N=np.array(lengths, np.int64),
        speaker_N=np.array(speaker_numbers, np.int32),
        speakers=Strings.of(speakers),
    )

    return replace(columns, sha256=_digest_of(columns))


def store_columns(folder: Path, *, sample_rate: int) -> None:
    """Write the columns of a directory as arrays, unless they are stored already."""
    if _read_stored(folder, sample_rate) is not None:
        return
    # Stamped before reading, so that a change meanwhile makes the arrays invalid.
    facts = {
        "sample_rate": sample_rate,
        "stamps": _stamps(folder),
        "digests": _digests(folder),
    }
    columns = _parse(folder, sample_rate)
    with replacing_folder(folder / STORED) as fresh:
        for name in STRINGS:
            strings: Strings = getattr(columns, name)
            np.save(fresh / f"{name}.blob.npy", strings.blob)
            np.save(fresh / f"{name}.ends.npy", strings.ends)
        for name in ARRAYS:
            np.save(fresh / f"{name}.npy", getattr(columns, name))
        write_text(fresh / FACTS, json.dumps({**facts, "sha256": columns.sha256}))


def _read_stored(folder: Path, sample_rate: int) -> Columns | None:
    """Map the stored columns into memory; None if there are none of the present tables."""
    place = folder / STORED
    if not (place / FACTS).exists():
        return None
    try:
        facts = read_json(place / FACTS, dict[str, Any], like=LIKE)
        is_same_rate = facts["sample_rate"] == sample_rate
        if not is_same_rate or not _are_of_tables(facts, folder):
            log.info(
                "%s: is of other tables; reading the text tables, which takes longer;"
                " `speakerlab pack %s` stores them again",
                place,
                folder,
            )
            return None
        columns: dict[str, Any] = {}
        for name in STRINGS:
            blob = _map(place / f"{name}.blob.npy")
            ends = _map(place / f"{name}.ends.npy")
            columns[name] = Strings(blob, ends)
        for name in ARRAYS:
            columns[name] = _map(place / f"{name}.npy")
        return Columns(**columns, sha256=facts["sha256"])
    except (ValueError, OSError) as error:
        log.warning("%s: cannot be read (%s); reading the text tables", place, error)
        return None


def _are_of_tables(facts: dict[str, Any], folder: Path) -> bool:
    """Return whether stored columns are of the present tables of a directory."""
    if facts["stamps"] == _stamps(folder):
        return True
    # The tables of a copy have the same content, but other times.
    return facts["digests"] == _digests(folder)


def _map(path: Path) -> np.ndarray:
    """Map an array into memory; its pages are read when they are used, and shared."""
    # Without the class memmap, whose slices are slow.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _stamps(folder: Path) -> list[str]:
    """Return the size and time of each table."""
    return [done.stamp(folder / name) for name in TABLES]


def _digests(folder: Path) -> list[str]:
    """Return the SHA-256 of each table; a copy of a directory has the same."""
    with ThreadPoolExecutor(len(TABLES)) as threads:
        return list(threads.map(done.file_digest, [folder / name for name in TABLES]))


def copy_rate(folder: Path, out: Path) -> None:
    """Note in `out`, whose durations are from `folder`, the sample rate that these are of."""
    rate = done.read_record(folder / CHECKED).get("sample_rate")
    if rate is not None:
        note_rate(out, int(rate))


def note_rate(folder: Path, sample_rate: int) -> None:
    """Note the sample rate that the durations of a directory were computed at."""
    done.record(folder / CHECKED, {"sample_rate": sample_rate})


def _refuse_other_rate(folder: Path, sample_rate: int) -> None:
    """Raise ValueError if a directory was checked for another sample rate."""
    record = done.read_record(folder / CHECKED)
    checked_rate = record.get("sample_rate", str(sample_rate))
    if checked_rate != str(sample_rate):
        raise ValueError(
            f"{folder}: was checked for {checked_rate} Hz, but {sample_rate} Hz are"
            f" needed; run `speakerlab check {folder} --sample-rate {sample_rate}`, or"
            f" use a model of {checked_rate} Hz"
        )


def _digest_of(columns: Columns) -> str:
    """Return the SHA-256 of everything but the paths, which may differ between hosts."""
    speaker_lines = "\n".join(columns.speakers)
    digest = sha256(speaker_lines.encode())
    digest.update(columns.ids.blob.data)
    digest.update(columns.ids.ends.data)
    digest.update(columns.start_N.data)
    digest.update(columns.num_samples_N.data)
    digest.update(columns.speaker_N.data)
    return digest.hexdigest()
