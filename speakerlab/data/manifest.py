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

from speakerlab.core import done
from speakerlab.core.counting import count_of
from speakerlab.data import audio
from speakerlab.data.arrays import stable_hash
from speakerlab.data.codecs import reencode
from speakerlab.data.columns import Columns, read_columns
from speakerlab.data.shards import (
    FEATURES,
    WAVES,
    Packed,
    hold_shards,
    is_packed,
    read_packed,
)

log = logging.getLogger(__name__)
# Utterances whose recordings are looked into, to notice other audio.
MAX_SAMPLED = 10_000


class Texts(Sequence[str]):
    """One string per row, looked up on access."""

    def __init__(self, length: int, get: Callable[[int], str]) -> None:
        self.length = length
        self.get = get

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        row = range(self.length)[index]  # negative indices, and IndexError
        return self.get(row)


@dataclass(frozen=True, eq=False)
class Manifest:
    """Utterances as columns; strings are looked up in the part that a row belongs to."""

    parts: tuple[Columns, ...]
    part_N: np.ndarray  # int16, index into `parts`
    row_N: np.ndarray  # int32, row within the part
    num_samples_N: np.ndarray  # int64
    speaker_N: np.ndarray  # int32, index into `speakers`
    speakers: tuple[str, ...]  # sorted; after `labels.label`, classes of another table
    sample_rate: int
    names: tuple[str, ...] = ()  # of the parts
    # Ids that occur in several parts: each then carries the name of its part.
    repeated: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.row_N)

    @property
    def hours(self) -> float:
        num_samples = float(self.num_samples_N.sum())
        return num_samples / self.sample_rate / 3600

    @property
    def ids(self) -> Texts:
        def get_id(row: int) -> str:
            part_row = int(self.row_N[row])
            utterance = self._part(row).ids[part_row]
            if utterance in self.repeated:
                return f"{self.names[self.part_N[row]]}/{utterance}"
            return utterance

        return Texts(len(self), get_id)

    @property
    def paths(self) -> Texts:
        """Return the path of the recording that contains each utterance, packed or not."""

        def get_path(row: int) -> str:
            part_row = int(self.row_N[row])
            return self._part(row).paths[part_row]

        return Texts(len(self), get_path)

    def read(self, row: int, first: int, num_samples: int) -> np.ndarray:
        """Read wave_S, int16: `num_samples` from `first` on; a shorter utterance is repeated.

        Raises ValueError or FileNotFoundError with one line if the audio has changed or is missing.
        """
        part = self._part(row)
        part_row = int(self.row_N[row])
        num_available = int(self.num_samples_N[row]) - first
        count = min(num_samples, num_available)
        if part.waves is not None:
            wave_S = part.waves.read(part_row, first, count)
        else:
            # An utterance may be a segment, which starts within its recording.
            path = part.paths[part_row]
            start = int(part.start_N[part_row]) + first
            wave_S = audio.read(path, start, count)
        if count == num_samples:
            return wave_S
        return np.resize(wave_S, num_samples)  # repeats the wave

    def read_features(self, row: int, first: int, num_frames: int) -> np.ndarray:
        """Read feats_TF, float32: `num_frames` from `first` on; a shorter utterance is repeated."""
        part = self._part(row)
        part_row = int(self.row_N[row])
        features = part.features
        assert features is not None
        num_available = int(features.num_units_N[part_row]) - first
        count = min(num_frames, num_available)
        feats_TF = features.read(part_row, first, count)
        if count == num_frames:
            return feats_TF
        num_mel_bins = feats_TF.shape[1]
        return np.resize(feats_TF, (num_frames, num_mel_bins))  # repeats the frames

    def sha256(self) -> str:
        """Hash everything but the paths, which may differ between hosts, packed or not."""
        speaker_lines = "\n".join(self.speakers)
        digest = hashlib.sha256(speaker_lines.encode())
        # Sorted, so that the order of the directories does not matter.
        part_digests = sorted(part.sha256 for part in self.parts)
        for part_digest in part_digests:
            digest.update(part_digest.encode())

        # The utterances, which may be a selection, and their classes.
        num_utterances = len(self)
        hash_N = np.empty(num_utterances, dtype=np.uint64)
        for index, part in enumerate(self.parts):
            is_in_part_N = self.part_N == index
            part_rows = self.row_N[is_in_part_N]
            hash_N[is_in_part_N] = part.hash_N[part_rows]
        digest.update(hash_N.data)
        speaker_N = np.ascontiguousarray(self.speaker_N)
        digest.update(speaker_N.data)
        return digest.hexdigest()

    def of_speakers(self, speakers: Iterable[str]) -> "Manifest":
        """Return the utterances of these speakers, numbered from 0 again."""
        sorted_speakers = tuple(sorted(speakers))
        # Old number of a speaker -> new number, -1 for a speaker who is left out.
        number_of = _number(sorted_speakers)
        number_list = [number_of.get(speaker, -1) for speaker in self.speakers]
        new_numbers = np.array(number_list, dtype=np.int32)
        is_chosen_N = new_numbers[self.speaker_N] >= 0
        selection = self.of_rows(np.flatnonzero(is_chosen_N))
        return replace(
            selection,
            speaker_N=new_numbers[selection.speaker_N],
            speakers=sorted_speakers,
        )

    def audio_digest(self) -> str | None:
        """Hash the size and some bytes of the recordings; None if one is missing.

        Of a large set, the first `MAX_SAMPLED` utterances are taken. Paths and times do not count:
        hosts may have copies.
        """
        num_sampled = min(len(self), MAX_SAMPLED)
        all_paths = self.paths
        paths = dict.fromkeys(all_paths[row] for row in range(num_sampled))
        samples = done.samples(list(paths))
        return done.digest(samples) if all(samples) else None

    def pieces(self) -> list["Piece"]:
        """Return every utterance as one piece."""
        pieces: list[Piece] = []
        for row, num_samples in enumerate(self.num_samples_N.tolist()):
            piece = Piece(self, row, start=0, num_samples=num_samples)
            pieces.append(piece)
        return pieces

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
        part_index = self.part_N[row]
        return self.parts[part_index]


@dataclass(frozen=True)
class Piece:
    """A range of an utterance that is embedded as a whole."""

    manifest: Manifest
    row: int
    start: int  # sample
    num_samples: int
    codec: str = ""  # to encode and decode it with, one of `CODECS`

    def read(self) -> np.ndarray:
        """Read wave_S, int16."""
        manifest = self.manifest
        wave_S = manifest.read(self.row, self.start, self.num_samples)
        if not self.codec:
            return wave_S
        return reencode(wave_S, self.codec, sample_rate=manifest.sample_rate)


def split_valid(manifest: Manifest, num_speakers: int) -> tuple[Manifest, Manifest]:
    """Return (training, validation) after taking out `num_speakers`, the same for every seed."""
    if num_speakers > len(manifest.speakers) - 2:
        raise ValueError(
            f"data.valid_speakers: must leave at least 2 of {len(manifest.speakers)}"
            f" speakers to train on, got {num_speakers}; lower it (0 is allowed)"
        )

    if len(manifest.parts) > 1:
        return split_valid_of_parts(manifest, num_speakers)
    speakers = sorted(manifest.speakers, key=_hash_for_validation)
    train = manifest.of_speakers(speakers[num_speakers:])
    valid = manifest.of_speakers(speakers[:num_speakers])
    return train, valid


def _hash_for_validation(speaker: str) -> int:
    """Hash a speaker: added or removed speakers do not change the order of the others."""
    return stable_hash(f"valid:{speaker}")


def split_valid_of_parts(
    manifest: Manifest, num_speakers: int
) -> tuple[Manifest, Manifest]:
    """Return (training, validation) after taking out speakers of every part.

    Parts give validation speakers in proportion to their numbers of speakers. A part of ten
    speakers or more gives at least two, so that there are trials within it. A speaker of several
    parts counts in the first.
    """
    speakers_of_parts: list[list[str]] = [[] for _ in manifest.parts]
    for speaker, part in zip(manifest.speakers, _first_parts(manifest)):
        speakers_of_parts[part].append(speaker)
    sizes = [len(speakers) for speakers in speakers_of_parts]
    valid_counts = _divide(num_speakers, sizes)
    valid: list[str] = []
    for speakers, count in zip(speakers_of_parts, valid_counts):
        by_hash = sorted(speakers, key=_hash_for_validation)
        valid += by_hash[:count]
    train = set(manifest.speakers) - set(valid)
    return manifest.of_speakers(train), manifest.of_speakers(valid)


def _first_parts(manifest: Manifest) -> list[int]:
    """Return the first part in which each speaker occurs."""
    first_parts = np.full(len(manifest.speakers), len(manifest.parts), dtype=np.int64)
    np.minimum.at(first_parts, manifest.speaker_N, manifest.part_N)
    return first_parts.tolist()


def _divide(total: int, sizes: Sequence[int]) -> list[int]:
    """Divide `total` validation speakers in proportion to the sizes of the parts.

    A single speaker has no non-target trials, so a part of ten or more gets at least two, and a
    smaller one none, or two or more. The largest part makes up for the difference. Where that is
    impossible, the numbers are only in proportion.
    """
    shares = [total * size / sum(sizes) for size in sizes]
    counts: list[int] = []
    for share, size in zip(shares, sizes):
        count = round(share)
        if count < 2:
            count = 2 if size >= 10 else 0
        counts.append(count)

    largest = sizes.index(max(sizes))
    counts[largest] += total - sum(counts)
    fewest = 2 if total >= 2 else 0
    # Other parts with more than two speakers may have to give some to the largest.
    while counts[largest] < fewest and max(counts) > 2:
        giver = counts.index(max(counts))
        counts[giver] -= 1
        counts[largest] += 1
    if fewest <= counts[largest] <= sizes[largest]:
        return counts
    return _round_shares(shares, total)


def _round_shares(shares: Sequence[float], total: int) -> list[int]:
    """Round shares to whole numbers whose sum is `total`: the largest remainders are rounded up."""
    counts = [int(share) for share in shares]
    remainders = [share - count for share, count in zip(shares, counts)]
    by_remainder = sorted(range(len(shares)), key=lambda index: -remainders[index])
    num_missing = total - sum(counts)
    for index in by_remainder[:num_missing]:
        counts[index] += 1
    return counts


def _number(speakers: Iterable[str]) -> dict[str, int]:
    """Return the number of each speaker, counted in this order from 0."""
    return {speaker: number for number, speaker in enumerate(speakers)}


def read_manifest(
    dirs: Sequence[Path],
    *,
    sample_rate: int,
    names: Sequence[str] | None = None,
    shares_speakers: Sequence[bool] | None = None,
) -> Manifest:
    """Read checked data directories as one set.

    An id of an utterance, or of a speaker, that occurs in several directories becomes NAME/id in
    each of them: they are different utterances and people. shares_speakers: directories whose
    speakers are those of the same ids in the others. names: of the directories; by default their
    paths. Raises FileNotFoundError where a directory was not checked (no utt2dur), ValueError where
    one recording is in two of them.
    """
    parts = [read_part(folder, sample_rate=sample_rate) for folder in dirs]
    part_names = tuple(names or map(str, dirs))
    speaker_names = name_speakers(
        [part.speakers for part in parts],
        part_names,
        shares_speakers or [False] * len(parts),
    )
    all_speakers: set[str] = set()
    for speakers_of_part in speaker_names:
        all_speakers.update(speakers_of_part)
    speakers = tuple(sorted(all_speakers))

    if len(parts) == 1:
        # Its rows and speakers are in order, and its arrays, which may be mapped files, are not
        # copied.
        (part,) = parts
        return Manifest(
            parts=(part,),
            part_N=np.zeros(len(part), dtype=np.int16),
            row_N=np.arange(len(part), dtype=np.int32),
            num_samples_N=part.num_samples_N,
            speaker_N=part.speaker_N,
            speakers=speakers,
            sample_rate=sample_rate,
            names=part_names,
        )

    # A directory numbers its own speakers; number the speakers of all directories together.
    number_of = _number(speakers)
    speaker_columns: list[np.ndarray] = []
    for part, speakers_of_part in zip(parts, speaker_names):
        number_list = [number_of[speaker] for speaker in speakers_of_part]
        new_numbers = np.array(number_list, dtype=np.int32)
        speaker_columns.append(new_numbers[part.speaker_N])

    row_columns = [np.arange(len(part), dtype=np.int32) for part in parts]
    length_columns = [part.num_samples_N for part in parts]
    part_indices = np.arange(len(parts), dtype=np.int16)
    part_sizes = [len(part) for part in parts]
    in_part_order = Manifest(
        parts=tuple(parts),
        part_N=np.repeat(part_indices, part_sizes),
        row_N=np.concatenate(row_columns),
        num_samples_N=np.concatenate(length_columns),
        speaker_N=np.concatenate(speaker_columns),
        speakers=speakers,
        sample_rate=sample_rate,
        names=part_names,
    )

    # The order of the hashes mixes the directories.
    hash_N = np.concatenate([part.hash_N for part in parts])
    order_N = np.argsort(hash_N, kind="stable")
    manifest = in_part_order.of_rows(order_N)

    repeated = _find_repeated(manifest, hash_N[order_N])
    return replace(manifest, repeated=frozenset(repeated))


def _find_repeated(manifest: Manifest, hash_N: np.ndarray) -> set[str]:
    """Return the ids that are in several directories, with different recordings; log them.

    hash_N: of the ids, rising. Raises ValueError for an id with one recording in two directories.
    """
    # Equal ids have equal hashes, so they are neighbours. By chance, different ids may also have
    # equal hashes.
    has_hash_of_next = hash_N[1:] == hash_N[:-1]
    suspect_rows = np.flatnonzero(has_hash_of_next)
    ids = manifest.ids
    paths = manifest.paths
    where = " + ".join(manifest.names)
    paths_of: dict[str, set[str]] = {}  # id that is repeated -> its recordings
    for row in suspect_rows.tolist():
        utterance = ids[row]
        if ids[row + 1] != utterance:
            continue
        known_paths = paths_of.setdefault(utterance, {paths[row]})
        path = paths[row + 1]
        # Two recordings are different utterances; one recording would be counted twice.
        if path in known_paths:
            raise ValueError(
                f"{where}: {utterance} is in two directories, with the same recording"
                f" ({path}); leave it out of one of them"
            )
        known_paths.add(path)
    repeated = set(paths_of)
    if repeated:
        log.warning(
            "%s: %s with the id of another one, such as %s: each carries the name of its"
            " directory from here on",
            where,
            count_of(len(repeated), "utterance"),
            min(repeated),
        )
    return repeated


def name_speakers(
    speakers_of: Sequence[Iterable[str]],
    names: Sequence[str],
    shares: Sequence[bool],
) -> list[list[str]]:
    """Return the name of each speaker of each directory: its id, or NAME/id where ids collide.

    shares: directories whose speakers are those of the same ids in the others. Raises ValueError
    if such a speaker may be either of two.
    """
    # Id -> directories that do not share it, in each of which it is another person.
    owners: dict[str, list[str]] = {}
    for speakers, name, is_shared in zip(speakers_of, names, shares):
        for speaker in speakers:
            directories = owners.setdefault(speaker, [])
            if not is_shared:
                directories.append(name)
    repeated = {speaker for speaker in owners if len(owners[speaker]) > 1}
    if not repeated:
        return [list(speakers) for speakers in speakers_of]

    where = " + ".join(names)
    log.warning(
        "%s: %s with the id of another one, such as %s, taken for different people; if they"
        " are the same, give all but one of the directories `speakers: shared` in"
        " data.train",
        where,
        count_of(len(repeated), "speaker"),
        min(repeated),
    )
    named: list[list[str]] = []
    for speakers, name, is_shared in zip(speakers_of, names, shares):
        names_of_part: list[str] = []
        for speaker in speakers:
            if speaker in repeated and is_shared:
                raise ValueError(
                    f"data.train: {speaker} of {name} shares its speakers, but is a"
                    f" different one in {' and '.join(owners[speaker])}; add `speakers:"
                    " shared` to all but one of them, or rename it"
                )
            is_repeated = speaker in repeated
            names_of_part.append(f"{name}/{speaker}" if is_repeated else speaker)
        named.append(names_of_part)
    return named


def read_part(folder: Path, *, sample_rate: int) -> Columns:
    """Return a directory's columns, and the shards if they were packed from exactly these."""
    columns = read_columns(folder, sample_rate=sample_rate)
    # Lock before reading the index: no `speakerlab pack` may replace the shards from here on.
    if is_packed(folder):
        hold_shards(folder.resolve())
    return replace(
        columns,
        waves=_read_current(folder / WAVES, columns),
        features=_read_current(folder / FEATURES, columns),
    )


def _read_current(place: Path, columns: Columns) -> Packed | None:
    """Return the shards in a folder; None where there are none, or were packed from other rows."""
    shards = read_packed(place)
    if shards is None:
        return None
    # Shards are read by row: with other rows, an utterance would get the audio of another.
    if shards.sha256 != columns.sha256:
        log.warning(
            "%s: the tables have changed since packing; reading the recordings"
            " instead; run `speakerlab pack` again",
            shards.folder,
        )
        return None
    return shards


def is_other_audio(digest: str | None, other_digest: str | None) -> bool:
    """Return whether two digests of `Manifest.audio_digest` are known and differ.

    Recordings may be missing after packing, or on another host; older tables have no digest.
    """
    if digest is None or other_digest is None:
        return False
    return digest != other_digest
