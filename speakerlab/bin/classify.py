"""Classify every utterance of a data directory; write results.json and report.html."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speakerlab.bin.command import choose_gpus, parser
from speakerlab.checkpoints import model_files
from speakerlab.checkpoints.model_files import find_model, read_card
from speakerlab.core import done
from speakerlab.core.atomic import locked, write_text
from speakerlab.core.counting import count_of
from speakerlab.data.tables import read_table
from speakerlab.experiments import results
from speakerlab.experiments.embedded import model_inputs, read_embedded, set_inputs
from speakerlab.experiments.report import facts_of, write_identification_page
from speakerlab.scoring.identification import (
    accuracy,
    accuracy_interval,
    balanced_accuracy,
    confusion,
)

if TYPE_CHECKING:  # it imports torch, which is slow: only for valid options
    from speakerlab.inference.torch_model import Classifier

log = logging.getLogger(__name__)
RECORD = "scores/.classified"  # in the experiment: the inputs of the last results
TASK = "identification"  # of the rows of results.json


def main(arguments: Sequence[str]) -> None:
    options = parser("classify", __doc__)
    options.add("--exp DIR", "experiment with embeddings of the data", required=True)
    data = "data directories, embedded by `speakerlab extract`"
    options.add("--data DIR", data, nargs="+", required=True)
    options.add("--force", "classify again what was classified with the same inputs")
    options.add_gpus("for the classifier")
    args = options.parse_args(arguments)
    choose_gpus(args.gpus)
    inputs = inputs_of(args.exp, args.data)
    if not args.force and is_classified(args.exp, args.data, inputs):
        return

    from speakerlab.config.schema import load_config
    from speakerlab.inference.torch_model import load_classifier

    classifier = load_classifier(args.exp)
    config = load_config([find_model(args.exp) / "config.yaml"])
    labels = config.data.labels
    rows: list[results.Row] = []
    with locked(args.exp / results.LOCK) as waited:
        # Another process may have classified the same data while this process waited.
        may_reuse = waited and not args.force
        if may_reuse and is_classified(args.exp, args.data, inputs):
            return
        # The record describes the old results, so remove it before they change.
        done.forget(args.exp / RECORD)
        for folder in args.data:
            row = classify(args.exp, folder, classifier, labels=labels)
            rows = results.update_results(args.exp / "results.json", [row])
        write_identification_page(
            args.exp / "report.html",
            title=f"Identification: {args.exp.name}",
            rows=rows,
            facts=facts_of(args.exp),
        )
        outputs = ["../report.html"]
        outputs += [classes_file(folder) for folder in args.data]
        # Record the results with the new rows.
        inputs |= results_inputs(args.exp)
        done.record(args.exp / RECORD, inputs, outputs=outputs)
    print_tables(rows, args.data)
    log.info("%s: wrote results.json and report.html", args.exp)


def inputs_of(exp_dir: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the inputs of the decisions, the results and the report, for their record."""
    settings = model_files.read_settings(exp_dir)["data"]
    labels = settings.get("labels", "")
    return {
        **model_inputs(exp_dir),
        "sets": [set_inputs(exp_dir, folder) for folder in folders],
        "labels": [done.file_digest(folder / labels) for folder in folders],
    }


def results_inputs(exp_dir: Path) -> dict[str, Any]:
    """Return the digest of the results, which another command may have changed."""
    return {"results": done.file_digest(exp_dir / "results.json")}


def is_classified(
    exp_dir: Path,
    folders: Sequence[Path],
    inputs: Mapping[str, Any],
) -> bool:
    """Return whether results.json has the results of these inputs; if so, print them."""
    current = {**inputs, **results_inputs(exp_dir)}
    if not done.is_done(exp_dir / RECORD, current):
        return False
    rows = results.read_rows(exp_dir / "results.json")
    # The file may also have verification rows of `speakerlab score`.
    task_rows = [row for row in rows if row.get("task") == TASK]
    print_tables(task_rows, folders)
    log.info(
        "%s: already classified with these inputs, kept (--force classifies again)",
        exp_dir,
    )
    return True


def print_tables(rows: Sequence[results.Row], folders: Sequence[Path]) -> None:
    """Print the confusions of each data directory, then the results of all."""
    width = results.terminal_width()
    row_of = {row["data"]: row for row in rows}
    for folder in folders:
        row = row_of[folder.name]
        confusion = results.format_confusion(row, width)
        sys.stdout.write(f"{folder.name}: {row['protocol']}\n{confusion}\n\n")
    table = results.format_identification(rows, width)
    sys.stdout.write(f"{table}\n")


def classes_file(folder: Path) -> str:
    """Return the name of the file with the decisions on a data directory."""
    return f"{folder.name}_classes.txt"


def classify(
    exp_dir: Path,
    folder: Path,
    classifier: "Classifier",
    *,
    labels: str,
) -> results.Row:
    """Classify one data directory: write the decisions to `scores/`, return its row of results."""
    table = read_embedded(exp_dir, folder)
    card = read_card(exp_dir)
    classes = classifier.classes
    true_N = true_classes(folder / labels, table.ids, classes)
    posterior_NC = classifier.posteriors(table.emb_ND)
    decided_N = posterior_NC.argmax(axis=1)

    lines: list[str] = []
    posterior_N = posterior_NC.max(axis=1)
    decisions = zip(table.ids, true_N, decided_N, posterior_N)
    for utterance, true, decided, posterior in decisions:
        line = f"{utterance} {classes[true]} {classes[decided]} {posterior:.6f}\n"
        lines.append(line)
    decisions_file = exp_dir / "scores" / classes_file(folder)
    write_text(decisions_file, "".join(lines))

    # Utterances of one speaker are not independent: the bootstrap draws speakers if they are known.
    group_N = speakers_of(folder / "utt2spk", table.ids)
    num_speakers = None
    drawn = "utterances"
    if group_N is not None:
        num_speakers = int(group_N.max()) + 1
        drawn = count_of(num_speakers, "speaker")
    return result_row(
        confusion(true_N, decided_N, len(classes)),
        classes,
        data=folder.name,
        system=exp_dir.name,
        accuracy_ci95=accuracy_interval(decided_N == true_N, group_N),
        num_speakers=num_speakers,
        model_sha256=card["sha256"],
        commit=card.get("commit"),
        protocol=(
            "the head assigns each whole utterance to the most likely of"
            f" {len(classes)} classes; interval by bootstrap over {drawn}"
        ),
    )


def result_row(
    count_CC: np.ndarray,
    classes: Sequence[str],
    **facts: Any,
) -> results.Row:
    """Return a row of results.json; `confusion` is true -> decided -> number of utterances."""
    # Store only pairs of classes that occur: with many languages, most pairs do not.
    counts: dict[str, dict[str, int]] = {}
    pairs = np.argwhere(count_CC).tolist()
    for true, decided in pairs:
        row = counts.setdefault(classes[true], {})
        count = count_CC[true, decided]
        row[classes[decided]] = int(count)
    return {
        **facts,
        "task": TASK,
        "accuracy": accuracy(count_CC),
        "balanced_accuracy": balanced_accuracy(count_CC),
        "error": 1 - accuracy(count_CC),
        "num": int(count_CC.sum()),
        "num_classes": len(classes),
        "confusion": counts,
    }


def true_classes(path: Path, ids: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the number of each utterance's class; ValueError if one is missing or unknown."""
    class_of = read_table(path)
    number_of = {name: number for number, name in enumerate(classes)}
    numbers: list[int] = []
    wrong_ids: list[str] = []
    for name in ids:
        number = number_of.get(class_of.get(name, ""))
        if number is None:
            wrong_ids.append(name)
        else:
            numbers.append(number)
    if wrong_ids:
        first = wrong_ids[0]
        raise ValueError(
            f"{path}: {count_of(len(wrong_ids), 'utterance')} with none of the model's"
            f" {count_of(len(classes), 'class')}, as {first}:"
            f" {class_of.get(first, 'missing')}; correct them, or train with them"
        )
    return np.array(numbers)


def speakers_of(path: Path, ids: Sequence[str]) -> np.ndarray | None:
    """Return the number of each utterance's speaker; None if they are unknown."""
    if not path.exists():
        return None
    speaker_of = read_table(path)
    if not speaker_of.keys() >= set(ids):
        return None
    speakers = [speaker_of[utterance] for utterance in ids]
    _, speaker_N = np.unique(speakers, return_inverse=True)
    return speaker_N
