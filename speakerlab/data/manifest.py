"""Kaldi data directories on disk, and the compact columns that training reads them into.

A data directory holds `wav.scp` (id path), `utt2spk` (id speaker), `utt2dur` (id seconds), where
recordings are cut up `segments` (id recording start end, in seconds), `trials*` where it is a test
set, and `rejected.tsv` (id, path, reason) of utterances to leave out. Letters: N utterances.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakerlab.atomic import write_text
from speakerlab.faults import Faults

Trial = tuple[str, str, bool]  # enrolment id, test id, same speaker


class Strings(Sequence[str]):
    """Many strings in two arrays, which forked workers share without a copy."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode() for string in strings]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self.blob, self.ends = np.frombuffer(b"".join(encoded), dtype=np.uint8), ends

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.blob[self.ends[index] : self.ends[index + 1]].tobytes().decode()


@dataclass(frozen=True)
class Manifest:
    """Utterances as columns; rows are ordered by a hash of their id, so order has no meaning."""

    ids: Strings
    paths: Strings
    start_N: np.ndarray  # int64, first sample within the file
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32, index into `speakers`
    speakers: tuple[str, ...]  # sorted
    sample_rate: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def hours(self) -> float:
        return float(self.num_samples_N.sum()) / self.sample_rate / 3600

    def sha256(self) -> str:
        """Of everything but the paths, which may differ between hosts."""
        digest = hashlib.sha256("\n".join(self.speakers).encode())
        for column in (self.ids.blob, self.ids.ends, self.start_N, self.num_samples_N):
            digest.update(column.tobytes())
        digest.update(self.speaker_N.tobytes())
        return digest.hexdigest()

    def of_speakers(self, wanted: Iterable[str]) -> "Manifest":
        """The utterances of these speakers alone, labels counted anew."""
        speakers = tuple(sorted(wanted))
        index = {speaker: i for i, speaker in enumerate(speakers)}
        new_index = np.array([index.get(speaker, -1) for speaker in self.speakers], dtype=np.int32)
        rows = np.flatnonzero(new_index[self.speaker_N] >= 0)
        return Manifest(
            ids=Strings(self.ids[int(row)] for row in rows),
            paths=Strings(self.paths[int(row)] for row in rows),
            start_N=self.start_N[rows],
            num_samples_N=self.num_samples_N[rows],
            speaker_N=new_index[self.speaker_N[rows]],
            speakers=speakers,
            sample_rate=self.sample_rate,
        )


def stable_hash(text: str) -> int:
    """64 bits that depend on the text alone: on no seed, process or machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def split_valid(manifest: Manifest, num_speakers: int) -> tuple[Manifest, Manifest]:
    """(training, validation): `num_speakers` speakers, the same for every seed, are taken out."""
    if num_speakers > len(manifest.speakers) - 2:
        raise ValueError(
            f"data.valid_speakers: must leave at least 2 of {len(manifest.speakers)} speakers to "
            f"train on, got {num_speakers}; lower it (0 is allowed)"
        )
    order = sorted(manifest.speakers, key=lambda speaker: stable_hash(f"valid:{speaker}"))
    return (
        manifest.of_speakers(order[num_speakers:]),
        manifest.of_speakers(order[:num_speakers]),
    )


def read_manifest(dirs: Sequence[Path], *, sample_rate: int) -> Manifest:
    """Read checked data directories as one set.

    Raises FileNotFoundError where a directory was not checked (no utt2dur), ValueError where two
    directories share an id.
    """
    rows: list[tuple[int, str, str, str, int, int]] = []
    for folder in dirs:
        rows += _read_rows(folder, sample_rate)
    rows.sort()
    ids = [row[1] for row in rows]
    if len(set(ids)) < len(ids):
        twice = next(a for a, b in zip(sorted(ids), sorted(ids)[1:]) if a == b)
        raise ValueError(
            f"{' + '.join(map(str, dirs))}: an id stands in two directories, got {twice}; "
            "prefix the ids of one of them"
        )
    speakers = tuple(sorted({row[3] for row in rows}))
    index = {speaker: i for i, speaker in enumerate(speakers)}
    return Manifest(
        ids=Strings(ids),
        paths=Strings(row[2] for row in rows),
        start_N=np.array([row[4] for row in rows], dtype=np.int64),
        num_samples_N=np.array([row[5] for row in rows], dtype=np.int64),
        speaker_N=np.array([index[row[3]] for row in rows], dtype=np.int32),
        speakers=speakers,
        sample_rate=sample_rate,
    )


def _read_rows(folder: Path, sample_rate: int) -> list[tuple[int, str, str, str, int, int]]:
    """(hash, id, path, speaker, first sample, number of samples) of each utterance kept."""
    if not (folder / "utt2dur").exists():
        raise FileNotFoundError(
            f"{folder}: has not been checked, got no utt2dur; run stage 1, or `speakerlab check`"
        )
    wavs, seconds = read_table(folder / "wav.scp"), read_table(folder / "utt2dur")
    speakers = read_table(folder / "utt2spk") if (folder / "utt2spk").exists() else {}
    segments = read_segments(folder / "segments")
    rejected = read_rejected(folder)
    changed = (segments or wavs).keys() ^ (seconds.keys() | rejected.keys())
    if changed:
        raise ValueError(
            f"{folder}: has changed since it was checked, got {min(changed)}; run stage 1, or "
            "`speakerlab check`"
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


def read_table(path: Path, faults: Faults | None = None) -> dict[str, str]:
    """A Kaldi table: the first word of a line is the key, the rest its value.

    Duplicate keys and lines without a value go to `faults`, or raise ValueError without it.
    """
    own = Faults() if faults is None else faults
    table: dict[str, str] = {}
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; run stage 1 first")
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if "\ufffd" in line:
                text = f"{path}:{number}: is not UTF-8, got '{line.strip()}'; save it as UTF-8"
                own.add("lines of another encoding", text)
                continue
            key, value = (*line.split(maxsplit=1), "", "")[:2]
            if not key:
                continue
            if not value:
                own.add(
                    "bad lines", f"{path}:{number}: has no value, got '{key}'; write 'id value'"
                )
            elif key in table:
                own.add("duplicate ids", f"{path}:{number}: duplicate id, got {key}; keep one line")
            else:
                table[key] = value.strip()
    if faults is None:
        own.raise_if_any(f"{path}: refused")
    return table


def read_segments(path: Path, faults: Faults | None = None) -> dict[str, tuple[str, float, float]]:
    """`segments`: id -> (recording, start, end) in seconds; empty where there is no such file."""
    if not path.exists():
        return {}
    own = Faults() if faults is None else faults
    segments: dict[str, tuple[str, float, float]] = {}
    for utterance, text in read_table(path, own).items():
        try:
            recording, start, end = text.split()
            segments[utterance] = (recording, float(start), float(end))
        except ValueError:
            own.add(
                "bad lines",
                f"{path}: segment {utterance} is not 'recording start end', got '{text}'; mend it",
            )
    if faults is None:
        own.raise_if_any(f"{path}: refused")
    return segments


def read_rejected(folder: Path) -> dict[str, str]:
    """`rejected.tsv`: id -> reason; empty where nothing was rejected."""
    path = folder / "rejected.tsv"
    if not path.exists():
        return {}
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return {row[0]: row[-1] for row in rows}


def write_table(path: Path, table: Mapping[str, str]) -> None:
    """Write a Kaldi table sorted by key, whole or not at all."""
    write_text(path, "".join(f"{key} {table[key]}\n" for key in sorted(table)))


def write_data_dir(
    folder: Path,
    *,
    wavs: Mapping[str, Path | str],
    speakers: Mapping[str, str] | None = None,
    segments: Mapping[str, tuple[str, float, float]] | None = None,
    trials: Mapping[str, Iterable[Trial]] | None = None,
) -> None:
    """Write a data directory, replacing one that is there; `trials` maps file name to its lines.

    wavs: id (of the recording, where there are segments) -> audio file, made absolute.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "wav.scp").exists():
        raise ValueError(
            f"{folder}: is not a data directory and would be replaced, got a folder without "
            "wav.scp; give another --data"
        )
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_table(fresh / "wav.scp", {key: str(Path(wav).resolve()) for key, wav in wavs.items()})
    if speakers is not None:
        write_table(fresh / "utt2spk", speakers)
    if segments is not None:
        rows = {key: f"{rec} {start:.6f} {end:.6f}" for key, (rec, start, end) in segments.items()}
        write_table(fresh / "segments", rows)
    for name, rows in (trials or {}).items():
        words = ("nontarget", "target")
        text = "".join(f"{enrol} {test} {words[same]}\n" for enrol, test, same in rows)
        write_text(fresh / name, text)
    if folder.exists():
        shutil.rmtree(folder)
    fresh.replace(folder)
