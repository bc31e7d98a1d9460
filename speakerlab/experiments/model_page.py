"""The page of a published model: README.md with the metadata that huggingface.co reads.

In: a folder with the files of a model, and its results. Out: Markdown after a block of YAML:
licence, tags, training corpora, and EER and minDCF of each trial list (`model-index`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speakerlab.checkpoints.model_files import read_card, read_settings, weights_in
from speakerlab.config.layers import to_yaml
from speakerlab.experiments.model_card import UNKNOWN, describe, validation_note
from speakerlab.experiments.results import Row, columns_of, percent

README = "README.md"
# Identifiers of huggingface.co for licences; others are `other`, with a name.
LICENCES = {
    "apache-2.0",
    "mit",
    "bsd-2-clause",
    "bsd-3-clause",
    "gpl-3.0",
    "lgpl-3.0",
    "agpl-3.0",
    "mpl-2.0",
    "unlicense",
    "cc0-1.0",
    "cc-by-2.0",
    "cc-by-3.0",
    "cc-by-4.0",
    "cc-by-sa-3.0",
    "cc-by-sa-4.0",
    "cc-by-nd-4.0",
    "cc-by-nc-2.0",
    "cc-by-nc-3.0",
    "cc-by-nc-4.0",
    "cc-by-nc-nd-3.0",
    "cc-by-nc-nd-4.0",
    "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0",
    "cc-by-nc-sa-4.0",
    "unknown",
}
UNKNOWN_LICENCE = "unknown"
NON_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial", re.IGNORECASE)
# Task of the settings -> what huggingface.co calls it; others embed.
PIPELINES = {
    "identification": "audio-classification",
    "segmentation": "voice-activity-detection",
}
EMBEDDING_TAGS = ("speaker-recognition", "speaker-verification", "speaker-embedding")
SEGMENTATION_TAGS = (
    "speaker-diarization",
    "speaker-segmentation",
    "overlapped-speech-detection",
)
# Rows of `describe` that have sections of their own on the page.
SHOWN_ELSEWHERE = ("licence", "data licence", "results", "taught by", "fine-tuned from")


@dataclass(frozen=True)
class Terms:
    """Licence of a model, and what is to be known about the models that it came from."""

    licence: str  # identifier, or the name of another licence
    notes: list[str] = field(default_factory=list)  # sentences for the page
    warnings: list[str] = field(default_factory=list)  # for the publisher


def terms_of(card: Mapping[str, Any], licence: str | None) -> Terms:
    """Return the licence of a model: `licence`, or the only one of the models it came from.

    A model that was trained from nothing else has the licence that its owner chooses, and none
    before.
    """
    notes: list[str] = []
    warnings: list[str] = []
    inherited: list[str] = []
    for relation, name, their_licence in _origins(card):
        inherited.append(their_licence)
        sentence = f"It was {relation} {name}, whose licence is {their_licence}"
        if their_licence == UNKNOWN:
            sentence = (
                f"It was {relation} {name}, whose licence is not stated: ask its publisher"
                " before you use or share this model"
            )
        sentence += _limit_of(their_licence)
        notes.append(f"{sentence}.")
        if their_licence == UNKNOWN or _limit_of(their_licence):
            warnings.append(f"its page will state: {sentence}")
    for corpus, data_licence in _corpora(card):
        limit = _limit_of(data_licence)
        notes.append(f"Training data: {corpus}; licence: {data_licence}{limit}.")

    chosen = licence
    if chosen is None:
        distinct = set(inherited)
        chosen = UNKNOWN
        if len(distinct) == 1:
            (chosen,) = distinct
    name = identifier(chosen)
    if name == UNKNOWN_LICENCE and not warnings:
        warnings.append(
            "its page will state that it has no licence, so that nobody may use it; give"
            " one with --licence, such as cc-by-4.0"
        )
    return Terms(name, notes, warnings)


def _limit_of(licence: str) -> str:
    """Return the end of a sentence about a licence that allows no commercial use; "" for others."""
    return ", which allows no commercial use" if NON_COMMERCIAL.search(licence) else ""


def _origins(card: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (relation, name, licence) of each model that this one came from."""
    origins: list[tuple[str, str, str]] = []
    relations = {"source": "converted from", "init_source": "fine-tuned from"}
    for key, relation in relations.items():
        source = card.get(key)
        if source:
            name = source.get("page") or source.get("file") or "another model"
            origins.append((relation, name, source.get("licence") or UNKNOWN))
    for teacher in card.get("teachers") or ():
        name = teacher["name"]
        page = teacher.get("page")
        if page:
            name += f" ({page})"
        origins.append(("distilled from", name, teacher.get("licence") or UNKNOWN))
    return origins


def _corpora(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, licence) of each corpus of which one of both is stated."""
    corpora: list[tuple[str, str]] = []
    names = card.get("train_corpus") or ()
    licences = card.get("train_licence") or ()
    for name, licence in zip(names, licences):
        if (name, licence) != (UNKNOWN, UNKNOWN):
            corpora.append((name, licence))
    return corpora


def identifier(licence: str) -> str:
    """Return the identifier of a licence, such as cc-by-4.0 for "CC BY 4.0", if it has one."""
    if licence == UNKNOWN:
        return UNKNOWN_LICENCE
    name = slug(licence)
    name = {"cc0": "cc0-1.0", "apache": "apache-2.0"}.get(name, name)
    return name if name in LICENCES else licence


def slug(text: str) -> str:
    """Return a text in small letters, digits, points and hyphens, as names on hubs have."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def page_of(folder: Path, rows: Sequence[Row], terms: Terms, *, name: str) -> str:
    """Return README.md for a folder of a model; rows: its results. name: how others load it."""
    weights = weights_in(folder)
    card = read_card(folder, weights)
    settings = read_settings(folder, weights)
    parts = [
        f"---\n{to_yaml(metadata_of(card, settings, rows, terms))}---",
        f"# {title_of(card, settings)}",
        introduction(settings, card),
        f"## Use\n\n{usage(settings, name)}",
        f"## Licence\n\n{licence_text(terms)}",
    ]
    results = results_text(rows) if rows else validation_text(card)
    if results:
        parts.append(f"## Results\n\n{results}")
    facts: list[Sequence[str]] = []
    for label, lines in describe(folder):
        if label not in SHOWN_ELSEWHERE:
            facts.append((label, "; ".join(lines)))
    parts.append(f"## Facts\n\n{table(['', ''], facts)}")
    return "\n\n".join(parts) + "\n"


def metadata_of(
    card: Mapping[str, Any],
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    terms: Terms,
) -> dict[str, Any]:
    """Return the block of YAML at the start of the page."""
    task = settings.get("task", "")
    pipeline = PIPELINES.get(task, "feature-extraction")
    tags = SEGMENTATION_TAGS if task == "segmentation" else EMBEDDING_TAGS
    metadata: dict[str, Any] = {"license": terms.licence}
    if terms.licence not in LICENCES:
        metadata = {"license": "other", "license_name": slug(terms.licence)}
    architecture = settings["model"]["name"]
    metadata |= {
        "library_name": "speakerlab",
        "pipeline_tag": pipeline,
        "tags": ["speakerlab", *tags, slug(architecture)],
    }
    corpora = [name for name in card.get("train_corpus") or () if name != UNKNOWN]
    if corpora:
        metadata["datasets"] = [slug(name) for name in dict.fromkeys(corpora)]
    results = [result_of(row) for row in rows]
    if results:
        metadata["model-index"] = [{"name": architecture, "results": results}]
    return metadata


def result_of(row: Row) -> dict[str, Any]:
    """Return a row of results as an entry of `model-index`."""
    if row.get("task") == "identification":
        task = {"type": "audio-classification", "name": "Identification"}
        dataset = str(row["data"])
        accuracy = round(100 * row["accuracy"], 3)
        metrics = [{"type": "accuracy", "name": "Accuracy (%)", "value": accuracy}]
    else:
        task = {"type": "speaker-verification", "name": "Speaker verification"}
        dataset = str(row["trials"])
        # A list may be scored with several back ends.
        if row["backend"] != "cosine":
            dataset += f", {row['backend']}"
        eer = round(100 * row["eer"], 3)
        metrics = [{"type": "eer", "name": "EER (%)", "value": eer}]
        for prior, cost in row["min_dcf"].items():
            name = f"minDCF (p_target={prior})"
            metrics.append({"type": "mindcf", "name": name, "value": round(cost, 4)})
    return {
        "task": task,
        "dataset": {"name": dataset, "type": slug(dataset)},
        "metrics": metrics,
    }


def title_of(card: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    millions = card["parameters"] / 1e6
    architecture = settings["model"]["name"]
    if settings.get("task") == "segmentation":
        return f"{architecture}, {millions:.1f} M parameters, segmentation"
    return (
        f"{architecture}, {millions:.1f} M parameters, {card['embed_dim']} dimensions"
    )


def introduction(settings: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """Return what the model does, in a paragraph."""
    sample_rate = settings["frontend"]["sample_rate"]
    if settings.get("task") == "segmentation":
        return (
            f"A segmentation network of speakerlab. In: speech at {sample_rate:,} Hz, in"
            " windows of 10 s. Out: which of up to three speakers of the window speak in"
            " each frame. Diarization finds overlapping speech with it."
        )
    text = (
        f"A speaker-embedding model of speakerlab. In: speech at {sample_rate:,} Hz. Out: a"
        f" vector of {card['embed_dim']} values; the cosine of two of them tells whether"
        " they are of one speaker."
    )
    if settings.get("task") == "identification":
        text += " It also classifies recordings; see `speakers.txt` for the classes."
    if ":" in settings["model"]["name"]:
        text += (
            " Its network is a class that is not part of speakerlab: loading it needs the"
            " publisher's code (`plugins=FOLDER`)."
        )
    return text


def usage(settings: Mapping[str, Any], name: str) -> str:
    """Return how to use the model; name: of a folder, or `hf:owner/name`."""
    if settings.get("task") == "segmentation":
        return segmentation_usage(name)
    lines = [
        "import speakerlab",
        "",
        f'model = speakerlab.load("{name}")',
        'embedding = model.embed("a.wav")',
        'result = model.verify("a.wav", "b.wav")  # result.score, .llr, .is_same',
    ]
    if settings.get("task") == "identification":
        lines.append('ranking = model.classify("a.wav")')
    code = "\n".join(lines)
    return (
        f"```python\n{code}\n```\n\nor `speakerlab verify a.wav b.wav --model {name}`."
        " Features, sample rate and calibration are part of the model."
    )


def segmentation_usage(name: str) -> str:
    """Return how to diarize with a segmentation network."""
    command = (
        "speakerlab diarize meeting.wav --model hub:campplus-zh-en"
        f" --segmentation {name} --out turns"
    )
    return (
        f"```sh\n{command}\n```\n\n`--model` is any model of speaker embeddings. In Python:"
        f' `speakerlab.load(MODEL).diarize("meeting.wav", segmentation="{name}")`.'
    )


def validation_text(card: Mapping[str, Any]) -> str | None:
    """Return what the validation of a segmentation network measured; None for other models."""
    note = validation_note(card)
    if note is None:
        return None
    return (
        f"In its training: {note}. The local DER has missed speech, false alarms and"
        " confusions within single windows; it is no DER of whole recordings."
    )


def licence_text(terms: Terms) -> str:
    """Return the section about the licence."""
    first = f"This model has the licence {terms.licence}."
    if terms.licence == UNKNOWN_LICENCE:
        first = "**No licence is stated for this model.**"
    elif _limit_of(terms.licence):
        first = f"**Not for commercial use.** {first}"
    lines = [first, *(f"- {note}" for note in terms.notes)]
    if terms.notes:
        lines.insert(1, "")
    return "\n".join(lines)


def results_text(rows: Sequence[Row]) -> str:
    """Return the tables of results, and how each list was scored."""
    verified = [row for row in rows if row.get("task") != "identification"]
    identified = [row for row in rows if row.get("task") == "identification"]
    parts: list[str] = []
    if verified:
        columns = columns_of(verified)
        header = ["trials", "back end", *columns]
        lines: list[Sequence[str]] = []
        for number, row in enumerate(verified):
            cells = [row["trials"], row["backend"]]
            for column in columns.values():
                text, details = column[number]
                shown = ", ".join(detail for detail in details if detail)
                cells.append(f"{text} ({shown})" if shown else text)
            lines.append(cells)
        parts.append(table(header, lines))
        parts.append("In brackets: 95 % intervals.")
    if identified:
        header = ["data", "accuracy %", "classes"]
        lines = []
        for row in identified:
            lines.append(
                [row["data"], percent(row["accuracy"]), str(row["num_classes"])]
            )
        parts.append(table(header, lines))
    protocols = [
        f"- {row.get('trials') or row['data']}: {row['protocol']}" for row in rows
    ]
    parts.append("\n".join(dict.fromkeys(protocols)))
    return "\n\n".join(parts)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    texts: list[str] = []
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        texts.append(f"| {' | '.join(cells)} |")
    return "\n".join(texts)
