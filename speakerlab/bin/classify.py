"""Classify every utterance of a data directory; write results.json and report.html."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speakerlab.bin.command import parser
from speakerlab.checkpoints.model_files import find_model, read_card
from speakerlab.core.atomic import alone, write_text
from speakerlab.data.tables import read_table
from speakerlab.experiments import results
from speakerlab.experiments.embedded import read_embedded
from speakerlab.experiments.report import facts_of, write_identification_page
from speakerlab.scoring.identification import (
    accuracy,
    accuracy_interval,
    balanced_accuracy,
    confusion,
)

if TYPE_CHECKING:  # imports torch, which must wait until the options are checked
    from speakerlab.inference.torch_model import Classifier

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    options = parser("classify", __doc__)
    options.add("--exp DIR", "experiment with embeddings of the data", required=True)
    data = "data directories, embedded by stage 5 or `speakerlab extract`"
    options.add("--data DIR", data, nargs="+", required=True)
    args = options.parse_args(words)
    from speakerlab.config.schema import load_config
    from speakerlab.inference.torch_model import load_classifier

    classifier = load_classifier(args.exp)
    labels = load_config([find_model(args.exp) / "config.yaml"]).data.labels
    rows: list[results.Row] = []
    with alone(args.exp / results.LOCK):
        for folder in args.data:
            row = classify(args.exp, folder, classifier, labels=labels)
            rows = results.update_results(args.exp / "results.json", [row])
            text = f"{folder.name}: {row['protocol']}\n{results.format_confusion(row)}\n\n"
            sys.stdout.write(text)
        title = f"Identification: {args.exp.name}"
        page = args.exp / "report.html"
        write_identification_page(page, title=title, rows=rows, facts=facts_of(args.exp))
    sys.stdout.write(results.format_identification(rows) + "\n")
    log.info("%s: wrote results.json and report.html", args.exp)


def classify(exp_dir: Path, folder: Path, classifier: "Classifier", *, labels: str) -> results.Row:
    """Classify one data directory: write the decisions to `scores/`, return its row of results."""
    table, card, classes = read_embedded(exp_dir, folder), read_card(exp_dir), classifier.classes
    true_N = true_classes(folder / labels, table.ids, classes)
    posterior_NC = classifier.posteriors(table.emb_ND)
    found_N = posterior_NC.argmax(axis=1)
    lines = [
        f"{utterance} {classes[true]} {classes[found]} {posterior:.6f}\n"
        for utterance, true, found, posterior in zip(
            table.ids, true_N, found_N, posterior_NC.max(axis=1)
        )
    ]
    write_text(exp_dir / "scores" / f"{folder.name}_classes.txt", "".join(lines))
    group_N = speakers_of(folder / "utt2spk", table.ids)
    num_speakers = None if group_N is None else int(group_N.max()) + 1
    drawn = "utterances" if num_speakers is None else f"{num_speakers} speakers"
    return result_row(
        confusion(true_N, found_N, len(classes)),
        classes,
        data=folder.name,
        system=exp_dir.name,
        accuracy_ci95=accuracy_interval(found_N == true_N, group_N),
        num_speakers=num_speakers,
        model_sha256=card["sha256"],
        commit=card.get("commit"),
        protocol=f"the head assigns each whole utterance to the most likely of {len(classes)} "
        f"classes; interval by bootstrap over {drawn}",
    )


def result_row(count_CC: np.ndarray, classes: Sequence[str], **facts: Any) -> results.Row:
    """Return a row of results.json; `confusion` is true -> found -> utterances."""
    counts: dict[str, dict[str, int]] = {}
    for true, found in np.argwhere(count_CC).tolist():
        counts.setdefault(classes[true], {})[classes[found]] = int(count_CC[true, found])
    return {
        **facts,
        "task": "identification",
        "accuracy": accuracy(count_CC),
        "balanced_accuracy": balanced_accuracy(count_CC),
        "error": 1 - accuracy(count_CC),
        "num": int(count_CC.sum()),
        "num_classes": len(classes),
        "confusion": counts,
    }


def true_classes(path: Path, ids: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the number of each utterance's class; ValueError if one is missing or unknown."""
    class_of, index = read_table(path), {name: number for number, name in enumerate(classes)}
    wrong = [utterance for utterance in ids if class_of.get(utterance) not in index]
    if wrong:
        raise ValueError(
            f"{path}: {len(wrong)} utterances have none of the model's {len(classes)} classes, as "
            f"{wrong[0]}: {class_of.get(wrong[0], 'missing')}; correct them, or train with them"
        )
    return np.array([index[class_of[utterance]] for utterance in ids])


def speakers_of(path: Path, ids: Sequence[str]) -> np.ndarray | None:
    """Return the number of each utterance's speaker; None if they are unknown."""
    speaker_of = read_table(path) if path.exists() else {}
    if not speaker_of.keys() >= set(ids):
        return None
    return np.unique([speaker_of[utterance] for utterance in ids], return_inverse=True)[1]
