"""A trial list with all that its data directory knows of it. In: the list's path. Out: `TrialList`.

Letters: N trials.
The enrolment side may name models of `enroll.map`, whose embedding is the mean of those of their
utterances. `utt2<name>` and `spk2<name>` are conditions, `utt2dur` tells durations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakerlab.data.tables import ENROLL_MAP, list_conditions, read_enroll, read_table
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.enrolment import average_models, speaker_of_models
from speakerlab.scoring.trials import Trials, read_trials

PROTOCOL = "each trial compares two whole utterances"
AVERAGED = (
    "each trial compares a model of {least} to {most} utterances, the mean of their embeddings, "
    "with one whole utterance"
)


@dataclass(frozen=True)
class TrialList:
    """Trials, who speaks on either side, and what is known of the utterances and models in them."""

    name: str  # folder and file
    path: Path
    trials: Trials
    speakers: tuple[np.ndarray, np.ndarray]  # numbers, (N) each
    models: Mapping[str, Sequence[str]]  # those on the enrolment side -> their utterances
    columns: Mapping[str, Mapping[str, str]]  # condition -> (utterance or model -> value)
    seconds: Mapping[str, float]  # of an utterance or of a model's together

    @property
    def protocol(self) -> str:
        """What is compared with what."""
        if not self.models:
            return PROTOCOL
        sizes = [len(names) for names in self.models.values()]
        return AVERAGED.format(least=min(sizes), most=max(sizes))

    def tables(self, table: EmbeddingTable) -> tuple[EmbeddingTable, EmbeddingTable]:
        """The embeddings of either side, of a table with one for each utterance."""
        if not self.models:
            return table, table
        plain = [name for name in self.trials.enrol_ids if name not in self.models]
        sides = [average_models(table, self.models), table.select(plain, where="enrolment")]
        return EmbeddingTable.merge(sides), table

    def side_seconds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Durations of either side, (N) each; None where one is not known."""
        if not self.seconds.keys() >= set(self.trials.ids):
            return None
        of_enrol, of_test = (
            np.array([self.seconds[name] for name in ids])
            for ids in (self.trials.enrol_ids, self.trials.test_ids)
        )
        return of_enrol[self.trials.enrol_N], of_test[self.trials.test_N]


def read_trial_list(path: Path) -> TrialList:
    """Read a list of a checked data directory; what is wrong is named by file and line."""
    trials, folder = read_trials(path), path.parent
    speaker_of = read_table(folder / "utt2spk")
    mapped = read_enroll(folder / ENROLL_MAP)
    models = {name: mapped[name] for name in trials.enrol_ids if name in mapped}
    trials.check_known(speaker_of.keys() | models.keys(), where=str(path))
    seconds = read_seconds(folder)
    columns = {name: _column(folder, table, speaker_of) for name, table in _names(folder).items()}
    for model, names in models.items():
        for column in columns.values():
            values = {column.get(name) for name in names}
            if len(values) == 1 and None not in values:
                column[model] = str(*values)
        if all(name in seconds for name in names):
            seconds[model] = sum(seconds[name] for name in names)
    return TrialList(
        name=f"{folder.name}/{path.name}",
        path=path,
        trials=trials,
        speakers=trials.speakers(speaker_of | speaker_of_models(models, speaker_of)),
        models=models,
        columns=columns,
        seconds=seconds,
    )


def read_seconds(folder: Path) -> dict[str, float]:
    """utterance -> duration, as stage 1 measured it; empty where it did not."""
    path = folder / "utt2dur"
    return {name: float(text) for name, text in read_table(path).items()} if path.exists() else {}


def _names(folder: Path) -> dict[str, Path]:
    """condition -> the table that tells it."""
    return {name.partition("2")[2]: folder / name for name in list_conditions(folder)}


def _column(folder: Path, path: Path, speaker_of: Mapping[str, str]) -> dict[str, str]:
    """utterance -> value, of a table by utterance or by speaker."""
    table = read_table(path)
    if path.name.startswith("utt2"):
        return table
    return {name: table[speaker] for name, speaker in speaker_of.items() if speaker in table}
