"""Table of experiments: the settings that differ, results, steps and hours; tests of differences.

In: folders of experiments. Out: `Run`s, `Difference`s and their tables. Nothing is trained, and no
model is loaded.

The EERs of a trial list are compared by the paired bootstrap over speakers of `speakerlab compare`,
on the stored scores. Each experiment is compared with one of them, and the p-values of a list are
corrected for the number of its comparisons by Holm's method (S. Holm, "A simple sequentially
rejective multiple test procedure", Scandinavian Journal of Statistics 6(2), 1979).

Letters: N trials, R replicates, C comparisons.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.config.layers import flatten, merge_layers
from speakerlab.core.reading import read_json
from speakerlab.experiments.naming import changes_result, labels_of, value_text
from speakerlab.experiments.results import Row, aligned, bounds, percent
from speakerlab.experiments.stored_scores import find_list, primary_rows, read_stored
from speakerlab.experiments.trial_list import TrialList
from speakerlab.scoring.bootstrap import Replicates, bootstrap

LEVEL = 0.05  # of significance, after the correction
# Beside its config.yaml, an experiment whose training has begun has at least one of these.
BEGUN = ("run.json", "metrics.jsonl", "model")
# Facts of run.json in which trainings with equal settings may differ.
FACTS = {"init_sha256": "init", "train_sha256": "train data"}
# Metrics of a validation, and what tables call them; smaller is better.
VALID_METRICS = {
    "eer": "EER",
    "error": "error",
    "teacher_distance": "teacher distance",
}
# At the start of a training, `train.log` has a line with this.
STARTED = ": trains on "
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
TIME_LENGTH = len("2026-01-31 12:00:00")


@dataclass(frozen=True)
class Run:
    """An experiment, as far as it has come."""

    exp_dir: Path
    name: str
    settings: Mapping[str, Any]  # of config.yaml, by dotted key, and facts of run.json
    steps: int
    hours: float | None  # of training; None without a log
    valid: Mapping[str, float]  # metrics of the last validation
    rows: Mapping[str, Row]  # trial list -> its primary row of results.json

    @property
    def is_finished(self) -> bool:
        return (self.exp_dir / "model").exists()


@dataclass(frozen=True)
class Difference:
    """EER of an experiment minus that of the reference, on one trial list."""

    trials: str
    run: Run
    eer_difference: float | None = None  # a fraction; None: not tested
    num_speakers: int = 0
    ci95: Sequence[float] | None = None  # of this difference alone, without correction
    p_value: float | None = None  # None: too few speakers
    corrected_p: float | None = None
    # Smallest corrected p-value that the replicates can show, if all of them had one sign.
    least_p: float | None = None
    not_tested: str = ""  # the reason

    @property
    def is_significant(self) -> bool:
        return self.corrected_p is not None and self.corrected_p < LEVEL


def find_experiments(paths: Sequence[Path]) -> list[Path]:
    """Return the experiments, each once, in the given order.

    A folder of experiments stands for all of them, sorted by name. Raises ValueError for a path
    that is neither, and for fewer than two experiments.
    """
    folders: dict[Path, Path] = {}  # real path -> as given
    for path in paths:
        inner = [path]
        if not is_experiment(path):
            inner = sorted(filter(is_experiment, path.glob("*")))
        if not inner:
            problem = (
                "is no experiment, and has none" if path.exists() else "is missing"
            )
            raise ValueError(
                f"{path}: {problem}; give folders that `speakerlab train` wrote, or a"
                " folder of them"
            )
        for folder in inner:
            folders.setdefault(folder.resolve(), folder)
    if len(folders) < 2:
        (only,) = folders.values()
        raise ValueError(f"{only}: is the only experiment; give two or more to compare")
    return list(folders.values())


def is_experiment(path: Path) -> bool:
    """Return whether a folder is an experiment whose training has begun."""
    has_begun = any((path / name).exists() for name in BEGUN)
    return (path / "config.yaml").is_file() and has_begun


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read experiments; ValueError for a damaged file."""
    counts = Counter(folder.name for folder in folders)
    runs: list[Run] = []
    for folder in folders:
        is_unique = folder.name and counts[folder.name] == 1
        name = folder.name if is_unique else str(folder)
        runs.append(_read_run(folder, name))
    return runs


def _read_run(exp_dir: Path, name: str) -> Run:
    values, _ = merge_layers([exp_dir / "config.yaml"])
    settings = flatten(values)
    facts = exp_dir / "run.json"
    if facts.exists():
        recorded = read_json(facts)
        for key, label in FACTS.items():
            digest = recorded.get(key)
            settings[label] = digest and digest[:12]
    steps, valid = _read_progress(exp_dir / "metrics.jsonl")
    return Run(
        exp_dir=exp_dir,
        name=name,
        settings=settings,
        steps=steps,
        hours=_training_hours(exp_dir / "train.log"),
        valid=valid,
        rows=primary_rows(exp_dir),
    )


def _read_progress(path: Path) -> tuple[int, dict[str, float]]:
    """Return the last step, and the metrics of the last validation."""
    last_step = 0
    valid: dict[str, float] = {}
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
            step = int(row["step"])
            kind = row["kind"]
        except (ValueError, LookupError, TypeError):  # a line cut by a kill
            continue
        last_step = step
        if kind == "valid":
            valid = {name: row[name] for name in VALID_METRICS if name in row}
    return last_step, valid


def _training_hours(path: Path) -> float | None:
    """Return the hours between the first and the last line of each start, added up."""
    if not path.exists():
        return None
    seconds = 0.0
    last: datetime | None = None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            time = datetime.strptime(line[:TIME_LENGTH], TIME_FORMAT)
        except ValueError:  # a further line of a message
            continue
        # The time before a resumed start was no training.
        if last is not None and STARTED not in line:
            seconds += (time - last).total_seconds()
        last = time
    return seconds / 3600


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return label -> the value of each run, for settings of which runs have different values.

    Settings that do not change the result are left out: see `other_differences`. A run without the
    setting, such as an argument of another model, has None.
    """
    values_of = _differing_values(runs)
    keys = [key for key in values_of if changes_result(key)]
    all_keys = dict.fromkeys(key for run in runs for key in run.settings)
    labels = labels_of(all_keys)
    return {labels[key]: values_of[key] for key in keys}


def other_differences(runs: Sequence[Run]) -> list[str]:
    """Return the keys of differing settings that do not change the result, such as `runtime.*`."""
    return [key for key in _differing_values(runs) if not changes_result(key)]


def _differing_values(runs: Sequence[Run]) -> dict[str, list[Any]]:
    all_keys = dict.fromkeys(key for run in runs for key in run.settings)
    values_of: dict[str, list[Any]] = {}
    for key in all_keys:
        values: list[Any] = []
        present: set[str] = set()
        for run in runs:
            value = run.settings.get(key)
            # A section such as `vad` is null in some runs; in this run, it has settings.
            is_section = any(setting.startswith(f"{key}.") for setting in run.settings)
            if is_section:
                value = "set"
            values.append(value)
            # Runs without the setting have another model, or are of another version: they do not
            # count as different.
            if is_section or key in run.settings:
                present.add(json.dumps(value))
        if len(present) > 1:
            values_of[key] = values
    return values_of


def lists_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the trial lists that any run was scored on, each once."""
    return list(dict.fromkeys(name for run in runs for name in run.rows))


def choose_reference(runs: Sequence[Run]) -> tuple[Run, str]:
    """Return the run that the others are compared with, and the reason.

    It is the run with the lowest validation metric: a run that is chosen by its result on a trial
    list looks better on this list than it is. Without a metric that all runs have, it is the first.
    """
    for metric, shown in VALID_METRICS.items():
        if all(metric in run.valid for run in runs):
            best = min(runs, key=lambda run: run.valid[metric])
            return best, f"lowest validation {shown}"
    return runs[0], "the first"


def find_differences(
    runs: Sequence[Run],
    reference: Run,
    lists: Sequence[Path] = (),
) -> list[Difference]:
    """Compare every run with the reference on each trial list, by the paired bootstrap.

    lists: trial lists whose paths the records of scoring do not have. A comparison that is not
    possible has the reason instead.
    """
    differences: list[Difference] = []
    for name in lists_of(runs):
        differences += _compare_on_list(name, runs, reference, lists)
    return differences


def _compare_on_list(
    name: str,
    runs: Sequence[Run],
    reference: Run,
    lists: Sequence[Path],
) -> list[Difference]:
    compared_runs = [run for run in runs if run is not reference]
    try:
        exp_dirs = [run.exp_dir for run in (reference, *compared_runs)]
        listed = find_list(name, exp_dirs, lists)
        reference_replicates = _replicates(reference, name, listed)
    except (ValueError, OSError) as error:
        reason = str(error)
        return [Difference(name, run, not_tested=reason) for run in compared_runs]

    differences: list[Difference] = []
    for run in compared_runs:
        try:
            replicates = _replicates(run, name, listed)
        except (ValueError, OSError) as error:
            difference = Difference(name, run, not_tested=str(error))
        else:
            ci95, p_value = replicates.paired(reference_replicates, "eer")
            difference = Difference(
                trials=name,
                run=run,
                eer_difference=run.rows[name]["eer"] - reference.rows[name]["eer"],
                num_speakers=replicates.num_speakers,
                ci95=ci95,
                p_value=p_value,
                least_p=least_p(replicates),
            )
        differences.append(difference)
    return _correct(differences)


def _replicates(run: Run, name: str, listed: TrialList) -> Replicates:
    """Return the bootstrap replicates of a run's EER; ValueError with the reason for none."""
    row = run.rows.get(name)
    if row is None:
        raise ValueError(f"{run.name} was not scored on it")
    scores_N = read_stored(run.exp_dir, run.name, row, listed)
    trials = listed.trials
    return bootstrap(scores_N, trials.is_target_N, *listed.speakers, p_targets=())


def least_p(replicates: Replicates) -> float | None:
    """Return the p-value of a difference that has the same sign in all replicates.

    No difference can have a smaller one with so many replicates. None with too few speakers.
    """
    ones_R = np.ones_like(replicates.values["eer"])
    above = Replicates({"eer": ones_R}, replicates.num_speakers)
    zero = Replicates({"eer": 0 * ones_R}, replicates.num_speakers)
    _, p_value = above.paired(zero, "eer")
    return p_value


def _correct(differences: Sequence[Difference]) -> list[Difference]:
    """Fill in the corrected p-values of the comparisons of one list."""
    p_values: list[float] = []
    for difference in differences:
        if difference.p_value is not None:
            p_values.append(difference.p_value)
    corrected_p_values = iter(holm(p_values))
    corrected: list[Difference] = []
    for difference in differences:
        least_p = difference.least_p
        if least_p is not None:
            least_p = min(1.0, least_p * len(p_values))
        p_value = None
        if difference.p_value is not None:
            p_value = next(corrected_p_values)
        corrected.append(replace(difference, corrected_p=p_value, least_p=least_p))
    return corrected


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method, in the same order.

    The k-th smallest of C is multiplied by C - k + 1, and is never below the one before it.
    """
    order = np.argsort(p_values, kind="stable")
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, number in enumerate(order.tolist()):
        factor = len(p_values) - rank
        largest = max(largest, min(1.0, factor * p_values[number]))
        corrected[number] = largest
    return corrected


def format_runs(runs: Sequence[Run], width: int | None = None) -> str:
    """Format the runs as aligned text; width: see `results.aligned`."""
    columns = {"experiment": [run.name for run in runs]}
    for label, values in differing_settings(runs).items():
        columns[label] = [value_text(value) for value in values]
    for metric, shown in VALID_METRICS.items():
        if any(metric in run.valid for run in runs):
            columns[f"valid {shown}"] = [_show_valid(run, metric) for run in runs]
    for name in lists_of(runs):
        columns[f"{name} EER %"] = [_show_eer(run, name) for run in runs]
    columns["steps"] = [f"{run.steps:,}" for run in runs]
    columns["hours"] = [_show_hours(run.hours) for run in runs]
    header = list(columns)
    lines = zip(*columns.values())
    return aligned([header, *lines], width=width)


def _show_valid(run: Run, metric: str) -> str:
    value = run.valid.get(metric)
    if value is None:
        return ""
    if metric == "teacher_distance":  # the other metrics are rates
        return f"{value:.4f}"
    return f"{percent(value)} %"


def _show_eer(run: Run, name: str) -> str:
    row = run.rows.get(name)
    if row is None:
        return ""
    interval = bounds(row["eer_ci95"], {"num_speakers": None, "num": 0} | row, percent)
    text = f"{percent(row['eer'])} ({interval})"
    if row["backend"] != "cosine":
        text += f" {row['backend']}"
    return text


def _show_hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:.2f}"


def format_differences(
    differences: Sequence[Difference],
    width: int | None = None,
) -> str:
    """Format the tested differences as aligned text, "" if none was tested."""
    header = [
        "trials",
        "experiment",
        "difference",
        "95 % interval",
        "p",
        "p (Holm)",
        "significant",
    ]
    lines = [header]

    def show(rate: float) -> str:
        return f"{100 * rate:+.2f}"

    for difference in differences:
        if difference.eer_difference is None:
            continue
        row = {"num_speakers": difference.num_speakers}
        line = [
            difference.trials,
            difference.run.name,
            show(difference.eer_difference),
            bounds(difference.ci95, row, show),
            _show_p(difference.p_value),
            _show_p(difference.corrected_p),
            _show_significance(difference),
        ]
        lines.append(line)
    if len(lines) == 1:
        return ""
    return aligned(lines, num_left=2, width=width)


def _show_p(p_value: float | None) -> str:
    return "" if p_value is None else f"{p_value:.3g}"


def _show_significance(difference: Difference) -> str:
    if difference.corrected_p is None:
        return "n/a"
    return "yes" if difference.is_significant else "no"


def notes_of(
    runs: Sequence[Run],
    differences: Sequence[Difference],
) -> list[str]:
    """Return lines about what the tables do not show."""
    notes: list[str] = []
    others = other_differences(runs)
    if others:
        notes.append(f"also differ, without changing the result: {', '.join(others)}")
    unfinished = [run.name for run in runs if not run.is_finished]
    if unfinished:
        notes.append(f"not finished: {', '.join(unfinished)}")
    for difference in differences:
        if difference.not_tested:
            notes.append(
                f"not tested: {difference.run.name} on {difference.trials}:"
                f" {difference.not_tested}"
            )
    # With many comparisons, the replicates may be too few for a significant p-value.
    least_p_of: dict[str, float] = {}  # trial list -> smallest possible p-value
    for difference in differences:
        if difference.least_p is not None and difference.least_p >= LEVEL:
            least_p_of[difference.trials] = difference.least_p
    for trials, least_p in least_p_of.items():
        notes.append(
            f"{trials}: no difference can be significant among so many comparisons (p is"
            f" at least {least_p:.2g}); compare fewer experiments"
        )
    return notes


def json_rows(
    runs: Sequence[Run],
    reference: Run,
    differences: Sequence[Difference],
) -> list[dict[str, Any]]:
    """Return a plain dict for each run: the contents of both tables; rates are fractions."""
    settings = differing_settings(runs)
    # By name, because names of runs are unique, and a run has no hash.
    difference_of: dict[tuple[str, str], Difference] = {}
    for difference in differences:
        difference_of[difference.trials, difference.run.name] = difference
    rows: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        results: dict[str, Any] = {}
        for name in lists_of(runs):
            result = _json_result(run.rows.get(name))
            difference = difference_of.get((name, run.name))
            if difference is not None:
                result["compared"] = _json_difference(difference, reference)
            results[name] = result
        row = {
            "experiment": str(run.exp_dir),
            "settings": {label: values[number] for label, values in settings.items()},
            "valid": dict(run.valid),
            "steps": run.steps,
            "hours": run.hours,
            "is_finished": run.is_finished,
            "is_reference": run is reference,
            "results": results,
        }
        rows.append(row)
    return rows


def _json_result(row: Row | None) -> dict[str, Any]:
    if row is None:
        return {"eer": None, "eer_ci95": None, "backend": None}
    return {key: row[key] for key in ("eer", "eer_ci95", "backend")}


def _json_difference(difference: Difference, reference: Run) -> dict[str, Any]:
    return {
        "with": str(reference.exp_dir),
        "eer_difference": difference.eer_difference,
        "ci95": difference.ci95,
        "p_value": difference.p_value,
        "p_holm": difference.corrected_p,
        "is_significant": difference.is_significant,
        "not_tested": difference.not_tested or None,
    }
