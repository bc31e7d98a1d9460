"""Harmonic voices and data directories of them, made in a moment."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import Manifest, read_manifest
from speakerlab.data.tables import write_data_dir

RATE = 16000


def make_wave(speaker: int, take: int, seconds: float, rate: int = RATE) -> np.ndarray:
    """wave_S, int16: ten harmonics of the speaker's pitch and a little noise."""
    rng = np.random.default_rng([speaker, take])
    time_S = np.arange(round(seconds * rate)) / rate
    pitch = 90 + 25 * speaker + take
    wave_S = 0
    for k in range(1, 11):
        wave_S = wave_S + np.sin(2 * np.pi * pitch * k * time_S) / k
    noise_S = rng.standard_normal(len(time_S))
    wave_S = 4000 * wave_S + 300 * noise_S
    return wave_S.astype(np.int16)


def make_noise(seconds: float, rows: int = 1) -> torch.Tensor:
    """wave_BS of Gaussian noise, always the same."""
    generator = torch.Generator().manual_seed(1)
    noise_BS = torch.randn(
        rows,
        round(seconds * RATE),
        generator=generator,
    )
    return 0.1 * noise_BS


def write_voices(
    folder: Path,
    *,
    speakers: Sequence[int] = (0, 1, 2, 3),
    seconds: Sequence[float] = (1.0, 1.25, 1.5),
    suffix: str = ".wav",
    trials: Sequence[tuple[str, str, bool]] | None | str = None,
    check: bool = True,
) -> Path:
    """Write a data directory with its recordings in `wav/` beside it, and check it.

    Utterance `spk1-0` is the first of speaker 1 and as long as the first of `seconds`. The trials
    are written as `trials`; "all": every pair.
    """
    wavs = {}
    owners = {}
    wav_folder = folder.parent / "wav"
    wav_folder.mkdir(exist_ok=True, parents=True)
    for speaker in speakers:
        for take, duration in enumerate(seconds):
            name = f"spk{speaker}-{take}"
            path = wav_folder / f"{name}{suffix}"
            wave_S = make_wave(speaker, take, duration)
            audio.write(path, wave_S, RATE)
            wavs[name] = path
            owners[name] = f"spk{speaker}"
    if trials == "all":
        trials = []
        for enrol, test in combinations(sorted(wavs), 2):
            is_target = owners[enrol] == owners[test]
            trials.append((enrol, test, is_target))
    lists = None if trials is None else {"trials": trials}
    write_data_dir(
        folder,
        wavs=wavs,
        speakers=owners,
        trials=lists,
    )
    if check:
        check_data_dirs([folder])
    return folder


def manifest_of(path: Path) -> Manifest:
    """A data directory of one recording, `<name>.data` beside it, as a manifest."""
    folder = path.with_suffix(".data")
    write_data_dir(folder, wavs={"rec": path})
    check_data_dirs([folder])
    return read_manifest([folder], sample_rate=RATE)
