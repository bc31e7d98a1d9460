"""Synthetic recordings, noises and RIRs, for measurements without a corpus.

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
SPEAKERS = 10
TAKES = 4  # recordings of each speaker
SECONDS = 8.0  # of each recording
NOISE_SECONDS = (5.0, 10.0, 20.0)
ROOM_SECONDS = (0.5, 1.0)
HARMONICS = 20
Waves = Iterator[tuple[str, np.ndarray]]  # id, wave_S as int16; the same in every run


def voices() -> Waves:
    """Yield harmonics with a modulated loudness and some noise; the ids are SPEAKER-TAKE."""
    rng = np.random.default_rng(0)
    num_samples = round(SECONDS * RATE)
    time_S = np.arange(num_samples) / RATE
    for speaker in range(SPEAKERS):
        for take in range(TAKES):
            # The pitch differs more between speakers than between recordings of one speaker.
            pitch_hz = 90.0 + 12 * speaker + take
            harmonics: list[np.ndarray] = []
            for number in range(1, HARMONICS):
                harmonic_S = np.sin(2 * np.pi * pitch_hz * number * time_S)
                harmonics.append(harmonic_S / number)
            wave_S = sum(harmonics)

            # The loudness varies three times per second, like syllables.
            loudness_S = np.sin(2 * np.pi * 1.5 * time_S) ** 2
            noise_S = rng.standard_normal(len(time_S))
            wave_S = 0.1 * wave_S * loudness_S
            wave_S = wave_S + 0.003 * noise_S
            yield f"speaker{speaker}-{take}", audio.to_int16(wave_S)


def noises() -> Waves:
    """Yield white noises."""
    rng = np.random.default_rng(1)
    for seconds in NOISE_SECONDS:
        num_samples = round(seconds * RATE)
        wave_S = 0.05 * rng.standard_normal(num_samples)
        yield f"noise{seconds:g}", audio.to_int16(wave_S)


def rooms() -> Waves:
    """Yield impulse responses: a direct peak, then noise that decays by 60 dB."""
    rng = np.random.default_rng(2)
    for seconds in ROOM_SECONDS:
        num_samples = round(seconds * RATE)
        # exp(-6.9) is an amplitude of 1/1000, or -60 dB.
        decay_S = np.exp(-6.9 * np.linspace(0, 1, num_samples))
        noise_S = 0.1 * rng.standard_normal(num_samples)
        wave_S = noise_S * decay_S
        wave_S[0] = 0.9
        yield f"room{seconds:g}", audio.to_int16(wave_S)


def write_corpus(folder: Path) -> dict[str, Any]:
    """Write data directories; return the section `data` of a configuration for them."""
    train_dir = folder / "train"
    noise_dir = folder / "noise"
    rirs_dir = folder / "rirs"
    wavs = write_waves(folder, voices())
    speakers: dict[str, str] = {}
    for name in wavs:
        speakers[name], _, _ = name.partition("-")
    write_data_dir(train_dir, wavs=wavs, speakers=speakers)
    write_data_dir(noise_dir, wavs=write_waves(folder, noises()))
    write_data_dir(rirs_dir, wavs=write_waves(folder, rooms()))
    # Training requires checked directories.
    check_data_dirs([train_dir, noise_dir, rirs_dir], sample_rate=RATE)
    return {
        "dir": str(folder),
        "train": ("train",),
        "noise": "noise",
        "rirs": "rirs",
        "valid_speakers": 0,
    }


def write_waves(
    folder: Path,
    waves: Iterable[tuple[str, np.ndarray]],
) -> dict[str, Path]:
    """Write each wave to `folder/wav`; return id -> file."""
    wav_dir = folder / "wav"
    wav_dir.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for name, wave_S in waves:
        paths[name] = wav_dir / f"{name}.wav"
        audio.write(paths[name], wave_S, RATE)
    return paths
