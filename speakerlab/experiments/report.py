"""The HTML reports, one self-contained file each: results and scores in, `report.html` out.

Collects facts and the hardest trials; the templates in `templates/` escape every value. Nothing is
measured here, and nothing fetched from a network.
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
from speakerlab.experiments.model_card import without_labels
from speakerlab.experiments.plots import Picture, draw_list, draw_training
from speakerlab.experiments.results import Row, number, percent
from speakerlab.experiments.trial_list import ListScores

Facts = Mapping[str, Mapping[str, Any]]  # heading -> name -> value; text of several lines unfolds
Hardest = tuple[str, Mapping[str, Sequence[HardTrial]]]  # back end, and kind -> trials
NOT_MEASURED: Row = {"min_cllr": None, "conditions": [], "primary": False}
# Escaped: controls but for line breaks, and those that reorder the text beside them (UAX #9).
HIDDEN = re.compile(rf"(?!\n){CONTROLS.pattern}|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
MAX_CLIPS = 36  # of at most some 70 kB each
MAX_OF_A_KIND = 5  # of the hardest trials of a list
SCORED_WITH = ("speakerlab", "torch", "numpy", "scipy", "soundfile", "matplotlib")


def write_report(
    exp_dir: Path,
    lists: Sequence[ListScores],
    rows: Sequence[Row],
    notes: Sequence[str] = (),
    reference: Path | None = None,
) -> Path:
    """Write `exp_dir/report.html`, its pictures also into `exp_dir/scores`; return its path.

    rows: those of results.json; rows of another model are left out. A list that is not in `lists`
    has its rows but no pictures. Without matplotlib there are no pictures, without audio no
    players; the page then says so. reference: file of reference curves, drawn behind those of a
    training that they belong to.
    """
    card = read_card(exp_dir)
    own = [row for row in rows if row["model_sha256"] == card["sha256"]]
    model = [f"Model {card['sha256'][:12]}", f"commit {card.get('commit') or 'unknown'}"]
    notes = [", ".join([*model, *filter(None, [without_labels(card)])]) + ".", *notes]
    before, after = (card.get(f"valid_eer_{name}", 0.0) for name in ("initial", "trained"))
    if after >= before > 0:
        rates = f"EER of the validation speakers {percent(before)} %, after it {percent(after)} %"
        kept = "; the initial model was kept" if card["kept_initial"] else ""
        notes.append(f"Training did not help: before it, {rates}{kept}.")
    if len(own) < len(rows):
        notes.append(f"Rows of another model in results.json, left out: {len(rows) - len(own)}.")
    groups: dict[str, list[ListScores]] = {}
    for one in lists:
        groups.setdefault(one.listed.name, []).append(one)
    pictures: dict[str, list[Picture]] = {}
    training: list[Picture] = []
    try:
        for name, group in groups.items():
            pictures[name] = list(draw_list(exp_dir / "scores", group))
        curves = read_curves(exp_dir / "metrics.jsonl")
        found = find_reference(reference, exp_dir) if reference else None
        training = list(draw_training(exp_dir / "scores", curves, found))
    except ImportError as error:
        notes.append(f"The plots could not be drawn: {error}; pip install matplotlib.")
    path = exp_dir / "report.html"
    write_page(
        path,
        title=f"Speaker verification: {exp_dir.name}",
        rows=own,
        pictures=pictures,
        training=training,
        hardest=_hardest([group[0] for group in groups.values()], exp_dir, notes),
        facts=facts_of(exp_dir),
        notes=notes,
    )
    return path


def facts_of(exp_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the model, the versions used to train and to score it, and its configuration."""
    card, config = read_card(exp_dir), find_model(exp_dir) / "config.yaml"
    here: dict[str, Any] = {"commit": provenance.commit(), "python": platform.python_version()}
    for package in SCORED_WITH:
        try:
            here[package] = version(package)
        except PackageNotFoundError:
            here[package] = None
    environment = {name: card.pop(name) for name in provenance.ENVIRONMENT if name in card}
    return {
        "Model": card,
        "Trained with": environment,
        "Scored with": here,
        "Configuration": {"config.yaml": config.read_text(encoding="utf-8").rstrip() + "\n"},
    }


def _hardest(lists: Sequence[ListScores], exp_dir: Path, notes: list[str]) -> dict[str, Hardest]:
    """Return the hardest trials of each list, fewer if there are many lists."""
    players: dict[Path, Player] = {}
    found: dict[str, Hardest] = {}
    sample_rate = read_settings(exp_dir)["frontend"]["sample_rate"]
    num = max(1, min(MAX_OF_A_KIND, MAX_CLIPS // (4 * len(lists))))
    for one in lists:
        name, folder = one.listed.name, one.listed.path.parent
        try:
            if folder not in players:
                players[folder] = player_of(folder, sample_rate=sample_rate)
        except (OSError, ValueError) as error:
            notes.append(f"The hardest trials of {name} cannot be played: {error}.")
        found[name] = one.backend, hardest_trials(one, player=players.get(folder), num=num)
    return found


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
    """Write the report of trial lists. `notes` come first: what is missing, and why.

    A list's headline is its primary row, or its first if none is marked.
    pictures and hardest: by the name of the list; the first system of a list shows them.
    """
    columns = results.columns_of(rows)
    pictures, hardest = dict(pictures or {}), dict(hardest or {})
    groups: dict[tuple[str, str], list[Row]] = {}
    protocols: dict[str, list[tuple[str, str]]] = {}
    for i, row in enumerate(rows):
        shown = {"cells": {name: cells[i] for name, cells in columns.items()}}
        groups.setdefault((row["trials"], row["system"]), []).append(NOT_MEASURED | row | shown)
        text = row["protocol"]
        text += f". Calibration: {row['calibration']}" if row.get("calibration") else ""
        protocols.setdefault(text, []).append((row["trials"], row["backend"]))
    for group in groups.values():
        group.sort(key=lambda row: not row["primary"])
    several = len({system for _, system in groups}) > 1
    lists = [
        {
            "trials": trials,
            "system": system if several else None,
            "rows": group,
            "untrained": next(
                (r for row in group if (r := row["eer_untrained"]) is not None), None
            ),
            "pictures": pictures.pop(trials, []),
            "hardest": hardest.pop(trials, None),
        }
        for (trials, system), group in groups.items()
    ]
    shown = {"lists": lists, "training": training, "protocols": protocols}
    page = render("verification.html.j2", title=title, notes=notes, facts=facts, **shown)
    write_text(path, page)


def write_identification_page(path: Path, *, title: str, rows: Sequence[Row], facts: Facts) -> None:
    """Write the report of an identification: accuracy, each class, and the confusions."""
    sets = []
    for row in rows:
        classes = [
            (counts.get(name, 0) / sum(counts.values()), name, sum(counts.values()))
            for name, counts in row["confusion"].items()
        ]
        sets.append(
            {
                "row": row,
                "classes": [(name, f"{n:,}", percent(rate)) for rate, name, n in sorted(classes)],
                "confusion": results.confusion_table(row),
                "frequent": results.frequent_confusions(row),
            }
        )
    write_text(path, render("identification.html.j2", title=title, sets=sets, facts=facts))


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
    files = sorted(results["files"].items(), key=lambda file: -file[1]["error_seconds"])
    recordings, *groups = diarization.tables_of({**results, "files": dict(files)})
    shown = {
        "cards": diarization.headlines(results),
        "errors": results["total"]["count_errors"],
        "tables": [*(("Groups of recordings", one) for one in groups), ("Recordings", recordings)],
        "minutes": minutes,
    }
    write_text(path, render("diarization.html.j2", title=title, facts=facts, **shown))


def render(template: str, **values: Any) -> str:
    """Return a template filled with values, which it escapes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "interval": partial(results.bounds, show=percent),
        "plain": _plain,
        "sha256": lambda text: b64encode(sha256(text.encode()).digest()).decode(),
        "scale": _condition_scale,
    }
    return environment.get_template(template).render(values)


def _condition_scale(parts: Sequence[Mapping[str, Any]]) -> tuple[float, list[str]]:
    """Return (the largest rate drawn in a table of conditions, the priors that it has)."""
    ends = [rate for part in parts for rate in (part["eer"] or 0, *(part.get("eer_ci95") or ()))]
    return max(ends, default=0.0) or 1.0, results.priors_of(parts)


def _visible(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return type(value)(HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), value))


def _plain(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    return str(value)
