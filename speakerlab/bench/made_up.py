"""Recordings that nobody spoke, where there are no others to measure with.

Out: voices, noises and rooms as int16 waves, or a data directory of each. Letters: S samples.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from speakerlab.config.schema import Config
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir

RATE = 16000
SPEAKERS, TAKES, SECONDS = 10, 4, 8.0
NOISE_SECONDS, ROOM_SECONDS = (5.0, 10.0, 20.0), (0.5, 1.0)
HARMONICS = 20


def make_voice(rng: np.random.Generator, *, pitch_hz: float, seconds: float) -> np.ndarray:
    """wave_S: harmonics that come and go three times a second, and a little noise."""
    time_S = np.arange(round(seconds * RATE)) / RATE
    wave_S = sum(np.sin(2 * np.pi * pitch_hz * k * time_S) / k for k in range(1, HARMONICS))
    wave_S = 0.1 * wave_S * np.sin(2 * np.pi * 1.5 * time_S) ** 2
    return audio.to_int16(wave_S + 0.003 * rng.standard_normal(len(time_S)))


def make_noise(rng: np.random.Generator, *, seconds: float) -> np.ndarray:
    """wave_S: white noise."""
    return audio.to_int16(0.05 * rng.standard_normal(round(seconds * RATE)))


def make_room(rng: np.random.Generator, *, seconds: float) -> np.ndarray:
    """wave_S: a direct peak, and what dies away after it by 60 dB."""
    decay_S = np.exp(-6.9 * np.linspace(0, 1, round(seconds * RATE)))
    wave_S = 0.1 * rng.standard_normal(len(decay_S)) * decay_S
    wave_S[0] = 0.9
    return audio.to_int16(wave_S)


def on_made_up_corpus(config: Config, folder: Path, *, micro_batch: int) -> Config:
    """The same training, on a corpus that is written into a folder."""
    write_corpus(folder)
    data = {"dir": str(folder), "train": ("train",), "noise": "noise", "rirs": "rirs"}
    runtime = config.runtime.model_copy(update={"micro_batch": micro_batch})
    data = config.data.model_copy(update={**data, "valid_speakers": 0})
    return config.model_copy(update={"data": data, "runtime": runtime})


def write_corpus(folder: Path) -> None:
    """Checked data directories `train`, `noise` and `rirs` below a folder; always the same."""
    rng = np.random.default_rng(0)
    voices = {
        f"speaker{speaker}-{take}": make_voice(
            rng, pitch_hz=90.0 + 12 * speaker + take, seconds=SECONDS
        )
        for speaker in range(SPEAKERS)
        for take in range(TAKES)
    }
    noises = [make_noise(rng, seconds=seconds) for seconds in NOISE_SECONDS]
    rooms = [make_room(rng, seconds=seconds) for seconds in ROOM_SECONDS]
    wavs = write_waves(folder, voices.items())
    owners = {name: name.split("-")[0] for name in wavs}
    write_data_dir(folder / "train", wavs=wavs, speakers=owners)
    for kind, waves in (("noise", noises), ("rirs", rooms)):
        named = ((f"{kind}{number}", wave_S) for number, wave_S in enumerate(waves))
        write_data_dir(folder / kind, wavs=write_waves(folder, named))
    check_data_dirs([folder / name for name in ("train", "noise", "rirs")], sample_rate=RATE)


def write_waves(folder: Path, waves: Iterable[tuple[str, np.ndarray]]) -> dict[str, Path]:
    """Each wave as a file of `folder/wav`; id -> file."""
    (folder / "wav").mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for name, wave_S in waves:
        paths[name] = folder / "wav" / f"{name}.wav"
        audio.write(paths[name], wave_S, RATE)
    return paths
