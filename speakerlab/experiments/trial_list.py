"""A trial list with what its data directory knows of it. In: the list's path. Out: `TrialList`.

Letters: N trials, M enrolment models, D dimensions.
The enrolment side may name models of `enroll.map`, whose embedding is the mean of those of their
utterances. `utt2<name>` and `spk2<name>` are conditions, `utt2dur` holds durations.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from speakerlab.core.faults import Faults
from speakerlab.data.tables import (
    ENROLL_MAP,
    list_conditions,
    read_durations,
    read_enroll,
    read_table,
)
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.trials import LABELS, Trials, read_trials

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrialList:
    """Trials, the speakers on either side, and what is known of their utterances and models."""

    name: str  # folder and file
    path: Path
    trials: Trials
    speakers: tuple[np.ndarray, np.ndarray]  # numbers, (N) each
    models: Mapping[str, Sequence[str]]  # enrolment model -> its utterances
    columns: Mapping[str, Mapping[str, str]]  # condition -> (utterance or model -> value)
    seconds: Mapping[str, float]  # of an utterance, or of all utterances of a model

    @property
    def protocol(self) -> str:
        """Describe what a trial compares, for the report."""
        sizes = self.num_enrol.values()
        if not sizes:
            return "each trial compares two whole utterances"
        return (
            f"each trial compares a model of {min(sizes)} to {max(sizes)} utterances, the mean of "
            "their embeddings, with one whole utterance"
        )

    @property
    def num_enrol(self) -> dict[str, int]:
        return {model: len(names) for model, names in self.models.items()}

    def tables(self, table: EmbeddingTable) -> tuple[EmbeddingTable, EmbeddingTable]:
        """Return the embeddings of either side, from a table that has each utterance."""
        if not self.models:
            return table, table
        sides = {name: self.models.get(name, [name]) for name in self.trials.enrol_ids}
        return average_models(table, sides), table

    def side_seconds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the durations of either side, (N) each; None if one is unknown."""
        if not self.seconds.keys() >= set(self.trials.ids):
            return None
        return self.trials.look_up(self.seconds.__getitem__)


@dataclass(frozen=True)
class ListScores:
    """A trial list as one back end scored it."""

    listed: TrialList
    backend: str  # as in its row
    scores_N: np.ndarray
    llr_N: np.ndarray | None = None  # calibrated scores, natural logarithm
    untrained_N: np.ndarray | None = None  # scores of the initial weights


def read_trial_list(path: Path) -> TrialList:
    """Read a list of a checked data directory; ValueError names faults by file and line."""
    trials, folder = read_trials(path), path.parent
    speaker_of = read_table(folder / "utt2spk")
    mapped = read_enroll(folder / ENROLL_MAP)
    models = {name: mapped[name] for name in trials.enrol_ids if name in mapped}
    trials.check_known(speaker_of.keys() | models.keys(), where=str(path))
    seconds, columns = read_durations(folder), _read_conditions(folder, speaker_of)
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
                "%s: lacks %d of %d utterances and models, such as %s; their trials have no row",
                *(folder / condition, len(unknown), len(trials.ids), unknown[0]),
            )
    name = f"{folder.name}/{path.name}"
    return TrialList(name, path, trials, trials.speakers(who), models, columns, seconds)


def average_models(table: EmbeddingTable, models: Mapping[str, Sequence[str]]) -> EmbeddingTable:
    """Average the embeddings of each model's utterances, unnormalised: a table of the models.

    This is the averaged protocol of WeSpeaker's CN-Celeb recipe. Raises ValueError for utterances
    without an embedding.
    """
    found = table.select(list(dict.fromkeys(chain(*models.values()))), where="enrolment")
    row_of = {name: row for row, name in enumerate(found.ids)}
    emb_MD = np.stack(
        [found.emb_ND[[row_of[name] for name in names]].mean(axis=0) for names in models.values()]
    )
    return EmbeddingTable(list(models), emb_MD, table.model_sha256, table.facts)


def speaker_of_models(
    models: Mapping[str, Sequence[str]], speaker_of: Mapping[str, str], *, where: str
) -> dict[str, str]:
    """Return model -> speaker; raise ValueError for a model with several speakers."""
    found: dict[str, str] = {}
    for model, names in models.items():
        speakers = sorted({speaker_of.get(name, "nobody") for name in names})
        if len(speakers) != 1:
            got = ", ".join(speakers) or "no utterance"
            raise ValueError(f"{where}: {model} must be one speaker, got {got}; correct it")
        found[model] = speakers[0]
    return found


def _check(
    trials: Trials, who: Mapping[str, str], models: Mapping[str, Sequence[str]], path: Path
) -> None:
    """Refuse labels that contradict the speakers; warn of tests on an enrolled utterance."""
    enrol_N, test_N = trials.speakers(who)
    faults = Faults()
    for n in np.flatnonzero((enrol_N == test_N) != trials.is_target_N).tolist():
        enrol, test = trials.enrol_ids[trials.enrol_N[n]], trials.test_ids[trials.test_N[n]]
        faults.add(
            "trials that contradict the speakers",
            f"{path}: trial {n + 1} is a {LABELS[int(trials.is_target_N[n])]}, but {enrol} is of "
            f"{who[enrol]} and {test} of {who[test]}; correct the list or utt2spk",
        )
    faults.raise_if_any(f"{path}: refused")
    trials.check_both_kinds(where=str(path))
    parts, ids = [{*models.get(name, [name])} for name in trials.enrol_ids], trials.test_ids
    own = sum(ids[t] in parts[e] for e, t in zip(trials.enrol_N.tolist(), trials.test_N.tolist()))
    if own:
        log.warning("%s: in %d trials the test utterance is also enrolled", path, own)


def _read_conditions(folder: Path, speaker_of: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Read condition -> (utterance -> value) from tables by utterance and by speaker."""
    columns: dict[str, dict[str, str]] = {}
    for name in list_conditions(folder):
        kind, _, condition = name.partition("2")
        table = read_table(folder / name)
        if kind == "spk":
            table = {utt: table[spk] for utt, spk in speaker_of.items() if spk in table}
        columns[condition] = table
    return columns
