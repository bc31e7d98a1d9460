"""Recordings for the choice of a model: read, limited, converted, and noisy.

In: a checked data directory, or a folder with a folder for each speaker. Out: manifests of the same
utterances at the rate of each model, and treatments of them.
Letters: N utterances, S samples.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speakerlab.core import done
from speakerlab.core.atomic import replacing
from speakerlab.core.counting import count_of
from speakerlab.core.system import available_cpus
from speakerlab.data import audio
from speakerlab.data.arrays import stable_hash
from speakerlab.data.banks import Recording
from speakerlab.data.check import check_data_dirs
from speakerlab.data.columns import CHECKED
from speakerlab.data.convert import read_wave
from speakerlab.data.listing import list_recordings
from speakerlab.data.manifest import Manifest, Piece, read_manifest
from speakerlab.data.tables import (
    Rejection,
    one_line,
    one_word,
    require_checked,
    write_data_dir,
    write_rejected,
)
from speakerlab.data.treatments import Treatment
from speakerlab.experiments.cleaning import find_copies

log = logging.getLogger(__name__)
NOISE = "noise of the test side"
USUAL_RATE = 16000
MAX_SAMPLE = 32767  # of int16
MAX_DRAWS = 100  # of a part of the noise, until one is not silent
AUDIO = "audio"  # folder of converted recordings
RECORDINGS = "recordings"  # data directories of them, one for each rate


@dataclass(frozen=True)
class Limits:
    """How much of a large directory is used."""

    utterances: int
    per_speaker: int


@dataclass(frozen=True, kw_only=True)
class NoisyPiece(Piece):
    """Part of an utterance to which noise was added as a whole, before it was converted."""

    treatment: "Noisy"

    def read(self) -> np.ndarray:
        utterance = self.manifest.ids[self.row]
        wave_S = self.treatment.read(utterance)
        base = self.treatment.base
        wave_S = _convert_rate(wave_S, base.sample_rate, self.manifest.sample_rate)
        return wave_S[self.start : self.start + self.num_samples]


@dataclass(frozen=True, kw_only=True)
class Noisy(Treatment):
    """Add noise to utterances; it depends only on their ids, also for models of other rates.

    The ratio is that of the mean powers of the whole utterance and its noise.
    """

    condition: str = NOISE
    base: Manifest  # the utterances before their conversion
    snr_db: float
    noises: Sequence[Recording] = ()  # of the rate of `base`; pink noise without any

    @property
    def name(self) -> str:
        noise = f"{self.snr_db:g}dB-{self.base.sample_rate}Hz"
        if not self.noises:
            return f"pink{noise}"
        names = [(noise.id, noise.num_samples) for noise in self.noises]
        return f"noise{noise}-{done.digest(names)[:8]}"

    @property
    def value(self) -> str:
        return f"{self.snr_db:g} dB"

    def apply(self, pieces: Sequence[Piece]) -> list[Piece]:
        noisy: list[Piece] = []
        for piece in super().apply(pieces):
            noisy_piece = NoisyPiece(
                manifest=piece.manifest,
                row=piece.row,
                start=piece.start,
                num_samples=piece.num_samples,
                treatment=self,
            )
            noisy.append(noisy_piece)
        return noisy

    def read(self, utterance: str) -> np.ndarray:
        """Return wave_S, int16, of an utterance with noise, at the rate of `base`."""
        row = self._row_of[utterance]
        num_samples = int(self.base.num_samples_N[row])
        wave_S = self.base.read(row, 0, num_samples).astype(np.float64)
        rng = np.random.default_rng(stable_hash(f"noise:{utterance}"))
        if self.noises:
            noise_S = _cut_noise(self.noises, rng, num_samples)
        else:
            noise_S = _pink_noise(rng, num_samples)
        snr = 10 ** (self.snr_db / 10)
        power = np.mean(wave_S**2)
        noise_power = np.mean(noise_S**2)
        wave_S += noise_S * np.sqrt(power / (snr * noise_power))
        # Quieter as a whole instead of clipped.
        peak = np.abs(wave_S).max()
        if peak > MAX_SAMPLE:
            wave_S *= MAX_SAMPLE / peak
        return np.round(wave_S).astype(np.int16)

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.base.ids)}


def _pink_noise(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Return noise whose power is proportional to 1 / frequency, like that of many rooms."""
    white_S = rng.standard_normal(num_samples)
    spectrum = np.fft.rfft(white_S)
    frequency = np.arange(len(spectrum))  # in units of the lowest
    spectrum[0] = 0  # no offset
    spectrum[1:] /= np.sqrt(frequency[1:])
    return np.fft.irfft(spectrum, num_samples)


def _cut_noise(
    noises: Sequence[Recording], rng: np.random.Generator, num_samples: int
) -> np.ndarray:
    """Return a random part of a random recording, which is repeated if it is too short.

    Silence is drawn again. Raises ValueError if all draws are silent.
    """
    path = ""
    for _ in range(MAX_DRAWS):
        noise = noises[int(rng.integers(len(noises)))]
        path = noise.path
        start = int(rng.integers(max(len(noise) - num_samples, 0) + 1))
        noise_S = noise[start : start + num_samples]
        if noise_S.any():
            return np.resize(noise_S, num_samples).astype(np.float64)
    raise ValueError(
        f"--noise: {MAX_DRAWS} parts of its recordings, drawn at random, are silent, such as"
        f" one of {path}; leave out silence"
    )


def choose_utterances(
    ids: Sequence[str], speakers: Sequence[str], limits: Limits
) -> list[int]:
    """Return the rows to use, in order: as many speakers as possible, evenly.

    The choice depends on the ids alone. Two utterances of each speaker come first, because one has
    no target trials, then the only ones of others, then a third of each speaker, and so on.
    """
    by_hash = sorted(range(len(ids)), key=lambda row: (stable_hash(ids[row]), row))
    num_utterances = Counter(speakers)
    num_seen = Counter[str]()
    # Row -> place in the order of the choice.
    places: dict[int, tuple[int, bool, int]] = {}
    for row in by_hash:
        speaker = speakers[row]
        # Of the utterance among those of its speaker, from 0.
        number = num_seen[speaker]
        num_seen[speaker] += 1
        if number < limits.per_speaker:
            # The first two utterances of a speaker are chosen together.
            round_number = max(number - 1, 0)
            is_alone = num_utterances[speaker] == 1
            places[row] = (round_number, is_alone, stable_hash(speaker))
    # The sort is stable: utterances in the same place keep the order of their hash.
    order = sorted(places, key=lambda row: places[row])
    return sorted(order[: limits.utterances])


def read_utterances(
    data: Path, out: Path, limits: Limits, *, sample_rate: int
) -> Manifest:
    """Return the utterances to use, without copies and recordings that cannot be read.

    sample_rate: that of a folder of speakers; a data directory keeps the rate of its check.
    Files that were left out are listed in `out`/rejected.tsv, and counted in the log.
    """
    rejected: dict[str, Rejection] = {}
    if (data / "wav.scp").exists() or not data.is_dir():
        manifest = _open_data_dir(data, limits)
    else:
        manifest = _open_folder(data, out, limits, rejected, sample_rate=sample_rate)
    readable = manifest.of_rows(_find_readable(manifest, rejected))
    remaining = _without_copies(readable, rejected)
    write_rejected(out, rejected)
    if rejected:
        log.warning(
            "%s: %s left out, listed in %s",
            data,
            count_of(len(rejected), "recording"),
            out / "rejected.tsv",
        )
    refuse_too_few(remaining, data)
    return remaining


def _open_data_dir(data: Path, limits: Limits) -> Manifest:
    """Return the chosen utterances of a checked data directory."""
    require_checked(data)
    labels = data / "utt2spk"
    if not labels.exists():
        raise FileNotFoundError(
            f"{labels}: does not exist; the choice of a model needs speaker labels"
        )
    rate = done.read_record(data / CHECKED).get("sample_rate", str(USUAL_RATE))
    manifest = read_manifest([data], sample_rate=int(rate))
    ids = list(manifest.ids)
    speakers = [manifest.speakers[number] for number in manifest.speaker_N.tolist()]
    rows = choose_utterances(ids, speakers, limits)
    report_limits(data, speakers, rows, limits)
    return manifest.of_rows(np.array(rows, np.int64))


def _open_folder(
    folder: Path,
    out: Path,
    limits: Limits,
    rejected: dict[str, Rejection],
    *,
    sample_rate: int,
) -> Manifest:
    """Convert the chosen recordings of a folder with a folder for each speaker."""
    paths = list_recordings(folder).recordings
    if not paths:
        raise ValueError(
            f"{folder}: has neither wav.scp nor recordings; give a data directory, or a"
            " folder with a folder of recordings for each speaker"
        )
    speakers = _speakers_of(paths, folder)
    ids: list[str] = []
    for path, speaker in zip(paths, speakers):
        name = path.relative_to(folder).as_posix()
        ids.append(f"{speaker}-{stable_hash(one_line(name)):016x}")
    rows = choose_utterances(ids, speakers, limits)
    report_limits(folder, speakers, rows, limits)

    def read(row: int) -> np.ndarray:
        wave_S = read_wave(paths[row], sample_rate=sample_rate, check_levels=False)
        return audio.to_int16(wave_S)

    sources = {ids[row]: str(paths[row].absolute()) for row in rows}
    reads = {ids[row]: lambda row=row: read(row) for row in rows}
    return _convert(
        reads,
        sources,
        {ids[row]: speakers[row] for row in rows},
        out,
        sample_rate=sample_rate,
        rejected=rejected,
    )


def _speakers_of(paths: Sequence[Path], folder: Path) -> list[str]:
    """Return the speaker of each recording: the name of its folder in `folder`, as one word."""
    speakers: list[str] = []
    folder_of: dict[str, str] = {}
    for path in paths:
        speaker_folder, *deeper = path.relative_to(folder).parts
        if not deeper:
            raise ValueError(
                f"{one_line(path)}: is not in the folder of a speaker; move it into one"
            )
        speaker = one_word(one_line(speaker_folder))
        other_folder = folder_of.setdefault(speaker, speaker_folder)
        if other_folder != speaker_folder:
            raise ValueError(
                f"{folder}: the speakers of the folders {other_folder!r} and"
                f" {speaker_folder!r} look alike; rename one of the folders"
            )
        speakers.append(speaker)
    return speakers


def _convert_rate(wave_S: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Return int16 samples at another rate."""
    if rate == new_rate:
        return wave_S
    import soxr

    float_S = wave_S.astype(np.float32) / audio.FULL_SCALE
    return audio.to_int16(soxr.resample(float_S, rate, new_rate))


def resampled(base: Manifest, out: Path, *, sample_rate: int) -> Manifest:
    """Return the same utterances at a model's rate, converted once."""
    if base.sample_rate == sample_rate:
        return base

    def read(row: int) -> np.ndarray:
        wave_S = base.read(row, 0, int(base.num_samples_N[row]))
        return _convert_rate(wave_S, base.sample_rate, sample_rate)

    ids = list(base.ids)
    speakers = [base.speakers[number] for number in base.speaker_N.tolist()]
    log.info(
        "%s: converted from %d to %d Hz for the models of this rate",
        count_of(len(ids), "utterance"),
        base.sample_rate,
        sample_rate,
    )
    rejected: dict[str, Rejection] = {}
    converted = _convert(
        {name: lambda row=row: read(row) for row, name in enumerate(ids)},
        {name: base.paths[row] for row, name in enumerate(ids)},
        dict(zip(ids, speakers)),
        out,
        sample_rate=sample_rate,
        rejected=rejected,
    )
    for path, reason in rejected.values():
        raise ValueError(f"{path}: cannot be converted ({reason}); correct it")
    return converted


def _convert(
    reads: Mapping[str, Callable[[], np.ndarray]],
    sources: Mapping[str, str],
    speakers: Mapping[str, str],
    out: Path,
    *,
    sample_rate: int,
    rejected: dict[str, Rejection],
) -> Manifest:
    """Write recordings as FLAC, and return the manifest of the files.

    Recordings that cannot be read are added to `rejected`. reads: id -> function that returns
    wave_S, int16. sources: id -> path of the recording, for messages, and to see whether it has
    changed: if not, an earlier conversion of it is kept.
    """

    def convert(name: str) -> Path | Exception:
        key = f"{sources[name]} {done.stamp(sources[name])} {name} {sample_rate}"
        target = out / AUDIO / f"{stable_hash(key):016x}.flac"
        if target.exists():
            return target
        try:
            wave_S = reads[name]()
        except (ValueError, OSError) as error:
            return error
        content = audio.encode(wave_S, sample_rate, "FLAC")
        with replacing(target) as partial:
            partial.write_bytes(content)
        return target

    wavs: dict[str, Path] = {}
    with ThreadPoolExecutor(available_cpus()) as pool:
        for name, result in zip(reads, pool.map(convert, reads)):
            if isinstance(result, Exception):
                rejected[name] = (sources[name], str(result))
            else:
                wavs[name] = result
    if not wavs:
        _, reason = next(iter(rejected.values()))
        raise ValueError(f"no recording can be read: {reason}")
    folder = out / RECORDINGS / str(sample_rate)
    write_data_dir(folder, wavs=wavs, speakers={name: speakers[name] for name in wavs})
    check_data_dirs([folder], sample_rate=sample_rate)
    return read_manifest([folder], sample_rate=sample_rate)


def report_limits(
    data: Path, speakers: Sequence[str], rows: Sequence[int], limits: Limits
) -> None:
    """Log how much of a directory is used, unless it is all of it."""
    if len(rows) == len(speakers):
        return
    chosen_speakers = {speakers[row] for row in rows}
    log.warning(
        "%s: %s of %d, of %d of %s, are used (--per-speaker %d, --utterances %d)",
        data,
        count_of(len(rows), "utterance"),
        len(speakers),
        len(chosen_speakers),
        count_of(len(set(speakers)), "speaker"),
        limits.per_speaker,
        limits.utterances,
    )


def _find_readable(
    manifest: Manifest, rejected: dict[str, Rejection]
) -> NDArray[np.int64]:
    """Return the rows whose audio can be read; add the others to `rejected`."""

    def fault_of(piece: Piece) -> Exception | None:
        try:
            piece.read()
        except (ValueError, OSError) as error:
            return error
        return None

    rows: list[int] = []
    with ThreadPoolExecutor(available_cpus()) as pool:
        for row, fault in enumerate(pool.map(fault_of, manifest.pieces())):
            if fault is None:
                rows.append(row)
            else:
                rejected[manifest.ids[row]] = (manifest.paths[row], str(fault))
    return np.array(rows, np.int64)


def _without_copies(manifest: Manifest, rejected: dict[str, Rejection]) -> Manifest:
    """Return the utterances without copies: of one speaker, the first stays; of several, none.

    A copy would be an easy target trial, or one with a wrong label.
    """
    is_left_out_N = np.zeros(len(manifest), bool)
    for same in find_copies(manifest, num_threads=available_cpus()):
        first, *others = same
        has_one_speaker = len({int(manifest.speaker_N[row]) for row in same}) == 1
        for row in others if has_one_speaker else same:
            is_left_out_N[row] = True
            reason = f"is a copy of {manifest.ids[first]}"
            if not has_one_speaker:
                reason = "is the same recording as that of another speaker"
            rejected[manifest.ids[row]] = (manifest.paths[row], reason)
    return manifest.of_rows(np.flatnonzero(~is_left_out_N))


def refuse_too_few(manifest: Manifest, data: Path) -> None:
    """Raise ValueError without two speakers, or without two utterances of any speaker."""
    num_of = Counter(manifest.speaker_N.tolist())
    if len(num_of) < 2:
        raise ValueError(
            f"{data}: has {count_of(len(num_of), 'speaker')}; an EER needs two, and an"
            " interval five: add recordings of others"
        )
    if max(num_of.values()) < 2:
        raise ValueError(
            f"{data}: no speaker has two recordings, so none can be compared with another"
            " of its own; add some"
        )


def cut_to(treatment: Treatment, seconds: float) -> Treatment:
    """Return the treatment of utterances that are cut to so many seconds at most."""
    return replace(treatment, seconds=min(treatment.seconds, seconds))
