"""What a run trains and validates on, and what may be mixed into its crops.

In: `Config` and checked data directories. Out: manifests, and int16 waves of rooms and noises.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.config.build import crop_samples
from speakerlab.config.schema import Config
from speakerlab.data.banks import EMPTY_BANK, Bank, find_recordings, map_bank, read_bank
from speakerlab.data.dataset import class_names, labels_by_name
from speakerlab.data.labels import hold_out, label
from speakerlab.data.manifest import Manifest, read_manifest, split_valid
from speakerlab.frontend.augment.noise import noise_bytes
from speakerlab.frontend.augment.room import room_bytes

log = logging.getLogger(__name__)
MIN_VALID_SPEAKERS = 2
MAX_HELD_OUT = 500  # speakers, where their number is not set


@dataclass(frozen=True)
class Corpus:
    """The training and validation utterances, and what may be mixed into a crop."""

    train: Manifest
    valid: Manifest
    rooms: Bank
    noise: Bank
    noise_on_device: bool = True  # else workers cut it and send it along


def read_corpus(config: Config) -> Corpus:
    """Manifests without the validation speakers' audio in training, and the banks."""
    root, sample_rate = Path(config.data.dir), config.frontend["sample_rate"]
    folders = [root / name for name in config.data.train]
    labels = config.data.labels
    for folder in folders:
        if not (folder / labels).exists():
            who = "speakers" if labels == "utt2spk" else "classes"
            raise FileNotFoundError(
                f"{folder / labels}: no such file; training needs {who}: run stage 1, or name a "
                "checked data directory with --set data.dir=DIR"
            )
    whole = read_manifest(folders, sample_rate=sample_rate)
    if config.task == "identification":
        train, valid = split_classes(config, whole, folders)
    else:
        train, valid = split_valid(whole, num_valid_speakers(config, len(whole.speakers)))
    return Corpus(train, valid, *read_banks(config))


def split_classes(
    config: Config, whole: Manifest, folders: Sequence[Path]
) -> tuple[Manifest, Manifest]:
    """(training, validation) with all classes in both, as far as can be.

    Held out are whole speakers, so that no voice gives a class away; utterances where the classes
    are the speakers, or no directory tells speakers.
    """
    table = config.data.labels
    by_speaker = table != "utt2spk" and any((f / "utt2spk").exists() for f in folders)
    labelled = whole if table == "utt2spk" else label(whole, folders, table=table)
    unit_N = whole.speaker_N if by_speaker else np.arange(len(whole))
    names = whole.speakers if by_speaker else whole.ids
    num_units = config.data.valid_speakers
    if num_units is None:
        num_units = share_held_out(len(names))
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
    """The class of each row of the head; in identification speeds make no classes."""
    return class_names(corpus.train.speakers, _new_speakers(config))


def row_labels(config: Config, corpus: Corpus, names: Sequence[str]) -> np.ndarray:
    """label_KN: the row, named among `names`, of each class of training at each speed."""
    label_KN = labels_by_name(names, corpus.train.speakers, _new_speakers(config))
    return np.broadcast_to(label_KN, (len(config.augment.speeds), label_KN.shape[1]))


def _new_speakers(config: Config) -> Sequence[float]:
    """The speeds at which a voice counts as another one."""
    return config.augment.speeds if config.task == "verification" else (1.0,)


def read_banks(config: Config) -> tuple[Bank, Bank, bool]:
    """(rooms, noise, whether the device is to hold the noise too): it does where it has room."""
    if config.data.features == "fbank":  # nothing is done to waves
        return EMPTY_BANK, EMPTY_BANK, True
    root, sample_rate = Path(config.data.dir), config.frontend["sample_rate"]
    rooms, noise = (
        find_recordings(root / name, sample_rate=sample_rate) if name is not None else None
        for name in (config.data.rirs, config.data.noise)
    )
    room_bank = read_bank(rooms) if rooms else EMPTY_BANK
    limit, lengths = config.runtime.bank_gb * 2**30, [len(room) for room in room_bank]
    size = room_bytes(lengths, sample_rate=sample_rate)
    if size > limit:
        raise ValueError(
            f"runtime.bank_gb: the rooms must fit, got {size / 2**30:.1f} GB for "
            f"{config.runtime.bank_gb}; raise it, or list fewer files in data.rirs"
        )
    if noise is None:
        return room_bank, EMPTY_BANK, True
    size += noise_bytes(noise.lengths, num_samples=crop_samples(config))
    if size <= limit:
        return room_bank, read_bank(noise), True
    log.info(
        "%s: noise and rooms would take %.1f GB of the device, more than runtime.bank_gb %g: "
        "the loader's workers cut the noise",
        *(noise.folder, size / 2**30, config.runtime.bank_gb),
    )
    return room_bank, map_bank(noise), False


def counted(config: Config) -> tuple[str, str]:
    """What is counted of (training, validation)."""
    is_open = config.task == "verification"
    return ("speakers", "speakers") if is_open else ("classes", "utterances")


def corpus_facts(config: Config, corpus: Corpus) -> dict[str, Any]:
    """What is trained and validated on, for run.json, the model's card and the log."""
    train, valid = corpus.train, corpus.valid
    what, held_out = counted(config)
    return {
        f"train_{what}": len(train.speakers),
        "train_utterances": len(train),
        "train_hours": round(train.hours, 3),
        "train_sha256": train.sha256(),
        f"valid_{held_out}": len(valid if held_out == "utterances" else valid.speakers),
        "rooms": len(corpus.rooms),
        "noises": len(corpus.noise),
        "noise_on_device": corpus.noise_on_device,
    }


def num_valid_speakers(config: Config, num_speakers: int) -> int:
    """As configured, or the larger of 10 and 1 %, but no more than a fifth; none below 10."""
    wanted = config.data.valid_speakers
    if wanted is None:
        share = min(share_held_out(num_speakers), MAX_HELD_OUT)  # each is compared with each
        return share if share >= MIN_VALID_SPEAKERS else 0
    if 0 < wanted < MIN_VALID_SPEAKERS:
        raise ValueError(
            f"data.valid_speakers: an EER needs at least {MIN_VALID_SPEAKERS} speakers, got "
            f"{wanted}; raise it, or 0 for no validation"
        )
    return wanted


def share_held_out(num: int) -> int:
    """The larger of 10 and 1 %, but no more than a fifth."""
    return min(max(10, math.ceil(num / 100)), num // 5)
