"""A trial list with all that its data directory knows of it. In: the list's path. Out: `TrialList`.

Letters: N trials.
The enrolment side may name models of `enroll.map`, whose embedding is the mean of those of their
utterances. `utt2<name>` and `spk2<name>` are conditions, `utt2dur` tells durations.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speakerlab.core.faults import Faults
from speakerlab.data.tables import ENROLL_MAP, list_conditions, read_enroll, read_table
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.enrolment import average_models, speaker_of_models
from speakerlab.scoring.trials import Trials, label_of, read_trials

log = logging.getLogger(__name__)
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
    who = speaker_of | speaker_of_models(models, speaker_of, where=str(folder / ENROLL_MAP))
    _check(trials, who, models, path)
    for condition, column in columns.items():
        unknown = [name for name in trials.ids if name not in column]
        if unknown:
            log.info(
                "%s: tells nothing of %d of %d utterances and models, %s among them: their trials "
                "are in no row of it",
                *(folder / condition, len(unknown), len(trials.ids), unknown[0]),
            )
    return TrialList(
        name=f"{folder.name}/{path.name}",
        path=path,
        trials=trials,
        speakers=trials.speakers(who),
        models=models,
        columns=columns,
        seconds=seconds,
    )


def _check(
    trials: Trials, who: Mapping[str, str], models: Mapping[str, Sequence[str]], path: Path
) -> None:
    """Refuse a truth that the speakers contradict; tell of trials that test what they enrolled."""
    enrol_N, test_N = trials.speakers(who)
    faults = Faults()
    for n in np.flatnonzero((enrol_N == test_N) != trials.is_target_N).tolist():
        enrol, test = trials.enrol_ids[trials.enrol_N[n]], trials.test_ids[trials.test_N[n]]
        faults.add(
            "trials that the speakers contradict",
            f"{path}: trial {n + 1} is a {label_of(trials.is_target_N[n])}, got {enrol} of "
            f"{who[enrol]} and {test} of {who[test]}; mend the list or utt2spk",
        )
    faults.raise_if_any(f"{path}: refused")
    num_target = int(trials.is_target_N.sum())
    if not 0 < num_target < len(trials):
        raise ValueError(
            f"{path}: an error rate needs targets and nontargets, got {num_target} targets of "
            f"{len(trials)} trials; add the others"
        )
    parts = [set(models.get(name, [name])) for name in trials.enrol_ids]
    ids = trials.test_ids
    own = sum(ids[t] in parts[e] for e, t in zip(trials.enrol_N.tolist(), trials.test_N.tolist()))
    if own:
        log.warning("%s: %d trials test an utterance that is enrolled in them", path, own)


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
