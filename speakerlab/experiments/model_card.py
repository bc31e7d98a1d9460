"""What is known about a model, for people: its origin, training data, front end and results.

In: an experiment or a model folder. Out: (name, lines) pairs; "not stated" where nothing is known.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speakerlab.checkpoints.model_files import find_model, read_card, read_settings
from speakerlab.experiments.results import bounds, percent

UNKNOWN = "not stated"


def describe(path: Path) -> list[tuple[str, list[str]]]:
    """Return the rows of a model's card.

    The results are those in the experiment's results.json that this model has, by its sha256.
    """
    folder, card, settings = find_model(path), read_card(path), read_settings(path)
    source = card.get("source") or {}
    model, args = settings["model"]["name"], settings["frontend"]
    size = f"{model}, {card['parameters'] / 1e6:.2f} M parameters, {card['embed_dim']} dimensions"
    initial = card.get("init_source") or {}
    rows = {
        "model": size,
        "origin": source.get("page"),
        "fine-tuned from": initial.get("page") or card.get("init_sha256"),
        "licence": source.get("licence"),
        "training data": source.get("training_data") or _training_data(card),
        "languages": source.get("languages"),
        "speakers": card.get("train_speakers"),
        "front end": ", ".join(f"{name} {value}" for name, value in args.items()),
        "sha256": card["sha256"],
        "commit": card.get("commit"),
    }
    optional = ("origin", "fine-tuned from")
    stated = {n: [str(v or UNKNOWN)] for n, v in rows.items() if v or n not in optional}
    results = _results(folder.parent / "results.json", card["sha256"])
    return [*stated.items(), ("results", results or [UNKNOWN])]


def _training_data(card: Mapping[str, Any]) -> str | None:
    """Return the size and the digest of the corpus of a training; None for other models."""
    if "train_utterances" not in card:
        return None
    digest = card["train_sha256"][:12]
    return f"{card['train_utterances']:,} utterances, {card['train_hours']:g} h, sha256 {digest}"


def _results(path: Path, sha256: str) -> list[str]:
    """Return a line for each list and back end: EER, its 95 % interval, numbers of trials."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return [
        f"{row['trials']}, {row['backend']}: EER {percent(row['eer'])} % "
        f"(95 %: {bounds(row['eer_ci95'], row, percent)}), {row['num_target']:,} target and "
        f"{row['num_nontarget']:,} non-target trials"
        for row in rows
        if row.get("model_sha256") == sha256 and row.get("eer") is not None
    ]
