"""The report of an experiment's evaluation: scores of trial lists in, `report.html` out.

Draws the pictures, finds the hardest trials and collects the facts; `page` renders them.
Letters: N trials, T rows of training.
"""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.checkpoints import provenance
from speakerlab.checkpoints.model_files import find_model, read_card, read_settings
from speakerlab.experiments.hardest import Player, hardest_trials, player_of
from speakerlab.experiments.page import HardTrial, Picture, write_page
from speakerlab.experiments.plots import plot_calibration, plot_course, plot_det, plot_scores
from speakerlab.experiments.report import Row
from speakerlab.scoring.metrics import operating_points
from speakerlab.scoring.trials import Trials

MAX_CLIPS = 36  # of at most some 70 kB each
MAX_OF_A_KIND = 5  # of the hardest trials of a list
SCORED_WITH = ("speakerlab", "torch", "numpy", "scipy", "soundfile", "matplotlib")
# kind of a row of metrics.jsonl, its key, its name in the report, a factor
COURSES = (
    ("train", "loss", "loss", 1.0),
    ("train", "accuracy", "accuracy in %", 100.0),
    ("train", "lr", "learning rate", 1.0),
    ("valid", "eer", "validation EER in %", 100.0),
    ("valid", "accuracy", "validation accuracy in %", 100.0),
)


@dataclass(frozen=True)
class ListScores:
    """A trial list as one back end scored it."""

    name: str  # of the list, as in its row
    backend: str  # as in its row
    trials: Trials
    scores_N: np.ndarray
    llr_N: np.ndarray | None = None  # calibrated scores, natural logarithm
    untrained_N: np.ndarray | None = None  # scores of the initial weights
    data_dir: Path | None = None  # the test set, for its audio; None: no players
    utterances_of: Mapping[str, Sequence[str]] = field(default_factory=dict)  # enrolment models


def write_report(exp_dir: Path, lists: Sequence[ListScores], rows: Sequence[Row]) -> Path:
    """Write `exp_dir/report.html`, its pictures also into `exp_dir/scores`; return its path.

    rows: those of results.json; rows of another model are left out. A list that is not in `lists`
    has its rows but no pictures. Without matplotlib there are no pictures, without audio no
    players; the page then says so.
    """
    card = read_card(exp_dir)
    own = [row for row in rows if row["model_sha256"] == card["sha256"]]
    notes = [f"Model {card['sha256'][:12]}, commit {card.get('commit') or 'unknown'}."]
    if len(own) < len(rows):
        notes.append(f"Rows of another model in results.json, left out: {len(rows) - len(own)}.")
    groups: dict[str, list[ListScores]] = {}
    for one in lists:
        groups.setdefault(one.name, []).append(one)
    for name, group in groups.items():  # the last back end first: the page shows it unfolded
        last = [row["backend"] for row in own if row["trials"] == name][-1]
        group.sort(key=lambda one: one.backend != last)
    pictures: list[Picture] = []
    try:
        for group in groups.values():
            pictures += _draw_list(exp_dir / "scores", group)
        pictures += _draw_training(exp_dir)
    except ImportError as error:
        notes.append(f"There are no pictures: {error}.")
    path = exp_dir / "report.html"
    write_page(
        path,
        title=f"Speaker verification: {exp_dir.name}",
        rows=own,
        pictures=pictures,
        hardest=_hardest([group[0] for group in groups.values()], exp_dir, notes),
        facts=facts_of(exp_dir),
        notes=notes,
    )
    return path


def read_courses(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Read metrics.jsonl as name -> (steps, values).

    Of steps repeated after a roll-back, the last values count. Empty where nothing was trained,
    as for an imported model.
    """
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last line, cut by a kill
            continue
    courses: dict[str, tuple[list[int], list[float]]] = {}
    for kind, key, name, factor in COURSES:
        value_of: dict[int, float] = {}
        for row in rows:
            if row.get("kind") == kind:
                value_of = {step: value for step, value in value_of.items() if step < row["step"]}
                if key in row:
                    value_of[row["step"]] = factor * row[key]
        if len(value_of) > 1:
            courses[name] = list(value_of), list(value_of.values())
    return courses


def facts_of(exp_dir: Path) -> dict[str, dict[str, Any]]:
    """The model, the versions it was trained with, those it is scored with, its configuration."""
    card, config = read_card(exp_dir), find_model(exp_dir) / "config.yaml"
    here: dict[str, Any] = {"commit": provenance.commit(), "python": platform.python_version()}
    for package in SCORED_WITH:
        try:
            here[package] = version(package)
        except PackageNotFoundError:
            here[package] = None
    return {
        "Model": {
            name: value for name, value in card.items() if name not in provenance.ENVIRONMENT
        },
        "Trained with": {name: card[name] for name in provenance.ENVIRONMENT if name in card},
        "Scored with": here,
        "Configuration": {"config.yaml": config.read_text(encoding="utf-8").rstrip() + "\n"},
    }


def _draw_list(folder: Path, group: Sequence[ListScores]) -> Iterator[Picture]:
    """DET curves of all back ends; scores and calibration of each, those of the first unfolded."""
    name, is_target_N = group[0].name, group[0].trials.is_target_N
    curves = {one.backend: one.scores_N for one in group}
    untrained = [one.untrained_N for one in group if one.untrained_N is not None]
    curves |= dict(zip(["untrained"], untrained))
    det = folder / f"{name}_det.png".replace("/", "_")
    plot_det(det, {k: operating_points(s, is_target_N)[:2] for k, s in curves.items()})
    yield Picture("DET curves; the EERs are marked", det, trials=name, tall=True)
    for i, one in enumerate(group):
        stem = f"{name}_{one.backend}".replace("/", "_")
        histogram, calibration = folder / f"{stem}_scores.png", folder / f"{stem}_calibration.png"
        plot_scores(histogram, one.scores_N, is_target_N)
        yield Picture(f"Scores of {one.backend}", histogram, name, folded=i > 0)
        if one.llr_N is not None:
            plot_calibration(calibration, one.llr_N, is_target_N)
            text = f"Calibration of {one.backend}: Bayes error rate over the prior's log-odds"
            yield Picture(text, calibration, name, folded=i > 0)


def _draw_training(exp_dir: Path) -> Iterator[Picture]:
    for name, (step_T, value_T) in read_courses(exp_dir / "metrics.jsonl").items():
        stem = name.removesuffix(" in %").replace(" ", "_")
        path = exp_dir / "scores" / f"training_{stem}.png"
        plot_course(path, step_T, value_T, name=name)
        yield Picture(f"{name[0].upper()}{name[1:]} by step", path)


def _hardest(lists: Sequence[ListScores], exp_dir: Path, notes: list[str]) -> list[HardTrial]:
    """The hardest trials of each list; fewer where there are many lists, to keep the page small."""
    players: dict[Path, Player] = {}
    found: list[HardTrial] = []
    for one in lists:
        try:
            if one.data_dir is not None and one.data_dir not in players:
                sample_rate = read_settings(exp_dir)["frontend"]["sample_rate"]
                players[one.data_dir] = player_of(one.data_dir, sample_rate=sample_rate)
        except (OSError, ValueError) as error:
            notes.append(f"The hardest trials of {one.name} cannot be played: {error}.")
        found += hardest_trials(
            one.trials,
            one.scores_N,
            name=one.name,
            backend=one.backend,
            player=None if one.data_dir is None else players.get(one.data_dir),
            utterances_of=one.utterances_of,
            num=max(1, min(MAX_OF_A_KIND, MAX_CLIPS // (4 * len(lists)))),
        )
    return found
