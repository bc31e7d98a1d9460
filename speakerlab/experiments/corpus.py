"""Read the training and validation utterances, and the noise and rooms that augment them."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.config.build import crop_samples
from speakerlab.config.schema import Config
from speakerlab.data.banks import KIND_TABLE, Recording, find_recordings
from speakerlab.data.labels import class_names, hold_out, label
from speakerlab.data.manifest import Manifest, read_manifest, split_valid
from speakerlab.frontend.augment.noise import noise_bytes
from speakerlab.frontend.augment.room import room_bytes

log = logging.getLogger(__name__)
MIN_VALID_SPEAKERS = 2
MAX_HELD_OUT = 500  # speakers, unless configured
PROBABILITIES = {"noise": "noise_prob", "rirs": "room_prob"}  # key of `data` -> of `augment`


@dataclass(frozen=True)
class Corpus:
    """Training and validation utterances, rooms and noise."""

    train: Manifest
    valid: Manifest
    rooms: Sequence[Recording]
    noise: Sequence[Recording]
    noise_on_device: bool = True  # else workers cut it and send it with the batch

    @property
    def banks(self) -> dict[str, Any]:
        noise = {"noises": self.noise, "noise_kinds": [one.kind for one in self.noise]}
        return {"rooms": self.rooms, **noise, "noise_on_device": self.noise_on_device}


def read_corpus(config: Config) -> Corpus:
    """Read the manifests, validation speakers held out of training, and the banks."""
    root, sample_rate = Path(config.data.dir), config.frontend["sample_rate"]
    folders = [root / name for name in config.data.train]
    labels = config.data.labels
    absent = [folder / labels for folder in folders if not (folder / labels).exists()]
    if absent and config.task != "ssl":
        who = "speakers" if labels == "utt2spk" else "classes"
        raise FileNotFoundError(
            f"{absent[0]}: no such file; training needs {who}: run stage 1, or name a checked data "
            "directory with --set data.dir=DIR"
        )
    noise, rooms = (find_material(config, place) for place in PROBABILITIES)
    if noise:
        report_absent_kinds(config, noise)
    whole = read_manifest(folders, sample_rate=sample_rate)
    if config.task == "identification":
        train, valid = split_classes(config, whole, folders)
    elif absent:
        log.info("no validation: there is no %s", absent[0])
        train, valid = whole, whole.of_rows(np.empty(0, dtype=np.int64))
    else:
        train, valid = split_valid(whole, num_valid_speakers(config, len(whole.speakers)))
    return Corpus(train, valid, rooms, noise, fits_device(config, rooms, noise))


def split_classes(
    config: Config, whole: Manifest, folders: Sequence[Path]
) -> tuple[Manifest, Manifest]:
    """Return (training, validation) with all classes in both, if possible.

    Whole speakers are held out, so that no voice reveals a class; utterances if the classes are the
    speakers, or speakers are unknown.
    """
    table = config.data.labels
    by_speaker = table != "utt2spk" and any((f / "utt2spk").exists() for f in folders)
    labelled = whole if table == "utt2spk" else label(whole, folders, table=table)
    unit_N = whole.speaker_N if by_speaker else np.arange(len(whole))
    names = whole.speakers if by_speaker else whole.ids
    num_units = num_held_out(config, len(names))
    held_U = np.zeros(len(names), dtype=bool)
    if num_units:
        held_U = hold_out(labelled.speaker_N, unit_N, names, num_units=num_units)
    held_N = held_U[unit_N]
    train, valid = (labelled.of_rows(np.flatnonzero(rows)) for rows in (~held_N, held_N))
    log.info(
        "%d classes from %s; validation holds out %d of %d %s, %d utterances of %d classes",
        *(len(labelled.speakers), table, held_U.sum(), len(names)),
        "speakers" if by_speaker else "utterances",
        *(len(valid), len(np.unique(valid.speaker_N))),
    )
    return train, valid


def row_names(config: Config, corpus: Corpus) -> list[str]:
    """Return the class of each row of the head; none without a head."""
    if config.task == "ssl":
        return []
    return class_names(corpus.train.speakers, class_speeds(config))


def row_labels(config: Config, corpus: Corpus, names: Sequence[str]) -> np.ndarray:
    """Return label_KN: the row in `names` of each training class at each speed, 0 without names."""
    speakers, speeds = corpus.train.speakers, config.augment.speeds
    row_of = {name: row for row, name in enumerate(names)}
    own = [row_of[name] if names else 0 for name in class_names(speakers, class_speeds(config))]
    return np.broadcast_to(np.reshape(own, (-1, len(speakers))), (len(speeds), len(speakers)))


def class_speeds(config: Config) -> Sequence[float]:
    """Return the speeds at which a speaker is another class."""
    is_off = config.task == "identification" or config.augment.speed_classes == "off"
    return (1.0,) if is_off else config.augment.speeds


def find_material(config: Config, place: str) -> Sequence[Recording]:
    """Return the recordings of data.rirs or data.noise; none if their probability is 0."""
    key = PROBABILITIES[place]
    prob, name = getattr(config.augment, key), getattr(config.data, place)
    if not prob:
        return ()
    folder = Path(config.data.dir, name or place)
    found = name and find_recordings(folder, sample_rate=config.frontend["sample_rate"])
    if not found:
        where = f"{folder} has no recordings" if name else f"data.{place} is null"
        raise FileNotFoundError(
            f"augment.{key}: {prob:g}, but {where}; list some in {folder}/wav.scp (run.sh: stage 1 "
            f"with --{place} DIR), or set augment.{key}=0 (run.sh: --{place} none)"
        )
    return found


def report_absent_kinds(config: Config, noise: Sequence[Recording]) -> None:
    """Log the kinds of noise that the configuration asks for and `noise` lacks."""
    odds, kinds = config.augment.kind_odds.model_dump(), {one.kind for one in noise}
    absent = [kind for kind in odds if odds[kind] and kind not in kinds]
    if absent:
        table = Path(config.data.dir, config.data.noise or "", KIND_TABLE)
        log.log(
            logging.WARNING if table.exists() else logging.INFO,  # without it all is noise
            "augment.kind_odds: %s has no recordings of the kind %s, which is left out; list some "
            "in wav.scp and %s, or set %s",
            *(table.parent, " or ".join(absent), KIND_TABLE),
            " ".join(f"augment.kind_odds.{kind}=0" for kind in absent),
        )


def fits_device(config: Config, rooms: Sequence[Recording], noise: Sequence[Recording]) -> bool:
    """Return whether the noise fits on the device beside the rooms, which must."""
    limit, rate = config.runtime.bank_gb * 2**30, config.frontend["sample_rate"]
    size = room_bytes([len(room) for room in rooms], sample_rate=rate)
    if size > limit:
        raise ValueError(
            f"runtime.bank_gb: the rooms take {size / 2**30:.1f} GB, more than "
            f"{config.runtime.bank_gb}; raise it, or list fewer files in data.rirs"
        )
    if noise:
        size += noise_bytes([len(one) for one in noise], num_samples=crop_samples(config))
    if size > limit:
        log.info(
            "data.noise: noise and rooms take %.1f GB, more than runtime.bank_gb %g: "
            "the data workers read the noise",
            *(size / 2**30, config.runtime.bank_gb),
        )
    return size <= limit


def counted(config: Config) -> tuple[str, str]:
    if config.task == "identification":
        return "classes", "utterances"
    return "utterances" if config.task == "ssl" else "speakers", "speakers"


def num_valid_speakers(config: Config, num_speakers: int) -> int:
    wanted = num_held_out(config, num_speakers)
    if config.data.valid_speakers is None:
        share = min(wanted, MAX_HELD_OUT)  # each is compared with each
        return share if share >= MIN_VALID_SPEAKERS else 0
    if 0 < wanted < MIN_VALID_SPEAKERS:
        raise ValueError(
            f"data.valid_speakers: {wanted} is too few for an EER; use at least "
            f"{MIN_VALID_SPEAKERS}, or 0 for no validation"
        )
    return wanted


def num_held_out(config: Config, num: int) -> int:
    """Return the configured number, or the larger of 10 and 1 %, but at most a fifth."""
    wanted = config.data.valid_speakers
    return min(max(10, math.ceil(num / 100)), num // 5) if wanted is None else wanted
