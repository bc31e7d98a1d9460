"""Synthetic recordings, noises and rooms, for measurements without a corpus.

Letters: S samples.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir

RATE = 16000
SPEAKERS, TAKES, SECONDS = 10, 4, 8.0
NOISE_SECONDS, ROOM_SECONDS = (5.0, 10.0, 20.0), (0.5, 1.0)
HARMONICS = 20
Waves = Iterator[tuple[str, np.ndarray]]  # id, wave_S as int16; the same in every run


def voices() -> Waves:
    """Yield harmonics whose loudness rises and falls, with a little noise; SPEAKER-TAKE."""
    rng = np.random.default_rng(0)
    time_S = np.arange(round(SECONDS * RATE)) / RATE
    for speaker in range(SPEAKERS):
        for take in range(TAKES):
            pitch_hz = 90.0 + 12 * speaker + take
            wave_S = sum(np.sin(2 * np.pi * pitch_hz * k * time_S) / k for k in range(1, HARMONICS))
            wave_S = 0.1 * wave_S * np.sin(2 * np.pi * 1.5 * time_S) ** 2
            wave_S = wave_S + 0.003 * rng.standard_normal(len(time_S))
            yield f"speaker{speaker}-{take}", audio.to_int16(wave_S)


def noises() -> Waves:
    """Yield white noises."""
    rng = np.random.default_rng(1)
    for seconds in NOISE_SECONDS:
        wave_S = 0.05 * rng.standard_normal(round(seconds * RATE))
        yield f"noise{seconds:g}", audio.to_int16(wave_S)


def rooms() -> Waves:
    """Yield impulse responses: a direct peak, then noise that decays by 60 dB."""
    rng = np.random.default_rng(2)
    for seconds in ROOM_SECONDS:
        decay_S = np.exp(-6.9 * np.linspace(0, 1, round(seconds * RATE)))
        wave_S = 0.1 * rng.standard_normal(len(decay_S)) * decay_S
        wave_S[0] = 0.9
        yield f"room{seconds:g}", audio.to_int16(wave_S)


def write_corpus(folder: Path) -> dict[str, Any]:
    """Write data directories; return the values of the section `data` that name them."""
    wavs = write_waves(folder, voices())
    speakers = {name: name.split("-")[0] for name in wavs}
    write_data_dir(folder / "train", wavs=wavs, speakers=speakers)
    write_data_dir(folder / "noise", wavs=write_waves(folder, noises()))
    write_data_dir(folder / "rirs", wavs=write_waves(folder, rooms()))
    check_data_dirs([folder / name for name in ("train", "noise", "rirs")], sample_rate=RATE)
    data = {"dir": str(folder), "train": ("train",), "noise": "noise", "rirs": "rirs"}
    return {**data, "valid_speakers": 0}


def write_waves(folder: Path, waves: Iterable[tuple[str, np.ndarray]]) -> dict[str, Path]:
    """Write each wave to `folder/wav`; id -> file."""
    (folder / "wav").mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for name, wave_S in waves:
        paths[name] = folder / "wav" / f"{name}.wav"
        audio.write(paths[name], wave_S, RATE)
    return paths
