"""Model card as text: origin, training data, front end and results.

In: an experiment or a model folder. Out: (name, lines) pairs; "not stated" for unknown facts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speakerlab.checkpoints.model_files import (
    EMBEDDER,
    find_model,
    read_calibration,
    read_card,
    read_settings,
    weights_in,
)
from speakerlab.data.tables import ABOUT, read_about
from speakerlab.experiments.results import (
    Row,
    format_identification,
    format_table,
    percent,
    read_rows,
)

if TYPE_CHECKING:  # it imports torch, which would slow down `speakerlab score --help`
    from speakerlab.config.schema import Config

UNKNOWN = "not stated"
Rows = list[tuple[str, list[str]]]  # name and lines
# Most models are neither imported nor fine-tuned, and a segmentation network decides without a
# calibration: these rows are left out if empty.
OPTIONAL = ("origin", "fine-tuned from", "taught by", "training", "calibration")
# Metric of the validation in card.json -> what it is called.
VALIDATED = {
    "eer": "EER of the validation speakers",
    "der": "local DER of held-out conversations",
}


def stated_of_corpora(config: "Config") -> dict[str, list[str]]:
    """Return the stated facts about each data directory of a training, for the model's card."""
    abouts = [read_about(folder) for folder in config.data.train_folders()]
    stated: dict[str, list[str]] = {}
    for key in ABOUT:
        # Each key has a value for each directory: `_training_data` pairs them by position.
        values = [about.get(key, UNKNOWN) for about in abouts]
        stated[f"train_{key}"] = values
    return stated


def describe(path: Path, *, width: int | None = None) -> Rows:
    """Return the rows of a model's card; width: of the tables of results, None for any.

    The results are this model's rows of the experiment's results.json, selected by its sha256. For
    a fine-tuned model, the training data are the data of the fine-tuning. Those of a segmentation
    network are of its validation.
    """
    weights = weights_in(path)
    folder = find_model(path, weights)
    card = read_card(path, weights)
    settings = read_settings(path, weights)
    if weights == EMBEDDER:
        purpose = f"{card['embed_dim']} dimensions"
        calibration = _calibration(folder)
        # A model folder is in its experiment, beside the results.
        results = _results(folder.parent / "results.json", card["sha256"], width)
    else:
        purpose = "segmentation"
        calibration = None
        results = [validation_note(card)]
    source = card.get("source") or {}
    initial = card.get("init_source") or {}

    num_parameters = f"{card['parameters'] / 1e6:.2f} M parameters"
    architecture = settings["model"]["name"]
    front_end: list[str] = []
    for key, value in settings["frontend"].items():
        # The description of a pretrained model is too long to show.
        if not isinstance(value, dict) or key == "lora":
            front_end.append(f"{key} {value}")
    stated: dict[str, list[Any]] = {
        "model": [f"{architecture}, {num_parameters}, {purpose}"],
        "origin": [source.get("page")],
        "fine-tuned from": [_initial(initial) or card.get("init_sha256")],
        "taught by": _teachers(card),
        "licence": [card.get("licence") or source.get("licence")],
        "training data": [source.get("training_data"), *_training_data(card)],
        "data licence": card.get("train_licence", []),
        "languages": card.get("train_languages", []),
        "training": [training_note(card)],
        "speakers": [card.get("train_speakers") or without_labels(card)],
        "front end": [", ".join(front_end)],
        "sha256": [card["sha256"]],
        "commit": [card.get("commit")],
        "calibration": [calibration],
        "results": results,
    }
    rows: Rows = []
    for name, values in stated.items():
        # Values may be missing or empty; numbers, such as speakers, become text.
        lines = [str(value) for value in values if value]
        if lines:
            rows.append((name, lines))
        elif name not in OPTIONAL:
            rows.append((name, [UNKNOWN]))
    return rows


def without_labels(card: Mapping[str, Any]) -> str | None:
    """Return a note on training without labels and its objective; None for other models."""
    objective = card.get("objective")
    if objective:
        return f"trained without labels ({objective})"
    teachers = [teacher["name"] for teacher in card.get("teachers", [])]
    if teachers and not card.get("classes"):
        return f"taught by {' and '.join(teachers)} without labels"
    return None


def _initial(source: Mapping[str, Any]) -> str | None:
    """Return the page of an initial model and, of one from huggingface.co, its commit."""
    origin = source.get("hub", "")
    parts = [source.get("page"), origin if origin.startswith("hf:") else None]
    return ", ".join(part for part in parts if part) or None


def _teachers(card: Mapping[str, Any]) -> list[str]:
    """Return a line for each teacher of a student: its name, sha256, page and licence."""
    lines: list[str] = []
    for teacher in card.get("teachers", []):
        parts = [teacher["name"], f"sha256 {teacher['sha256'][:12]}"]
        if teacher["page"]:
            parts.append(teacher["page"])
        parts.append(f"licence: {teacher['licence'] or UNKNOWN}")
        lines.append(", ".join(parts))
    return lines


def training_note(card: Mapping[str, Any]) -> str | None:
    """Return a warning if training did not lower the error rate of the validation."""
    for metric, name in VALIDATED.items():
        before = card.get(f"valid_{metric}_initial")
        after = card.get(f"valid_{metric}_trained")
        # Without validation, both rates are missing.
        if before is None or after is None or after < before:
            continue
        remark = "; the initial model was kept" if card["kept_initial"] else ""
        return (
            f"Training did not help: before it, {name}"
            f" {percent(before)} %, after it {percent(after)} %{remark}."
        )
    return None


def validation_note(card: Mapping[str, Any]) -> str | None:
    """Return the local DER of a segmentation network; None if it had no validation."""
    before = card.get("valid_der_initial")
    after = card.get("valid_der_trained")
    if before is None or after is None:
        return None
    published = before if card["kept_initial"] else after
    return (
        f"{VALIDATED['der']} {percent(published)} %, before the training"
        f" {percent(before)} %"
    )


def _training_data(card: Mapping[str, Any]) -> list[str]:
    """Return the corpora, size and digest of the training data; empty for imported models."""
    # The card of an imported model has its data in `source` and lacks these keys.
    has_data = card.keys() >= {"train_utterances", "train_hours", "train_sha256"}
    if not has_data:
        return []

    lines: list[str] = []
    corpora = card.get("train_corpus", [])
    pages = card.get("train_page", [])
    for corpus_and_page in zip(corpora, pages):
        parts = [part for part in corpus_and_page if part != UNKNOWN]
        lines.append(", ".join(parts) or UNKNOWN)
    num_utterances = card["train_utterances"]
    hours = card["train_hours"]
    digest = card["train_sha256"][:12]
    lines.append(f"{num_utterances:,} utterances, {hours:g} h, sha256 {digest}")
    return lines


def _calibration(folder: Path) -> str:
    """Return the threshold of decisions and what it was learned from."""
    calibration = read_calibration(folder)
    if calibration is None:
        return "none; `speakerlab calibrate` learns one"
    num_trials = calibration.num_target + calibration.num_nontarget
    return (
        f"threshold {calibration.threshold:.4f} at an EER of {percent(calibration.eer)} %,"
        f" learned from {num_trials:,} trials ({calibration.source})"
    )


def _results(path: Path, sha256: str, width: int | None) -> list[str]:
    """Return the tables of trial lists and of identification, and the protocol of each row."""
    verified: list[Row] = []
    identified: list[Row] = []
    for row in rows_of_model(path, sha256):
        is_identification = row.get("task") == "identification"
        rows_of_task = identified if is_identification else verified
        rows_of_task.append(row)

    lines: list[str] = []
    if verified:
        lines += format_table(verified, width).splitlines()
    if identified:
        lines += format_identification(identified, width).splitlines()
    for row in verified:
        lines.append(f"{row['trials']}, {row['backend']}: {row['protocol']}")
    for row in identified:
        lines.append(f"{row['data']}: {row['protocol']}")
    return lines


def rows_of_model(path: Path, sha256: str) -> list[Row]:
    """Return the rows of a results.json that are of this model.

    The experiment may hold results of an earlier model, too.
    """
    return [row for row in read_rows(path) if row.get("model_sha256") == sha256]
