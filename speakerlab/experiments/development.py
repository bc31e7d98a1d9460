"""What back ends learn from: embeddings of speakers that are in no trial list.

In: an experiment with the embeddings of (some utterances of) a training set. Out: `Development` of
the speakers that were trained on, the cohort, and trials among those that were held out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from speakerlab.checkpoints.model_files import read_classes
from speakerlab.data.tables import read_table
from speakerlab.experiments.embedded import are_embedded, read_embedded
from speakerlab.experiments.trial_list import TrialList, read_seconds
from speakerlab.scoring.chain import Development
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.trials import Trials

FEW_SPEAKERS = 10  # that are held out and have two utterances: fewer are nothing to learn from
MAX_UTTERANCES = 10  # of a held-out speaker


@dataclass(frozen=True)
class DevelopmentSet:
    """Embeddings, parted by whether the model was trained on their speakers."""

    name: str
    cohort: Development
    table: EmbeddingTable  # of all
    held_out: (
        TrialList | None
    )  # all pairs of utterances of held-out speakers, where there are enough


def read_development(exp_dir: Path, data_dir: Path) -> DevelopmentSet | None:
    """The embeddings of `data_dir` that stage 5 made; None where it made none.

    Speakers that the model has a class for are the cohort; where it has no classes, all are.
    """
    if not are_embedded(exp_dir, data_dir):
        return None
    table = read_embedded(exp_dir, data_dir)
    speaker_of = read_table(data_dir / "utt2spk")
    unknown = [name for name in table.ids if name not in speaker_of]
    if unknown:
        raise ValueError(
            f"{data_dir}/utt2spk: must have every utterance that was embedded, got no "
            f"{unknown[0]}; run the extraction (stage 5) again"
        )
    classes = {name.partition("#")[0] for name in read_classes(exp_dir)}
    trained = [name for name in table.ids if not classes or speaker_of[name] in classes]
    if not trained:
        raise ValueError(
            f"{data_dir}: holds no speaker that the model was trained on, got {len(table.ids)} "
            "utterances of others; give the training set by --development"
        )
    cohort = Development(table.select(trained), [speaker_of[name] for name in trained])
    others = set(table.ids).difference(trained)
    held_out = _pairs({name: speaker_of[name] for name in table.ids if name in others}, data_dir)
    return DevelopmentSet(data_dir.name, cohort, table, held_out)


def _pairs(speaker_of: Mapping[str, str], data_dir: Path) -> TrialList | None:
    """All pairs of at most ten utterances of each speaker."""
    groups: dict[str, list[str]] = {}
    for name, speaker in speaker_of.items():
        groups.setdefault(speaker, []).append(name)
    if sum(len(names) > 1 for names in groups.values()) < FEW_SPEAKERS:
        return None
    ids = [name for names in groups.values() for name in names[:MAX_UTTERANCES]]
    pair_N2 = np.array(list(combinations(range(len(ids)), 2)), dtype=np.int32)
    speaker_I = np.unique([speaker_of[name] for name in ids], return_inverse=True)[1]
    first_N, second_N = speaker_I[pair_N2[:, 0]], speaker_I[pair_N2[:, 1]]
    return TrialList(
        name=f"{data_dir.name}: {len(groups)} held-out speakers",
        path=data_dir,
        trials=Trials(ids, ids, pair_N2[:, 0], pair_N2[:, 1], first_N == second_N),
        speakers=(first_N, second_N),
        models={},
        columns={},
        seconds=read_seconds(data_dir),
    )
