"""The card of a model: its origin, training data, front end and results, as text.

In: an experiment or a model folder. Out: (name, lines) pairs; "not stated" where nothing is known.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speakerlab.checkpoints.model_files import find_model, read_card, read_settings
from speakerlab.data.tables import ABOUT, read_about
from speakerlab.experiments.results import format_identification, format_table, read_rows

if TYPE_CHECKING:  # it imports torch, which `speakerlab score --help` need not wait for
    from speakerlab.config.schema import Config

UNKNOWN = "not stated"


def stated_of_corpora(config: "Config") -> dict[str, list[str]]:
    """Return what each data directory of a training states about itself, for the model's card."""
    stated = [read_about(Path(config.data.dir, name)) for name in config.data.train]
    return {f"train_{key}": [one.get(key, UNKNOWN) for one in stated] for key in ABOUT}


def describe(path: Path) -> list[tuple[str, list[str]]]:
    """Return the rows of a model's card.

    The results are those in the experiment's results.json that this model has, by its sha256. The
    training data of a fine-tuned model are those of the fine-tuning.
    """
    folder, card, settings = find_model(path), read_card(path), read_settings(path)
    source, initial = card.get("source") or {}, card.get("init_source") or {}
    args = settings["frontend"]
    size = f"{card['parameters'] / 1e6:.2f} M parameters, {card['embed_dim']} dimensions"
    rows = {
        "model": [f"{settings['model']['name']}, {size}"],
        "origin": [source.get("page")],
        "fine-tuned from": [initial.get("page") or card.get("init_sha256")],
        "licence": [source.get("licence")],
        "training data": [source.get("training_data"), *_training_data(card)],
        "data licence": card.get("train_licence", []),
        "languages": card.get("train_languages", []),
        "speakers": [card.get("train_speakers") or without_labels(card)],
        "front end": [", ".join(f"{name} {value}" for name, value in args.items())],
        "sha256": [card["sha256"]],
        "commit": [card.get("commit")],
        "results": _results(folder.parent / "results.json", card["sha256"]),
    }
    known = {name: [str(line) for line in lines if line] for name, lines in rows.items()}
    optional = ("origin", "fine-tuned from")
    return [
        (name, lines or [UNKNOWN]) for name, lines in known.items() if lines or name not in optional
    ]


def without_labels(card: Mapping[str, Any]) -> str | None:
    """Return that a model was trained without labels, and how; None if it was not."""
    objective = card.get("objective")
    return f"trained without labels ({objective})" if objective else None


def _training_data(card: Mapping[str, Any]) -> list[str]:
    """Return the corpora of a training, and their size and digest; none for other models."""
    if not card.keys() >= {"train_utterances", "train_hours", "train_sha256"}:
        return []
    pairs = zip(card.get("train_corpus", []), card.get("train_page", []))
    named = (", ".join(one for one in pair if one != UNKNOWN) or UNKNOWN for pair in pairs)
    digest = card["train_sha256"][:12]
    size = f"{card['train_utterances']:,} utterances, {card['train_hours']:g} h, sha256 {digest}"
    return [*named, size]


def _results(path: Path, sha256: str) -> list[str]:
    """Return the tables of trial lists and of identification, and the protocol of each row."""
    own = [row for row in read_rows(path) if row.get("model_sha256") == sha256]
    named = [row for row in own if row.get("task") == "identification"]
    lists = [row for row in own if row not in named]
    return [
        *(format_table(lists).splitlines() if lists else []),
        *(format_identification(named).splitlines() if named else []),
        *(f"{row['trials']}, {row['backend']}: {row['protocol']}" for row in lists),
        *(f"{row['data']}: {row['protocol']}" for row in named),
    ]
