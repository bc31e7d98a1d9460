"""What a run trains and validates on, and what may be mixed into its crops.

In: `Config` and checked data directories. Out: manifests, and int16 waves of rooms and noises.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakerlab.build import crop_samples
from speakerlab.config import Config
from speakerlab.data import audio
from speakerlab.data.manifest import Manifest, read_manifest, split_valid
from speakerlab.data.tables import read_rejected, read_table
from speakerlab.frontend.augment import bank_bytes

MIN_VALID_SPEAKERS = 2


@dataclass(frozen=True)
class Corpus:
    """The training and validation utterances, and what may be mixed into a crop."""

    train: Manifest
    valid: Manifest
    rooms: list[np.ndarray]
    noises: list[np.ndarray]


def read_corpus(config: Config) -> Corpus:
    """Manifests without the validation speakers' audio in training, and the resident banks."""
    root, sample_rate = Path(config.data.dir), config.frontend["sample_rate"]
    folders = [root / name for name in config.data.train]
    for folder in folders:
        if not (folder / "utt2spk").exists():
            raise FileNotFoundError(f"{folder}/utt2spk: no such file; training needs speakers")
    whole = read_manifest(folders, sample_rate=sample_rate)
    train, valid = split_valid(whole, num_valid_speakers(config, len(whole.speakers)))
    rooms = read_bank(root, config.data.rirs, sample_rate)
    noises = read_bank(root, config.data.noise, sample_rate)
    size = bank_bytes(
        num_samples=crop_samples(config),
        room_lengths=[len(room) for room in rooms],
        noise_lengths=[len(noise) for noise in noises],
        sample_rate=sample_rate,
    )
    if size > config.runtime.bank_gb * 2**30:
        raise ValueError(
            f"runtime.bank_gb: noise and rooms must fit, got {size / 2**30:.1f} GB for "
            f"{config.runtime.bank_gb}; raise it, or list fewer files in data.noise"
        )
    return Corpus(train, valid, rooms, noises)


def num_valid_speakers(config: Config, num_speakers: int) -> int:
    """As configured, or the larger of 10 and 1 %, but no more than a fifth; none below 10."""
    wanted = config.data.valid_speakers
    if wanted is None:
        share = min(max(10, math.ceil(num_speakers / 100)), num_speakers // 5)
        return share if share >= MIN_VALID_SPEAKERS else 0
    if 0 < wanted < MIN_VALID_SPEAKERS:
        raise ValueError(
            f"data.valid_speakers: an EER needs at least {MIN_VALID_SPEAKERS} speakers, got "
            f"{wanted}; raise it, or 0 for no validation"
        )
    return wanted


def read_bank(root: Path, name: str | None, sample_rate: int) -> list[np.ndarray]:
    """int16 waves of a data directory, in the order of their ids; empty where there is none."""
    if name is None or not (root / name / "wav.scp").exists():
        return []
    waves, rejected = [], read_rejected(root / name)
    for recording, path in sorted(read_table(root / name / "wav.scp").items()):
        if recording in rejected:
            continue
        info = audio.read_info(path)
        if info.sample_rate != sample_rate:
            raise ValueError(
                f"{path}: must have {sample_rate} Hz, got {info.sample_rate}; convert it"
            )
        waves.append(audio.read(path))
    return waves
