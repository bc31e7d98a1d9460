"""Trial list with the metadata of its data directory. In: the list's path. Out: `TrialList`.

Letters: N trials, M enrolment models, U utterances of a model, D dimensions.
The enrolment side may name models of `enroll.map`; the embedding of a model is the mean over its
utterances. `utt2<name>` and `spk2<name>` are conditions, `utt2dur` holds durations.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.trial_lines import LABELS
from speakerlab.data.tables import (
    ENROLL_MAP,
    list_conditions,
    read_durations,
    read_enroll,
    read_table,
)
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.trials import Trials, read_trials

log = logging.getLogger(__name__)
Column = Mapping[str, str]  # utterance or model -> value of a condition
Models = Mapping[str, Sequence[str]]  # enrolment model -> its utterances


@dataclass(frozen=True)
class TrialList:
    """Trials, the speakers on either side, and metadata of their utterances and models."""

    name: str  # folder and file
    path: Path
    trials: Trials
    speakers: tuple[np.ndarray, np.ndarray]  # numbers, (N) each
    models: Models
    columns: Mapping[str, Column]
    seconds: Mapping[str, float]  # of an utterance, or of all utterances of a model
    speaker_names: frozenset[str] = frozenset()

    @property
    def protocol(self) -> str:
        """Describe the two sides of a trial, for the report."""
        sizes = self.num_enrol.values()
        if not sizes:
            return "each trial compares two whole utterances"
        least = min(sizes)
        most = count_of(max(sizes), "utterance")
        size = most if least == max(sizes) else f"{least} to {most}"
        return (
            f"each trial compares a model of {size},"
            " the mean of their embeddings, with one whole utterance"
        )

    @property
    def num_enrol(self) -> dict[str, int]:
        return {model: len(names) for model, names in self.models.items()}

    def tables(self, table: EmbeddingTable) -> tuple[EmbeddingTable, EmbeddingTable]:
        """Return the embeddings of either side, given a table with all utterances."""
        if not self.models:
            return table, table
        # The enrolment side may also name utterances, which are models of one utterance.
        models: dict[str, Sequence[str]] = {}
        for name in self.trials.enrol_ids:
            models[name] = self.models.get(name, [name])
        return average_models(table, models), table

    def side_seconds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the durations of either side, (N) each; None if one is unknown."""
        has_all = self.seconds.keys() >= set(self.trials.ids)
        if not has_all:
            return None
        return self.trials.look_up(self.seconds.__getitem__)


@dataclass(frozen=True)
class ListScores:
    """Scores of a trial list by one back end."""

    listed: TrialList
    backend: str  # as in its row
    scores_N: np.ndarray
    llr_N: np.ndarray | None = None  # calibrated scores, natural logarithm
    untrained_N: np.ndarray | None = None  # scores of the initial weights
    # Whether these initial weights are those of a trained model (--init).
    fine_tuned: bool = False


def list_name(path: Path) -> str:
    """Return the name of a list: its folder and its file."""
    folder = path.parent
    # The folder of a bare file name, or one above, has a name too; a link keeps its own.
    if folder.name in ("", ".."):
        folder = folder.resolve()
    return f"{folder.name}/{path.name}"


def read_trial_list(path: Path) -> TrialList:
    """Read a list of a checked data directory; ValueError names file and line of faults."""
    folder = path.parent
    enroll_map = folder / ENROLL_MAP
    trials = read_trials(path)
    speaker_of = read_table(folder / "utt2spk")
    utterances_of = read_enroll(enroll_map)
    models: dict[str, Sequence[str]] = {}
    for name in trials.enrol_ids:
        if name in utterances_of:
            models[name] = utterances_of[name]
    trials.check_known(speaker_of.keys() | models.keys(), where=str(path))

    seconds = read_durations(folder)
    columns = _read_conditions(folder, speaker_of)
    for model, utterances in models.items():
        # A model has a condition's value if all of its utterances have that value.
        for column in columns.values():
            values = {column.get(utterance) for utterance in utterances}
            value = values.pop() if len(values) == 1 else None
            if value is not None:
                column[model] = value
        has_durations = all(utterance in seconds for utterance in utterances)
        if has_durations:
            seconds[model] = sum(seconds[utterance] for utterance in utterances)

    # The list may name both utterances and models.
    model_speakers = speaker_of_models(models, speaker_of, where=str(enroll_map))
    speaker_of_id = speaker_of | model_speakers
    _check(trials, speaker_of_id, models, path)
    for condition, column in columns.items():
        _report_unknown(trials, column, folder / condition)
    return TrialList(
        list_name(path),
        path,
        trials,
        trials.speakers(speaker_of_id),
        models,
        columns,
        seconds,
        frozenset(speaker_of_id[name] for name in trials.ids),
    )


def average_models(
    table: EmbeddingTable,
    models: Models,
) -> EmbeddingTable:
    """Return a table of the models: the mean of each model's unnormalised embeddings.

    This is the averaged protocol of WeSpeaker's CN-Celeb recipe. Raises ValueError for utterances
    without an embedding.
    """
    utterances = dict.fromkeys(chain(*models.values()))  # each once, in order
    enrolled = table.select(list(utterances), where="enrolment")
    row_of = {name: row for row, name in enumerate(enrolled.ids)}

    model_embeddings: list[np.ndarray] = []
    for names in models.values():
        rows = [row_of[name] for name in names]
        emb_UD = enrolled.emb_ND[rows]
        model_embeddings.append(emb_UD.mean(axis=0))
    emb_MD = np.stack(model_embeddings)
    return EmbeddingTable(list(models), emb_MD, table.model_sha256, table.facts)


def speaker_of_models(
    models: Models,
    speaker_of: Mapping[str, str],
    *,
    where: str,
) -> dict[str, str]:
    """Return model -> speaker; raise ValueError for a model with several speakers."""
    speaker_of_model: dict[str, str] = {}
    for model, utterances in models.items():
        names = {speaker_of.get(utterance, "nobody") for utterance in utterances}
        speakers = sorted(names)
        if len(speakers) != 1:
            got = ", ".join(speakers) or "no utterance"
            raise ValueError(
                f"{where}: {model} must be one speaker, got {got}; correct it"
            )
        speaker_of_model[model] = speakers[0]
    return speaker_of_model


def _check(
    trials: Trials,
    speaker_of: Mapping[str, str],
    models: Models,
    path: Path,
) -> None:
    """Refuse labels that contradict the speakers; warn if test utterances are also enrolled."""
    enrol_speaker_N, test_speaker_N = trials.speakers(speaker_of)
    is_same_speaker_N = enrol_speaker_N == test_speaker_N
    faults = Faults()
    wrong_N = is_same_speaker_N != trials.is_target_N
    for number in np.flatnonzero(wrong_N).tolist():
        enrol = trials.enrol_ids[trials.enrol_N[number]]
        test = trials.test_ids[trials.test_N[number]]
        label = LABELS[int(trials.is_target_N[number])]
        faults.add(
            "trials that contradict the speakers",
            f"{path}: trial {number + 1} is a {label}, but {enrol} is of"
            f" {speaker_of[enrol]} and {test} of {speaker_of[test]}; correct the list"
            " or utt2spk",
        )
    faults.raise_if_any(f"{path}: refused")
    trials.check_both_kinds(where=str(path))

    # A trial is too easy if its test utterance is part of the model. Sets, because a list may
    # have millions of trials.
    enrolled = [set(models.get(name, [name])) for name in trials.enrol_ids]
    num_same = 0
    for enrol, test in zip(trials.enrol_N.tolist(), trials.test_N.tolist()):
        num_same += trials.test_ids[test] in enrolled[enrol]
    if num_same:
        log.warning(
            "%s: in %s the test utterance is also enrolled",
            path,
            count_of(num_same, "trial"),
        )


def _report_unknown(trials: Trials, column: Column, table: Path) -> None:
    """Log utterances and models without a value of a condition."""
    unknown = [name for name in trials.ids if name not in column]
    if unknown:
        log.info(
            "%s: lacks %d of %d utterances and models, such as %s; their trials"
            " have no row",
            table,
            len(unknown),
            len(trials.ids),
            unknown[0],
        )


def _read_conditions(
    folder: Path,
    speaker_of: Mapping[str, str],
) -> dict[str, dict[str, str]]:
    """Read condition -> (utterance -> value) from tables by utterance and by speaker."""
    columns: dict[str, dict[str, str]] = {}
    for name in list_conditions(folder):
        kind, _, condition = name.partition("2")
        table = read_table(folder / name)
        column = table
        if kind == "spk":
            # Every utterance has the value of its speaker.
            column = {}
            for utterance, speaker in speaker_of.items():
                if speaker in table:
                    column[utterance] = table[speaker]
        columns[condition] = column
    return columns
