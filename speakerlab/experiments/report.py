"""HTML reports, each a self-contained file. In: results and scores. Out: `report.html`.

Collects facts and the hardest trials; the templates in `templates/` escape every value. No metric
is computed here, and nothing is fetched from a network.
"""

import platform
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jinja2

from speakerlab.checkpoints import provenance
from speakerlab.checkpoints.model_files import find_model, read_card, read_settings
from speakerlab.core.atomic import write_text
from speakerlab.data.tables import CONTROLS
from speakerlab.experiments import diarization, results
from speakerlab.experiments.curves import find_reference, read_curves
from speakerlab.experiments.hardest import HardTrial, Player, hardest_trials, player_of
from speakerlab.experiments.model_card import training_note, without_labels
from speakerlab.experiments.plots import Picture, draw_list, draw_training
from speakerlab.experiments.results import Row, number, percent
from speakerlab.experiments.trial_list import ListScores

# Heading -> name -> value; text of several lines is folded.
Facts = Mapping[str, Mapping[str, Any]]
Hardest = tuple[str, Mapping[str, Sequence[HardTrial]]]  # back end, and kind -> trials
# A row may lack these keys, which the templates read.
NOT_MEASURED: Row = {"min_cllr": None, "conditions": [], "primary": False}
# Characters to escape: controls except line breaks, and bidirectional controls (UAX #9), which
# reorder the text around them.
HIDDEN = re.compile(
    rf"(?!\n){CONTROLS.pattern}|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
MAX_CLIPS = 36  # of at most some 70 kB each
MAX_OF_A_KIND = 5  # of the hardest trials of a list
TENSORBOARD = "tensorboard"  # folder of an experiment
SCORED_WITH = (
    "speakerlab",
    "torch",
    "numpy",
    "scipy",
    "soundfile",
    "matplotlib",
)


def write_report(
    exp_dir: Path,
    lists: Sequence[ListScores],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    reference: Path | None = None,
) -> Path:
    """Write `exp_dir/report.html`, its pictures also into `exp_dir/scores`; return its path.

    rows: the rows of results.json; rows of another model are left out. A list that is not in
    `lists` has its rows but no pictures. Without matplotlib there are no pictures, without audio no
    players; a note on the page reports it. reference: file of reference curves, drawn behind the
    curves of a matching training.
    """
    card = read_card(exp_dir)
    model_rows = [row for row in rows if row["model_sha256"] == card["sha256"]]
    all_notes = [_model_note(card), *notes]
    remark = training_note(card)
    if remark is not None:
        all_notes.append(remark)
    num_left_out = len(rows) - len(model_rows)
    if num_left_out:
        all_notes.append(
            f"Rows of another model in results.json, left out: {num_left_out}."
        )

    # All back ends of a list share its DET plot.
    groups: dict[str, list[ListScores]] = {}
    for list_scores in lists:
        name = list_scores.listed.name
        groups.setdefault(name, []).append(list_scores)

    pictures: dict[str, list[Picture]] = {}
    training: list[Picture] = []
    folder = exp_dir / "scores"
    try:
        for name, group in groups.items():
            pictures[name] = list(draw_list(folder, group))
        curves = read_curves(exp_dir / "metrics.jsonl")
        reference_curves = find_reference(reference, exp_dir) if reference else None
        training = list(draw_training(folder, curves, reference_curves))
    except ImportError as error:
        # Write the tables even without pictures.
        all_notes.append(
            f"The plots could not be drawn: {error}; pip install matplotlib."
        )

    # In TensorBoard beside the curves of the training, if it has been trained here.
    if (exp_dir / TENSORBOARD).is_dir():
        # Imported only now, because the import would slow down `speakerlab score --help`.
        from speakerlab.training.monitor import write_scores

        images: dict[str, Path] = {}
        for pictures_of_list in pictures.values():
            for picture in pictures_of_list:
                images[f"scores/{picture.path.stem}"] = picture.path
        step = card.get("steps", 0)
        write_scores(exp_dir / TENSORBOARD, step, primary_eers(model_rows), images)

    # The primary back end of a list is scored first.
    primary_scores = [group[0] for group in groups.values()]
    path = exp_dir / "report.html"
    write_page(
        path,
        title=f"Speaker verification: {exp_dir.name}",
        rows=model_rows,
        pictures=pictures,
        training=training,
        hardest=_hardest(primary_scores, exp_dir, all_notes),
        facts=facts_of(exp_dir),
        notes=all_notes,
    )
    return path


def primary_eers(rows: Sequence[Row]) -> dict[str, float]:
    """Return trial list -> EER of its primary row, or of its first row if none is marked."""
    eers: dict[str, float] = {}
    for row in rows:
        if row.get("primary") or row["trials"] not in eers:
            eers[row["trials"]] = row["eer"]
    return eers


def _model_note(card: Mapping[str, Any]) -> str:
    """Return the first line of the notes: the scored model."""
    parts = [
        f"Model {card['sha256'][:12]}",
        f"commit {card.get('commit') or 'unknown'}",
    ]
    objective = without_labels(card)
    if objective:
        parts.append(objective)
    text = ", ".join(parts)
    return f"{text}."


def facts_of(exp_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the model, the versions used to train and to score it, and its configuration."""
    card = read_card(exp_dir)
    config_path = find_model(exp_dir) / "config.yaml"
    config = config_path.read_text(encoding="utf-8").rstrip()

    # The card holds facts about the model and about the environment of its training.
    trained_with: dict[str, Any] = {}
    for name in provenance.ENVIRONMENT:
        if name in card:
            trained_with[name] = card.pop(name)

    scored_with: dict[str, Any] = {
        "commit": provenance.commit(),
        "python": platform.python_version(),
    }
    for package in SCORED_WITH:
        try:
            scored_with[package] = version(package)
        except PackageNotFoundError:
            # An optional package such as matplotlib, or a checkout that is not installed.
            scored_with[package] = None
    return {
        "Model": card,
        "Trained with": trained_with,
        "Scored with": scored_with,
        "Configuration": {"config.yaml": f"{config}\n"},
    }


def _hardest(
    lists: Sequence[ListScores],
    exp_dir: Path,
    notes: list[str],
) -> dict[str, Hardest]:
    """Return the hardest trials of each list, fewer if there are many lists."""
    sample_rate = read_settings(exp_dir)["frontend"]["sample_rate"]
    # Two kinds of trials with two clips per trial; all clips are embedded in the page.
    num_of_clips = MAX_CLIPS // (4 * len(lists))
    num = max(1, min(MAX_OF_A_KIND, num_of_clips))

    players: dict[Path, Player] = {}
    hardest_of_list: dict[str, Hardest] = {}
    for list_scores in lists:
        name = list_scores.listed.name
        data_dir = list_scores.listed.path.parent
        try:
            # Lists of one directory share a player, which reads each utterance once.
            if data_dir not in players:
                players[data_dir] = player_of(data_dir, sample_rate=sample_rate)
        except (OSError, ValueError) as error:
            notes.append(f"The hardest trials of {name} cannot be played: {error}.")
        player = players.get(data_dir)
        trials = hardest_trials(list_scores, player=player, num=num)
        hardest_of_list[name] = (list_scores.backend, trials)
    return hardest_of_list


def write_page(
    path: Path,
    *,
    title: str,
    rows: Sequence[Row],
    pictures: Mapping[str, Sequence[Picture]] | None = None,
    training: Sequence[Picture] = (),
    hardest: Mapping[str, Hardest] | None = None,
    facts: Facts,
    notes: Sequence[str] = (),
) -> None:
    """Write the report of trial lists. `notes` come first: missing parts, and the reasons.

    A list's headline is its primary row, or its first if none is marked.
    pictures and hardest: by the name of the list; the first system of a list shows them.
    """
    columns = results.columns_of(rows)
    remaining_pictures = dict(pictures or {})
    remaining_hardest = dict(hardest or {})

    groups: dict[tuple[str, str], list[Row]] = {}
    protocols: dict[str, list[tuple[str, str]]] = {}
    for row_number, row in enumerate(rows):
        cells: dict[str, results.Cell] = {}
        for header, column in columns.items():
            cells[header] = column[row_number]
        # The template reads the cells of a row from the row itself.
        shown = {**NOT_MEASURED, **row, "cells": cells}
        list_and_system = (row["trials"], row["system"])
        groups.setdefault(list_and_system, []).append(shown)

        # Rows with the same protocol share its text.
        protocol = row["protocol"]
        if row.get("calibration"):
            protocol += f". Calibration: {row['calibration']}"
        list_and_back_end = (row["trials"], row["backend"])
        protocols.setdefault(protocol, []).append(list_and_back_end)

    # The name of the system is only shown if there are several.
    systems = {system for _, system in groups}
    lists: list[dict[str, Any]] = []
    for (trials, system), group in groups.items():
        initial = results.initial_name(group[0])
        if initial == results.UNTRAINED:
            initial += " network"
        # The primary row first; the other rows keep their order.
        group.sort(key=lambda row: not row["primary"])
        shown_list = {
            "trials": trials,
            "system": system if len(systems) > 1 else None,
            "rows": group,
            "untrained": _untrained_eer(group),
            "initial": initial,
            # Popped, so that only the first system of a list shows them.
            "pictures": remaining_pictures.pop(trials, []),
            "hardest": remaining_hardest.pop(trials, None),
        }
        lists.append(shown_list)
    page = render(
        "verification.html.j2",
        title=title,
        notes=notes,
        facts=facts,
        lists=lists,
        training=training,
        protocols=protocols,
    )
    write_text(path, page)


def _untrained_eer(rows: Sequence[Row]) -> float | None:
    """Return the EER of the initial weights, which is in the row of one back end."""
    for row in rows:
        eer = row["eer_untrained"]
        if eer is not None:
            return eer
    return None


def write_identification_page(
    path: Path,
    *,
    title: str,
    rows: Sequence[Row],
    facts: Facts,
) -> None:
    """Write the report of an identification: accuracy, each class, and the confusions."""
    sets: list[dict[str, Any]] = []
    for row in rows:
        shown = {
            "row": row,
            "classes": _class_accuracies(row),
            "confusion": results.confusion_table(row),
            "frequent": results.frequent_confusions(row),
        }
        sets.append(shown)
    page = render("identification.html.j2", title=title, sets=sets, facts=facts)
    write_text(path, page)


def _class_accuracies(row: Row) -> list[tuple[str, str, str]]:
    """Return (class, number of utterances, accuracy in percent), the lowest accuracy first."""
    classes: list[tuple[float, str, int]] = []
    for name, counts in row["confusion"].items():
        num_utterances = sum(counts.values())
        accuracy = counts.get(name, 0) / num_utterances
        classes.append((accuracy, name, num_utterances))

    lines: list[tuple[str, str, str]] = []
    for accuracy, name, num_utterances in sorted(classes):
        lines.append((name, f"{num_utterances:,}", percent(accuracy)))
    return lines


def write_diarization_page(
    path: Path,
    *,
    title: str,
    results: Mapping[str, Any],
    minutes: Sequence[Mapping[str, Any]],
    facts: Facts,
) -> None:
    """Write the report of a diarization, the recordings with the most errors first.

    minutes: of `timeline.worst_minutes`.
    """

    def error_seconds(name: str) -> float:
        return results["files"][name]["error_seconds"]

    # The worst recordings come first.
    names = sorted(results["files"], key=error_seconds, reverse=True)
    files = {name: results["files"][name] for name in names}
    recordings, *groups = diarization.tables_of({**results, "files": files})
    tables = [("Groups of recordings", group) for group in groups]
    tables.append(("Recordings", recordings))
    page = render(
        "diarization.html.j2",
        title=title,
        facts=facts,
        cards=diarization.headlines(results),
        errors=results["total"]["count_errors"],
        tables=tables,
        minutes=minutes,
    )
    write_text(path, page)


def render(template: str, **values: Any) -> str:
    """Render a template with values, which it escapes."""
    folder = Path(__file__).with_name("templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        # Names of recordings and classes come from others' files and may be markup.
        autoescape=True,
        finalize=_visible,
        # A misspelled name is an error instead of an empty cell.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "interval": partial(results.bounds, show=percent),
        "plain": _plain,
        "sha256": _sha256,
        "scale": _condition_scale,
    }
    return environment.get_template(template).render(values)


def _sha256(text: str) -> str:
    """Return the hash of a script in the format of a content security policy."""
    digest = sha256(text.encode()).digest()
    return b64encode(digest).decode()


def _condition_scale(
    parts: Sequence[Mapping[str, Any]],
) -> tuple[float, list[str]]:
    """Return (the largest rate in a table of conditions, the priors of its minDCFs)."""
    rates: list[float] = []
    for part in parts:
        eer = part["eer"] or 0.0
        ci95 = part.get("eer_ci95") or []
        rates += [eer, *ci95]
    largest = max(rates, default=0.0)
    # Bars are drawn relative to the largest rate, so it must not be 0.
    return largest or 1.0, results.priors_of(parts)


def _visible(value: Any) -> Any:
    """Escape hidden characters, so that a name cannot look like another one."""
    if not isinstance(value, str):
        return value

    def escape(hidden: re.Match[str]) -> str:
        return hidden[0].encode("unicode_escape").decode()

    # Markup is a subclass of str, so keep the type.
    return type(value)(HIDDEN.sub(escape, value))


def _plain(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        texts = [_plain(item) for item in value]
        return ", ".join(texts) or "none"
    return str(value)
