"""Rooms and noises on the host: whole recordings as int16.

In: a data directory of recordings, with `utt2kind` (id noise|music|speech) where they are of
several kinds. Out: `Bank`, int16. A bank of noise too large for the device is mapped from a file
beside its wav.scp: all processes of a host that use it share one copy, the page cache's, of which
only the parts that are read are ever loaded. Letters: K recordings, S samples.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.core.atomic import alone, replacing
from speakerlab.data import audio
from speakerlab.data.tables import read_durations, read_rejected, read_table

log = logging.getLogger(__name__)

KINDS = ("noise", "music", "speech")  # the folders of MUSAN
KIND_TABLE = "utt2kind"


@dataclass(frozen=True)
class Recordings:
    """A data directory of rooms or noises by their headers; nothing is decoded yet."""

    folder: Path
    ids: tuple[str, ...]  # sorted
    paths: tuple[str, ...]
    kinds: tuple[str, ...]
    lengths: tuple[int, ...]  # in samples

    def decode(self) -> Iterator[np.ndarray]:
        """wave_S, int16, of each."""
        for path, length in zip(self.paths, self.lengths):
            yield audio.read(path, 0, length)


@dataclass(frozen=True, eq=False)
class Bank(Sequence[np.ndarray]):
    """int16 waves, all in one array that may be a mapped file's; then only its path is pickled."""

    ids: tuple[str, ...]
    kinds: tuple[str, ...]
    ends_K: np.ndarray  # int64, of each wave in the array
    wave_S: np.ndarray
    path: Path | None = None  # of the mapped file

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        index = range(len(self))[index]
        return self.wave_S[self.ends_K[index - 1] if index else 0 : self.ends_K[index]]

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self.ids, self.kinds, self.ends_K)
        if self.path is None:
            return Bank, (*facts, self.wave_S)
        return open_bank, (self.path, *facts)


EMPTY_BANK = Bank((), (), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int16))


def find_recordings(folder: Path, *, sample_rate: int) -> Recordings | None:
    """List the recordings of a directory without rejected ones; None if there is no directory.

    Raises ValueError where a recording is empty or has another rate, no kind or an unknown one.
    """
    if not (folder / "wav.scp").exists():
        return None
    wavs, rejected = read_table(folder / "wav.scp"), read_rejected(folder)
    ids = tuple(sorted(wavs.keys() - rejected.keys()))
    table = folder / KIND_TABLE
    kind_of = read_table(table) if table.exists() else dict.fromkeys(ids, KINDS[0])
    unknown = next((name for name in ids if kind_of.get(name) not in KINDS), None)
    if unknown is not None:
        raise ValueError(
            f"{table}: {unknown} must be noise, music or speech, got "
            f"{kind_of.get(unknown, 'no line')}; correct it, or remove the table"
        )
    seconds = read_durations(folder)
    lengths = []
    for name in ids:
        info = audio.read_info(wavs[name], sample_rate=sample_rate)
        if name in seconds and abs(info.seconds - seconds[name]) > 1e-3:
            raise ValueError(
                f"{wavs[name]}: has changed since it was checked, got {info.seconds:.3f} s for "
                f"{seconds[name]:.3f}; restore it, or run stage 1 again"
            )
        lengths.append(info.num_samples)
    paths, kinds = (tuple(table[name] for name in ids) for table in (wavs, kind_of))
    return Recordings(folder, ids, paths, kinds, tuple(lengths))


def read_bank(recordings: Recordings) -> Bank:
    wave_S = np.empty(sum(recordings.lengths), dtype=np.int16)
    ends_K = np.cumsum(recordings.lengths, dtype=np.int64)
    for wave, end in zip(recordings.decode(), ends_K):
        wave_S[end - len(wave) : end] = wave
    return Bank(recordings.ids, recordings.kinds, ends_K, wave_S)


def map_bank(recordings: Recordings) -> Bank:
    """Map all recordings from one file beside wav.scp, written by the first process.

    The file's name is a fingerprint of the recordings; files of others are removed. Where none can
    be written (a read-only directory, a full disk) the bank is read into memory instead.
    """
    folder, name = recordings.folder, f"bank.{_fingerprint(recordings)}.npy"
    facts = (recordings.ids, recordings.kinds, np.cumsum(recordings.lengths, dtype=np.int64))
    try:
        if not (folder / name).exists():
            with alone(folder / ".bank.lock"):
                if not (folder / name).exists():
                    _write_bank(folder / name, recordings)
        return open_bank(folder / name, *facts)
    except OSError as error:
        size = 2 * sum(recordings.lengths) / 2**30
        text = (
            "%s: cannot hold a file of %.1f GB (%s); every rank keeps a copy of the noise in memory"
        )
        log.warning(text, folder, size, error.strerror)
        return read_bank(recordings)


def open_bank(path: Path, ids: tuple[str, ...], kinds: tuple[str, ...], ends_K: np.ndarray) -> Bank:
    try:
        wave_S = np.asarray(np.load(path, mmap_mode="r"))
    except OSError:
        raise
    except Exception:  # parsing a header may raise anything
        wave_S = audio.NO_SAMPLES
    if (wave_S.dtype, wave_S.shape) != (np.int16, (ends_K[-1],)):
        raise ValueError(f"{path}: is damaged; remove it, and the next run writes it again")
    return Bank(ids, kinds, ends_K, wave_S, path)


def _write_bank(path: Path, recordings: Recordings) -> None:
    for stale in (*path.parent.glob("bank.*.npy"), *path.parent.glob(".bank.*.partial")):
        stale.unlink()
    log.info("%s: writing %d recordings into one file", path, len(recordings.ids))
    shape = (sum(recordings.lengths),)
    with replacing(path) as partial, partial.open("wb") as file:
        header = {"descr": "<i2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for wave_S in recordings.decode():
            wave_S.astype("<i2", copy=False).tofile(file)
        file.flush()
        os.fsync(file.fileno())


def _fingerprint(recordings: Recordings) -> str:
    """Hash ids, lengths, sizes and times, but no paths, which may differ between hosts."""
    stats = [Path(path).stat() for path in recordings.paths]
    facts = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    text = json.dumps([recordings.ids, recordings.lengths, facts])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
