"""Embeddings that stage 5 extracted, verified against the model and the data.

In: an experiment and a data directory. Out: a table, or the set that back ends learn from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakerlab.checkpoints import model_files
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import read_durations, read_table
from speakerlab.data.treatments import UNTREATED, Treatment
from speakerlab.experiments.trial_list import TrialList
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.minima import REGRESSION_SPEAKERS
from speakerlab.scoring.transforms import Development
from speakerlab.scoring.trials import Trials

MAX_UTTERANCES = 10  # of a held-out speaker


@dataclass(frozen=True)
class DevelopmentSet:
    """Embeddings of speakers in no trial list, split by whether the model was trained on them."""

    cohort: Development  # speakers that the model was trained on
    table: EmbeddingTable  # of all
    held_out: TrialList | None  # all pairs of utterances of the others; None: too few speakers


def are_embedded(exp_dir: Path, data_dir: Path, *, untrained: bool = False) -> bool:
    stem = model_files.embeddings_stem(exp_dir, data_dir.name, untrained=untrained)
    return Path(f"{stem}.json").exists()


def read_embedded(
    exp_dir: Path, data_dir: Path, *, untrained: bool = False, treatment: Treatment = UNTREATED
) -> EmbeddingTable:
    """Read the embeddings of a directory; ValueError if they are of another model or other data.

    The data is compared only if the directory was checked (stage 1) and has audio.
    """
    which = {"untrained": untrained, "treatment": treatment.name}
    stem = model_files.embeddings_stem(exp_dir, data_dir.name, **which)
    table, wanted = EmbeddingTable.load(stem), model_files.read_card(exp_dir)["sha256"]
    if table.model_sha256 != wanted:
        raise ValueError(
            f"{stem}: embeddings are of model {table.model_sha256[:12]}, but {exp_dir} has model "
            f"{wanted[:12]}; run the extraction (stage 5) again"
        )
    made_from = table.facts.get("data_sha256")
    is_checked = all((data_dir / name).exists() for name in ("utt2dur", "wav.scp"))
    if made_from is not None and is_checked:
        sample_rate = model_files.read_settings(exp_dir)["frontend"]["sample_rate"]
        found = read_manifest([data_dir], sample_rate=sample_rate).sha256()
        if found != made_from:
            raise ValueError(
                f"{stem}: {data_dir} has changed since these embeddings were extracted, sha256 "
                f"{made_from[:12]} then, {found[:12]} now; run the extraction (stage 5) again"
            )
    return table


def read_development(exp_dir: Path, data_dir: Path) -> DevelopmentSet | None:
    """Read the embeddings of `data_dir` as a development set; None if there are none.

    Speakers that the model has a class for are the cohort; all of them if it has no classes.
    """
    if not are_embedded(exp_dir, data_dir):
        return None
    table = read_embedded(exp_dir, data_dir)
    speaker_of = read_table(data_dir / "utt2spk")
    unknown = [name for name in table.ids if name not in speaker_of]
    if unknown:
        raise ValueError(
            f"{data_dir}/utt2spk: lacks the embedded utterance {unknown[0]}; run the extraction "
            "(stage 5) again"
        )
    classes = set(model_files.read_classes(exp_dir))  # all speakers are there at speed 1
    trained = [name for name in table.ids if not classes or speaker_of[name] in classes]
    if not trained:
        raise ValueError(
            f"{data_dir}: has no speaker that the model was trained on, among {len(table.ids)} "
            "utterances; give the training set with --development"
        )
    cohort = Development(table.select(trained), [speaker_of[name] for name in trained])
    others = set(table.ids).difference(trained)
    held_out = _pairs({name: speaker_of[name] for name in table.ids if name in others}, data_dir)
    return DevelopmentSet(cohort, table, held_out)


def _pairs(speaker_of: Mapping[str, str], data_dir: Path) -> TrialList | None:
    """Return all pairs of at most ten utterances of each speaker."""
    groups: dict[str, list[str]] = {}
    for name, speaker in speaker_of.items():
        groups.setdefault(speaker, []).append(name)
    if sum(len(names) > 1 for names in groups.values()) < REGRESSION_SPEAKERS:
        return None
    ids = [name for names in groups.values() for name in names[:MAX_UTTERANCES]]
    enrol_N, test_N = np.stack(np.triu_indices(len(ids), k=1)).astype(np.int32)
    speaker_I = np.unique([speaker_of[name] for name in ids], return_inverse=True)[1]
    speakers = speaker_I[enrol_N], speaker_I[test_N]
    name = f"{data_dir.name}: {len(groups)} held-out speakers"
    trials = Trials(ids, ids, enrol_N, test_N, speakers[0] == speakers[1])
    return TrialList(name, data_dir, trials, speakers, {}, {}, read_durations(data_dir))
