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
from speakerlab.core import done
from speakerlab.data.banks import KIND_TABLE, Recording, find_recordings
from speakerlab.data.conversations import References
from speakerlab.data.labels import hold_out, label
from speakerlab.data.manifest import Manifest, read_manifest, split_valid
from speakerlab.data.remote import use_cache
from speakerlab.experiments.conversations import read_references, references_digest
from speakerlab.experiments.mixture import check_mixture, has_speed
from speakerlab.experiments.planning import BankBytes
from speakerlab.frontend.augment.noise import noise_bytes
from speakerlab.frontend.augment.room import room_bytes
from speakerlab.losses.head import class_names

log = logging.getLogger(__name__)
MIN_VALID_SPEAKERS = 2  # a single speaker has no non-target trials
MAX_HELD_OUT = 500  # speakers, unless configured
# Key of `data` -> key of `augment`.
PROBABILITIES = {
    "noise": "noise_prob",
    "rirs": "room_prob",
}


@dataclass(frozen=True)
class Corpus:
    """Training and validation utterances, RIRs and noise."""

    train: Manifest
    valid: Manifest
    rooms: Sequence[Recording]
    noise: Sequence[Recording]
    # Else workers cut it and send it with the batch. Decided by the plan of the memory.
    noise_on_device: bool = True
    # Who speaks when in each training directory, in the task `segmentation`; else empty.
    references: Sequence[References] = ()

    def train_sha256(self) -> str:
        """Return a digest of the training data; recordings may have moved."""
        digest = self.train.sha256()
        if not any(self.references):
            return digest
        return done.digest([digest, references_digest(self.references)])

    @property
    def banks(self) -> dict[str, Any]:
        """Return the arguments of `build_augment`."""
        return {
            "rooms": self.rooms,
            "noises": self.noise,
            "noise_kinds": [recording.kind for recording in self.noise],
            "noise_on_device": self.noise_on_device,
        }


def read_corpus(config: Config) -> Corpus:
    """Read the manifests and banks; hold validation speakers out of training."""
    check_mixture(config)
    use_cache(config.runtime.cache_dir, config.runtime.cache_gb)
    folders = config.data.train_folders()
    absent = [table for table in label_tables(config) if not table.exists()]
    if absent and config.has_head:
        label_kind = "speakers" if config.data.has_speaker_labels else "classes"
        raise FileNotFoundError(
            f"{absent[0]}: no such file; training needs {label_kind}: prepare the data"
            " (stage 1 of a recipe), or name a checked data directory with --set"
            " data.dir=DIR"
        )

    noise = find_material(config, "noise")
    rooms = find_material(config, "rirs")
    if noise:
        report_absent_kinds(config, noise)

    corpora = config.data.corpora
    whole = read_manifest(
        folders,
        sample_rate=config.frontend["sample_rate"],
        names=[corpus.name for corpus in corpora],
        shares_speakers=[corpus.speakers == "shared" for corpus in corpora],
    )
    references: Sequence[References] = ()
    if config.task == "segmentation":
        references = read_references(config, whole)
        # A recording with turns counts as a speaker: it is held out as a whole.
        num_speakers = num_valid_speakers(config, len(whole.speakers))
        train, valid = split_valid(whole, num_speakers)
    elif config.task == "identification":
        train, valid = split_classes(config, whole, folders)
    elif config.task == "distil" and not config.has_head:
        train, valid = split_utterances(config, whole)
    elif absent:
        # Without speakers there are no trials to validate with.
        log.info("no validation: there is no %s", absent[0])
        train = whole
        valid = whole.of_rows(np.empty(0, dtype=np.int64))
    else:
        num_speakers = num_valid_speakers(config, len(whole.speakers))
        train, valid = split_valid(whole, num_speakers)
    return Corpus(train, valid, rooms, noise, references=references)


def has_labels(config: Config) -> bool:
    """Return whether every training directory has the table of labels."""
    return all(table.exists() for table in label_tables(config))


def label_tables(config: Config) -> list[Path]:
    """Return the table of classes of each training directory."""
    data = config.data
    return [folder / name for folder, name in zip(data.train_folders(), data.tables)]


def split_classes(
    config: Config,
    whole: Manifest,
    folders: Sequence[Path],
) -> tuple[Manifest, Manifest]:
    """Return (training, validation) with all classes in both, if possible.

    Whole speakers are held out, so that the model cannot recognise a class by a voice. Single
    utterances are held out if the classes are the speakers, or if speakers are unknown.

    Letters: N utterances, U units to hold out (speakers or utterances).
    """
    tables = config.data.tables
    labelled = whole
    by_speaker = False
    if not config.data.has_speaker_labels:
        labelled = label(whole, folders, tables=tables)
        by_speaker = any((folder / "utt2spk").exists() for folder in folders)

    # The labelled manifest has classes in place of speakers; `whole` has the speakers.
    if by_speaker:
        unit_N = whole.speaker_N
        names = whole.speakers
    else:
        unit_N = np.arange(len(whole))
        names = whole.ids
    num_units = num_held_out(config, len(names))
    held_U = np.zeros(len(names), dtype=bool)
    if num_units:
        held_U = hold_out(labelled.speaker_N, unit_N, names, num_units=num_units)

    held_N = held_U[unit_N]
    train = labelled.of_rows(np.flatnonzero(~held_N))
    valid = labelled.of_rows(np.flatnonzero(held_N))
    log.info(
        "%d classes from %s; validation holds out %d of %d %s, %d utterances of %d"
        " classes",
        len(labelled.speakers),
        " + ".join(dict.fromkeys(tables)),
        held_U.sum(),
        len(names),
        "speakers" if by_speaker else "utterances",
        len(valid),
        len(np.unique(valid.speaker_N)),
    )
    return train, valid


def split_utterances(config: Config, whole: Manifest) -> tuple[Manifest, Manifest]:
    """Return (training, validation) without a look at the labels, the same for every seed."""
    num_valid = num_held_out(config, len(whole))
    if config.data.valid_speakers is None:
        num_valid = min(num_valid, MAX_HELD_OUT)
    if num_valid >= len(whole):
        raise ValueError(
            f"data.valid_speakers: must leave utterances to train on, got {num_valid} of"
            f" {len(whole)}; lower it (0 is allowed)"
        )
    # A manifest is sorted by the hash of the ids, so its first rows are a random choice that other
    # utterances do not change.
    row_N = np.arange(len(whole))
    return whole.of_rows(row_N[num_valid:]), whole.of_rows(row_N[:num_valid])


def row_names(config: Config, corpus: Corpus) -> list[str]:
    """Return the class of each row of the head; empty without a head."""
    if not config.has_head:
        return []
    return _class_names(config, corpus)


def _class_names(config: Config, corpus: Corpus) -> list[str]:
    """Return the names of the classes: speakers at the speeds that they are heard at."""
    speeds = class_speeds(config)
    names = class_names(corpus.train.speakers, speeds)
    if len(speeds) == 1:
        return names
    used_KP = has_speed(config, corpus.train)
    return [name for name, is_used in zip(names, used_KP.flat) if is_used]


def row_labels(
    config: Config,
    corpus: Corpus,
    names: Sequence[str],
) -> np.ndarray:
    """Return label_KN: the row in `names` of each training class at each speed, 0 without names.

    Letters: K speeds, N training speakers, C speeds with separate classes.
    """
    speakers = corpus.train.speakers
    speeds = config.augment.speeds
    classes = class_names(speakers, class_speeds(config))

    # Without a head, labels are not used.
    rows = [0] * len(classes)
    if names:
        # With training.init_head "keep", the rows of the initial model come first. A speaker that
        # is never heard at a speed has no row for it.
        row_of = {name: row for row, name in enumerate(names)}
        used = set(_class_names(config, corpus))
        rows = [row_of[name] if name in used else 0 for name in classes]

    # If speeds are not separate classes, all speeds share one row of labels.
    label_CN = np.reshape(rows, (-1, len(speakers)))
    return np.broadcast_to(label_CN, (len(speeds), len(speakers)))


def class_speeds(config: Config) -> Sequence[float]:
    """Return the speeds at which a speaker counts as a separate class."""
    # In identification, the class is the same at any speed.
    is_off = config.augment.speed_classes == "off"
    if is_off or config.task == "identification":
        return (1.0,)
    return config.augment.speeds


def find_material(config: Config, place: str) -> Sequence[Recording]:
    """Return the recordings of data.rirs or data.noise; empty if their probability is 0."""
    key = PROBABILITIES[place]
    prob = getattr(config.augment, key)
    name = getattr(config.data, place)
    if not prob:
        return ()

    folder = Path(config.data.dir, name or place)
    recordings: Sequence[Recording] = ()
    problem = f"data.{place} is null"
    if name:
        sample_rate = config.frontend["sample_rate"]
        recordings = find_recordings(folder, sample_rate=sample_rate)
        problem = f"{folder} has no recordings"
    # A missing augmentation would otherwise only show in the results.
    if not recordings:
        raise FileNotFoundError(
            f"augment.{key}: {prob:g}, but {problem}; list some in {folder}/wav.scp"
            f" (run.sh: stage 1 with --{place} DIR), or set augment.{key}=0 (run.sh:"
            f" --{place} none)"
        )
    return recordings


def report_absent_kinds(config: Config, noise: Sequence[Recording]) -> None:
    """Log the configured kinds of noise that are missing from `noise`."""
    odds = config.augment.kind_odds.model_dump()
    present = {recording.kind for recording in noise}
    # A kind with odds of 0 is not missing.
    absent = [kind for kind in odds if odds[kind] and kind not in present]
    if not absent:
        return
    table = Path(config.data.dir, config.data.noise or "", KIND_TABLE)
    settings = [f"augment.kind_odds.{kind}=0" for kind in absent]
    log.log(
        # Without the table, all recordings count as noise, so missing kinds are expected.
        logging.WARNING if table.exists() else logging.INFO,
        "augment.kind_odds: %s has no recordings of the kind %s, which is left out;"
        " list some in wav.scp and %s, or set %s",
        table.parent,
        " or ".join(absent),
        KIND_TABLE,
        " ".join(settings),
    )


def bank_sizes(config: Config, corpus: Corpus) -> BankBytes:
    """Return the bytes that the rooms and the noise of a corpus take on a device."""
    rooms = 0
    if corpus.rooms:
        room_lengths = [len(room) for room in corpus.rooms]
        rooms = room_bytes(room_lengths, sample_rate=config.frontend["sample_rate"])
    noise = 0
    if corpus.noise:
        noise_lengths = [len(recording) for recording in corpus.noise]
        noise = noise_bytes(noise_lengths, num_samples=crop_samples(config))
    return BankBytes(rooms, noise)


def counted(config: Config) -> tuple[str, str]:
    """Return the units in which to log the sizes of training and validation data."""
    if config.task == "identification":
        return "classes", "utterances"
    if config.task == "ssl":
        # Training has no speaker labels; validation has.
        return "utterances", "speakers"
    if config.task == "segmentation":
        # A recording with turns counts as one.
        return "speakers", "speakers"
    if not config.has_head:
        return "utterances", "utterances"
    return "speakers", "speakers"


def num_valid_speakers(config: Config, num_speakers: int) -> int:
    """Return the number of speakers to hold out; 0 for no validation."""
    wanted = num_held_out(config, num_speakers)
    if config.data.valid_speakers is None:
        # All pairs are compared: the time grows with the square of the number of utterances.
        wanted = min(wanted, MAX_HELD_OUT)
        return wanted if wanted >= MIN_VALID_SPEAKERS else 0
    if 0 < wanted < MIN_VALID_SPEAKERS:
        raise ValueError(
            f"data.valid_speakers: {wanted} is too few for an EER; use at least "
            f"{MIN_VALID_SPEAKERS}, or 0 for no validation"
        )
    return wanted


def num_held_out(config: Config, num: int) -> int:
    """Return the configured number, else the larger of 10 and 1 % of `num`, at most a fifth."""
    wanted = config.data.valid_speakers
    if wanted is not None:
        return wanted
    share = max(10, math.ceil(num / 100))
    return min(share, num // 5)
