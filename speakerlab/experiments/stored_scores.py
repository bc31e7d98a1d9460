"""Stored scores of experiments: their primary results, their score files, their trial lists.

In: folders of experiments. Out: rows of results.json, scores in the order of the trials.
Letters: N trials.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from speakerlab.checkpoints.model_files import read_card, read_settings
from speakerlab.core.done import read_record
from speakerlab.experiments.results import Row, read_rows
from speakerlab.experiments.trial_list import TrialList, read_trial_list
from speakerlab.scoring.metrics import eer
from speakerlab.scoring.score_files import read_scores

ENROLLED_BY = ", enrolled by "  # in the name of a list that another model enrols
# Stored scores are rounded, which moves an EER by some trials at most.
MAX_EER_CHANGE = 0.01


class OtherTrialsError(ValueError):
    """Scores are not those of the trial list."""


def primary_rows(exp_dir: Path) -> dict[str, Row]:
    """Return trial list -> its primary row, or its first row if none is marked.

    Rows of an earlier model of the experiment are left out.
    """
    if not (exp_dir / "model").exists():
        return {}
    digest = read_card(exp_dir)["sha256"]
    rows: dict[str, Row] = {}
    for row in read_rows(exp_dir / "results.json"):
        is_verification = row.get("task") is None
        if not is_verification or row["model_sha256"] != digest:
            continue
        if row.get("primary") or row["trials"] not in rows:
            rows[row["trials"]] = row
    return rows


def find_list(
    name: str,
    exp_dirs: Iterable[Path],
    lists: Iterable[Path] = (),
) -> TrialList:
    """Read the trial list of a name such as test/trials; ValueError if it is not found.

    It is looked for among `lists`, then where the experiments were scored, then in their data.dir.
    """
    base, _, _ = name.partition(ENROLLED_BY)
    given = (path for path in lists if path.match(base))
    stored = chain.from_iterable(_stored_paths(exp_dir, base) for exp_dir in exp_dirs)
    looked_for: list[Path] = []
    for path in chain(given, stored):
        if path.is_file():
            return read_trial_list(path)
        looked_for.append(path)
    place = f" as {looked_for[0].absolute()}" if looked_for else ""
    raise ValueError(f"the list was not found{place}; give its path with --trials FILE")


def _stored_paths(exp_dir: Path, base: str) -> Iterator[Path]:
    """Yield where the list of an experiment may be; base: folder and file of the list."""
    folder, _, file = base.rpartition("/")
    # A record has the lists of the last scoring, and their data directories.
    record = read_record(exp_dir / "scores/.scored")
    digest_of_lists: dict[str, str] = json.loads(record.get("trials", "{}"))
    for path in map(Path, digest_of_lists):
        if path.match(base):
            yield from _from_experiment(exp_dir, path)
    sets: list[dict[str, str]] = json.loads(record.get("sets", "[]"))
    for inputs in sets:
        data_dir = Path(inputs["folder"])
        if data_dir.name == folder:
            yield from _from_experiment(exp_dir, data_dir / file)
    # Only then: a list that the record has is found without the settings.
    data_root = read_settings(exp_dir)["data"]["dir"]
    yield from _from_experiment(exp_dir, Path(data_root, base))


def _from_experiment(exp_dir: Path, path: Path) -> Iterator[Path]:
    """Yield where a stored path may lead: a relative one was relative to another folder.

    Most often, that folder contains the experiment.
    """
    yield path
    if not path.is_absolute():
        for folder in exp_dir.absolute().parents:
            yield folder / path


def scores_path(exp_dir: Path, row: Row) -> Path:
    """Return the file in which `speakerlab score` has stored the scores of a row of results."""
    name = row["trials"].replace("/", "_").replace(ENROLLED_BY, "_enrolled_by_")
    if row["backend"] != "cosine":
        name += f"_{row['backend']}"
    return exp_dir / "scores" / f"{name}.txt"


def read_stored(exp_dir: Path, name: str, row: Row, listed: TrialList) -> np.ndarray:
    """Return the scores (N) behind a row of results; ValueError with the reason for none.

    name: the experiment in the reason. Raises OtherTrialsError if the list has other trials.
    """
    path = scores_path(exp_dir, row)
    if not path.is_file():
        raise ValueError(f"{name} has no stored scores")
    trials = listed.trials
    num_target = int(np.count_nonzero(trials.is_target_N))
    num_nontarget = len(trials) - num_target
    other_trials = f"{name} was scored on other trials than those of {listed.path}"
    if (row["num_target"], row["num_nontarget"]) != (num_target, num_nontarget):
        raise OtherTrialsError(other_trials)
    try:
        scores_N = read_scores(path, trials)
    except ValueError:
        raise OtherTrialsError(other_trials) from None
    if abs(eer(scores_N, trials.is_target_N) - row["eer"]) > MAX_EER_CHANGE:
        raise ValueError(f"the stored scores of {name} are not those of its EER")
    return scores_N
