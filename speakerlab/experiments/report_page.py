"""The report of an experiment's evaluation: scores of trial lists in, `report.html` out.

Draws the pictures, finds the hardest trials and collects the facts; `scoring.page` writes them.
Letters: N trials, T rows of training.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from speakerlab.checkpoints import provenance
from speakerlab.checkpoints.model_files import find_model, read_card
from speakerlab.config.layers import flatten
from speakerlab.experiments.hardest import Player, hardest_trials, player_of
from speakerlab.experiments.page import HardTrial, Picture, write_page
from speakerlab.experiments.page_tables import last_row
from speakerlab.experiments.plots import plot_calibration, plot_course, plot_det, plot_scores
from speakerlab.experiments.report import Row
from speakerlab.scoring.metrics import operating_points
from speakerlab.scoring.trials import Trials

MAX_CLIPS = 36  # of at most some 70 kB each
MOST_OF_A_KIND = 5  # of the hardest trials of a list
# packages whose versions are told
SCORED_WITH = (
    "speakerlab",
    "torch",
    "numpy",
    "scipy",
    "soundfile",
    "matplotlib",
)
# kind of a row of metrics.jsonl, its key, what to call it, what to multiply it with
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
    llr_N: np.ndarray | None = None  # natural logarithm, what Cllr was measured on
    untrained_N: np.ndarray | None = None  # scores of the initial weights
    data_dir: Path | None = None  # where the test set's audio is found; None: nothing is played
    utterances_of: Mapping[str, Sequence[str]] = field(default_factory=dict)  # enrolment models


def write_report(exp_dir: Path, lists: Sequence[ListScores], rows: Sequence[Row]) -> Path:
    """Write `exp_dir/report.html`, its pictures also into `exp_dir/scores`; return its path.

    rows: those of results.json. Rows of another model than the one that is there are left out. A
    list that was scored before and is not in `lists` has its rows and no pictures. Without
    matplotlib there are no pictures, without audio no players; the page then says so.
    """
    model = find_model(exp_dir)
    card = read_card(model)
    config = yaml.safe_load((model / "config.yaml").read_text(encoding="utf-8"))
    own = [row for row in rows if row["model_sha256"] == card["sha256"]]
    notes = [f"Model {card['sha256'][:12]}, commit {card.get('commit') or 'unknown'}."]
    if len(own) < len(rows):
        num_left_out = len(rows) - len(own)
        notes.append(f"Rows of another model in results.json, left out here: {num_left_out}.")
    names = dict.fromkeys(one.name for one in lists)
    ranked = [_ranked([one for one in lists if one.name == name], own) for name in names]
    path, player = (
        exp_dir / "report.html",
        _Players(config["frontend"]["sample_rate"]),
    )
    write_page(
        path,
        title=f"Speaker verification: {exp_dir.name}",
        rows=own,
        pictures=_draw(exp_dir, ranked, notes),
        hardest=[
            trial for group in ranked for trial in _hardest(group[0], player, len(ranked), notes)
        ],
        facts=facts_of(card, flatten(config)),
        notes=notes,
    )
    return path


def read_courses(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """How the values of a training went: name -> (steps, values), from its metrics.jsonl.

    Steps that a roll-back repeated count as they were the last time. Empty where nothing was
    trained here, as for an imported model.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [row for row in map(_parsed, lines) if row is not None]
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


def facts_of(
    card: Mapping[str, Any], configuration: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The model, the versions it was trained with and those it was scored with, its configuration.

    card: that of the published model. configuration: flat, key -> value.
    """
    here = {"commit": provenance.commit(), "python": platform.python_version()}
    environment = provenance.ENVIRONMENT
    return {
        "Model": {name: value for name, value in card.items() if name not in environment},
        "Trained with": {name: value for name, value in card.items() if name in environment},
        "Scored with": here | dict(map(_version, SCORED_WITH)),
        "Configuration": {"all values": configuration},
    }


class _Players:
    """One player a data directory, made when it is needed."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.made: dict[Path, Player] = {}

    def of(self, data_dir: Path) -> Player:
        if data_dir not in self.made:
            self.made[data_dir] = player_of(data_dir, sample_rate=self.sample_rate)
        return self.made[data_dir]


def _ranked(group: Sequence[ListScores], rows: Sequence[Row]) -> list[ListScores]:
    """The back ends of one trial list, the last of them first."""
    last = last_row([row for row in rows if row["trials"] == group[0].name])
    return sorted(group, key=lambda one: one.backend != last["backend"])


def _draw(exp_dir: Path, ranked: Sequence[Sequence[ListScores]], notes: list[str]) -> list[Picture]:
    """The pictures of all lists and of the training; none without matplotlib, which is noted."""
    pictures: list[Picture] = []
    try:
        for group in ranked:
            pictures += _draw_list(exp_dir / "scores", group)
        for name, (step_T, value_T) in read_courses(exp_dir / "metrics.jsonl").items():
            stem = name.removesuffix(" in %").replace(" ", "_")
            path = exp_dir / "scores" / f"training_{stem}.png"
            plot_course(path, step_T, value_T, name=name)
            pictures.append(Picture(f"{name[0].upper()}{name[1:]}, by step", path))
    except ImportError as error:
        notes.append(f"There are no pictures: {error}.")
    return pictures


def _draw_list(folder: Path, group: Sequence[ListScores]) -> list[Picture]:
    """DET curves of all back ends; scores and calibration of each, the first one unfolded."""
    name, is_target_N = group[0].name, group[0].trials.is_target_N
    curves = {one.backend: one.scores_N for one in group}
    untrained = [one.untrained_N for one in group if one.untrained_N is not None]
    curves |= dict(zip(["untrained"], untrained))
    det = folder / f"{name}_det.png".replace("/", "_")
    plot_det(det, {k: operating_points(s, is_target_N)[:2] for k, s in curves.items()})
    pictures = [Picture("DET curves, their EERs marked", det, trials=name, tall=True)]
    for i, one in enumerate(group):
        stem = f"{name}_{one.backend}".replace("/", "_")
        histogram, calibration = folder / f"{stem}_scores.png", folder / f"{stem}_calibration.png"
        plot_scores(histogram, one.scores_N, is_target_N)
        pictures.append(Picture(f"Scores of {one.backend}", histogram, name, folded=i > 0))
        if one.llr_N is not None:
            plot_calibration(calibration, one.llr_N, is_target_N)
            text = f"Calibration of {one.backend}: Bayes error rate over the prior's log-odds"
            pictures.append(Picture(text, calibration, name, folded=i > 0))
    return pictures


def _hardest(
    one: ListScores, players: _Players, num_lists: int, notes: list[str]
) -> list[HardTrial]:
    """Those of a list, fewer where there are many lists, so that the page stays small."""
    player = None
    if one.data_dir is not None:
        try:
            player = players.of(one.data_dir)
        except (OSError, ValueError) as error:
            notes.append(f"The hardest trials of {one.name} cannot be played: {error}.")
    return hardest_trials(
        one.trials,
        one.scores_N,
        name=one.name,
        backend=one.backend,
        player=player,
        utterances_of=one.utterances_of,
        num=max(1, min(MOST_OF_A_KIND, MAX_CLIPS // (4 * num_lists))),
    )


def _parsed(line: str) -> dict[str, Any] | None:
    """A row; None for a last one that was cut by a kill."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _version(package: str) -> tuple[str, str | None]:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, None
