"""Manifest: the utterances of several data directories as one set.

In: checked data directories. Out: `Manifest`, whose rows are ordered by a hash of the utterance id
and read from shards where a directory has been packed, else from the recordings themselves.
Letters: N utterances, P directories, S samples, T frames, F mel bins.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from speakerlab.data import audio
from speakerlab.data.arrays import Strings, stable_hash
from speakerlab.data.codecs import reencode
from speakerlab.data.shards import FEATURES, WAVES, Packed, is_packed, keep, read_packed
from speakerlab.data.tables import read_durations, read_rejected, read_segments, read_table

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Columns:
    """One data directory; rows are ordered by a hash of their id, so order has no meaning."""

    ids: Strings
    hash_N: np.ndarray  # uint64, rising
    paths: Strings  # of the recording that each utterance is (a part of)
    start_N: np.ndarray  # int64, first sample within the recording
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32, index into `speakers`
    speakers: Strings  # sorted
    sha256: str = ""  # of everything but the paths, which may differ between hosts
    waves: Packed | None = None  # where it is packed
    features: Packed | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Texts(Sequence[str]):
    """One string a row, looked up when it is asked for."""

    def __init__(self, length: int, get: Callable[[int], str]) -> None:
        self.length, self.get = length, get

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.get(range(self.length)[index])


@dataclass(frozen=True, eq=False)
class Manifest:
    """Utterances as columns; strings are looked up in the part that a row belongs to."""

    parts: tuple[Columns, ...]
    part_N: np.ndarray  # int16, index into `parts`
    row_N: np.ndarray  # int32, row within the part
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32, index into `speakers`
    speakers: tuple[str, ...]  # sorted; the classes of another table after `labels.label`
    sample_rate: int

    def __len__(self) -> int:
        return len(self.row_N)

    @property
    def hours(self) -> float:
        return float(self.num_samples_N.sum()) / self.sample_rate / 3600

    @property
    def ids(self) -> Texts:
        return Texts(len(self), lambda row: self._part(row).ids[int(self.row_N[row])])

    @property
    def paths(self) -> Texts:
        """Return the recording that each utterance is (a part of), packed or not."""
        return Texts(len(self), lambda row: self._part(row).paths[int(self.row_N[row])])

    def read(self, row: int, first: int, num_samples: int) -> np.ndarray:
        """Read wave_S, int16: `num_samples` from `first` on; a shorter utterance is repeated.

        Raises ValueError and FileNotFoundError with one line where the audio is not as it was.
        """
        part, own = self._part(row), int(self.row_N[row])
        count = min(num_samples, int(self.num_samples_N[row]) - first)
        if part.waves is not None:
            wave_S = part.waves.read(own, first, count)
        else:
            wave_S = audio.read(part.paths[own], int(part.start_N[own]) + first, count)
        return wave_S if count == num_samples else np.resize(wave_S, num_samples)

    def read_features(self, row: int, first: int, num_frames: int) -> np.ndarray:
        """Read feats_TF, float32: `num_frames` from `first` on; a shorter utterance is repeated."""
        part, own = self._part(row), int(self.row_N[row])
        assert part.features is not None
        count = min(num_frames, int(part.features.num_units_N[own]) - first)
        feats_TF = part.features.read(own, first, count)
        shape = (num_frames, feats_TF.shape[1])
        return feats_TF if count == num_frames else np.resize(feats_TF, shape)

    def sha256(self) -> str:
        """Hash everything but the paths, which may differ between hosts, packed or not."""
        digest = hashlib.sha256("\n".join(self.speakers).encode())
        for sha256 in sorted(part.sha256 for part in self.parts):
            digest.update(sha256.encode())
        hash_N = np.empty(len(self), dtype=np.uint64)
        for index, part in enumerate(self.parts):
            own_N = self.part_N == index
            hash_N[own_N] = part.hash_N[self.row_N[own_N]]
        digest.update(hash_N.data)
        digest.update(np.ascontiguousarray(self.speaker_N).data)
        return digest.hexdigest()

    def of_speakers(self, wanted: Iterable[str]) -> "Manifest":
        """Return the utterances of these speakers, numbered from 0 again."""
        speakers = tuple(sorted(wanted))
        index = {speaker: i for i, speaker in enumerate(speakers)}
        new_index = np.array([index.get(speaker, -1) for speaker in self.speakers], dtype=np.int32)
        found = self.of_rows(np.flatnonzero(new_index[self.speaker_N] >= 0))
        return replace(found, speaker_N=new_index[found.speaker_N], speakers=speakers)

    def of_rows(self, rows: np.ndarray) -> "Manifest":
        """Return these utterances; the speakers keep their numbers."""
        return replace(
            self,
            part_N=self.part_N[rows],
            row_N=self.row_N[rows],
            num_samples_N=self.num_samples_N[rows],
            speaker_N=self.speaker_N[rows],
        )

    def _part(self, row: int) -> Columns:
        return self.parts[self.part_N[row]]


@dataclass(frozen=True)
class Piece:
    """A range of an utterance that is embedded as a whole."""

    manifest: Manifest
    row: int
    start: int  # sample
    num_samples: int
    codec: str = ""  # that it is encoded and decoded by, one of `CODECS`

    def read(self) -> np.ndarray:
        """Read wave_S, int16."""
        wave_S = self.manifest.read(self.row, self.start, self.num_samples)
        if not self.codec:
            return wave_S
        return reencode(wave_S, self.codec, sample_rate=self.manifest.sample_rate)


def split_valid(manifest: Manifest, num_speakers: int) -> tuple[Manifest, Manifest]:
    """Return (training, validation) after taking out `num_speakers`, the same for every seed."""
    if num_speakers > len(manifest.speakers) - 2:
        raise ValueError(
            f"data.valid_speakers: must leave at least 2 of {len(manifest.speakers)} speakers to "
            f"train on, got {num_speakers}; lower it (0 is allowed)"
        )
    order = sorted(manifest.speakers, key=lambda speaker: stable_hash(f"valid:{speaker}"))
    train, valid = order[num_speakers:], order[:num_speakers]
    return manifest.of_speakers(train), manifest.of_speakers(valid)


def read_manifest(dirs: Sequence[Path], *, sample_rate: int) -> Manifest:
    """Read checked data directories as one set.

    Raises FileNotFoundError where a directory was not checked (no utt2dur), ValueError where two
    directories share an id.
    """
    parts = [read_part(folder, sample_rate=sample_rate) for folder in dirs]
    speakers = tuple(sorted({speaker for part in parts for speaker in part.speakers}))
    index = {speaker: i for i, speaker in enumerate(speakers)}
    renamed = [np.array([index[s] for s in part.speakers], dtype=np.int32) for part in parts]
    whole = Manifest(
        parts=tuple(parts),
        part_N=np.repeat(np.arange(len(parts), dtype=np.int16), [len(part) for part in parts]),
        row_N=np.concatenate([np.arange(len(part), dtype=np.int32) for part in parts]),
        num_samples_N=np.concatenate([part.num_samples_N for part in parts]),
        speaker_N=np.concatenate([new[part.speaker_N] for new, part in zip(renamed, parts)]),
        speakers=speakers,
        sample_rate=sample_rate,
    )
    hash_N = np.concatenate([part.hash_N for part in parts])
    order_N = np.argsort(hash_N, kind="stable")
    manifest, hash_N = whole.of_rows(order_N), hash_N[order_N]
    neighbours = np.flatnonzero(hash_N[1:] == hash_N[:-1]).tolist()  # equal ids, equal hashes
    twins = [manifest.ids[i] for i in neighbours if manifest.ids[i] == manifest.ids[i + 1]]
    if twins:
        raise ValueError(
            f"{' + '.join(map(str, dirs))}: {min(twins)} is in two directories; "
            "prefix the ids of one of them"
        )
    return manifest


def read_part(folder: Path, *, sample_rate: int) -> Columns:
    """Return a directory's columns, and the shards that were packed from just these."""
    columns = read_columns(folder, sample_rate=sample_rate)
    if is_packed(folder):
        keep(folder.resolve())
    packed: list[Packed | None] = []
    for name in (WAVES, FEATURES):
        found = read_packed(folder / name)
        if found is not None and found.sha256 != columns.sha256:
            log.warning(
                "%s: the tables have changed since packing; reading the recordings instead; run "
                "stage 2 again",
                found.folder,
            )
            found = None
        packed.append(found)
    return replace(columns, waves=packed[0], features=packed[1])


def read_columns(folder: Path, *, sample_rate: int) -> Columns:
    """Read the tables of a checked data directory.

    Raises FileNotFoundError where it was not checked, ValueError where it has changed since.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: does not exist; check the path, or run stage 1")
    if not (folder / "utt2dur").exists():
        raise FileNotFoundError(
            f"{folder}: has not been checked (no utt2dur); run stage 1, or `speakerlab check`"
        )
    wavs, seconds = read_table(folder / "wav.scp"), read_durations(folder)
    segments, rejected = read_segments(folder / "segments"), read_rejected(folder)
    utterances, kept = (segments or wavs).keys(), seconds.keys() - rejected.keys()
    changed = (utterances - seconds.keys() - rejected.keys()) | (seconds.keys() - utterances)
    if changed:
        table = "segments" if segments else "wav.scp"
        raise ValueError(
            f"{folder}/{table}: its utterances are not those of {folder}/utt2dur, e.g. "
            f"{min(changed)}; run stage 1, or `speakerlab check`"
        )
    speakers = {utterance: utterance for utterance in kept}
    if (folder / "utt2spk").exists():
        speakers = read_table(folder / "utt2spk")
    if unknown := kept - speakers.keys():
        raise ValueError(f"{folder}/utt2spk: {min(unknown)} has no speaker; add its line")
    order = sorted(sorted(kept), key=stable_hash)
    parts = [segments.get(utterance, (utterance, 0.0, 0.0)) for utterance in order]
    if lacking := {recording for recording, _, _ in parts} - wavs.keys():
        raise ValueError(f"{folder}/wav.scp: lacks the recording {min(lacking)}; add its line")
    names = sorted({speakers[utterance] for utterance in order})
    index = {speaker: i for i, speaker in enumerate(names)}
    lengths = [round(seconds[utterance] * sample_rate) for utterance in order]
    columns = Columns(
        ids=(ids := Strings.of(order)),
        hash_N=np.array(list(map(stable_hash, order)), dtype=np.uint64),
        paths=Strings.of(wavs[recording] for recording, _, _ in parts),
        start_N=np.array([round(start * sample_rate) for _, start, _ in parts], dtype=np.int64),
        num_samples_N=np.array(lengths, dtype=np.int64),
        speaker_N=np.array([index[speakers[utterance]] for utterance in order], dtype=np.int32),
        speakers=Strings.of(names),
    )
    digest = hashlib.sha256("\n".join(names).encode())
    for column in (ids.blob, ids.ends, columns.start_N, columns.num_samples_N, columns.speaker_N):
        digest.update(column.data)
    return replace(columns, sha256=digest.hexdigest())
