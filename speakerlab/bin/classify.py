"""Name the class of every utterance of a data directory; write results.json and report.html."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from speakerlab.bin.command import parser
from speakerlab.checkpoints.model_files import embeddings_stem, find_model, read_card
from speakerlab.config.layers import flatten
from speakerlab.data.tables import read_table
from speakerlab.experiments.identification_page import write_page
from speakerlab.experiments.report_page import facts_of
from speakerlab.scoring import identification
from speakerlab.scoring.embeddings import EmbeddingTable

if TYPE_CHECKING:  # torch comes with it: not before the options are right
    from speakerlab.inference.classifier import Classifier

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab classify --exp DIR --data DIR...`"""
    options = parser("classify", __doc__)
    options.add_argument("--exp", type=Path, required=True, metavar="DIR")
    options.add_argument("--data", type=Path, nargs="+", required=True, metavar="DIR")
    args = options.parse_args(words)
    from speakerlab.config.schema import load_config
    from speakerlab.inference.classifier import load_classifier

    classifier = load_classifier(args.exp)
    config = load_config([find_model(args.exp) / "config.yaml"])
    rows: list[identification.Row] = []
    for folder in args.data:
        row = classify(args.exp, folder, classifier, labels=config.data.labels)
        rows = identification.update_results(args.exp / "results.json", row)
        table = identification.format_confusion(row)
        sys.stdout.write(f"{folder.name}: {row['protocol']}\n{table}\n\n")
    write_page(
        args.exp / "report.html",
        title=f"Identification: {args.exp.name}",
        rows=rows,
        facts=facts_of(read_card(args.exp), flatten(config.to_dict())),
    )
    sys.stdout.write(identification.format_rows(rows) + "\n")
    log.info("%s: results.json and report.html written", args.exp)


def classify(
    exp_dir: Path, folder: Path, classifier: "Classifier", *, labels: str
) -> identification.Row:
    """The row of results of one data directory; decisions are written to `scores/`."""
    card, table = read_card(exp_dir), EmbeddingTable.load(embeddings_stem(exp_dir, folder.name))
    if table.model_sha256 != card["sha256"]:
        raise ValueError(
            f"{embeddings_stem(exp_dir, folder.name)}: must be embeddings of this model, got those "
            f"of {table.model_sha256[:12]}; run stage 5 again"
        )
    classes = classifier.classes
    true_N = true_classes(folder / labels, table.ids, classes)
    posterior_NC = classifier.posteriors(table.emb_ND)
    found_N = posterior_NC.argmax(axis=1)
    identification.write_decisions(
        exp_dir / "scores" / f"{folder.name}_classes.txt",
        table.ids,
        true_N,
        found_N,
        posterior_NC.max(axis=1),
        classes,
    )
    group_N = speakers_of(folder / "utt2spk", table.ids)
    drawn = "utterances" if group_N is None else f"{group_N.max() + 1} speakers"
    return identification.result_row(
        data=folder.name,
        system=exp_dir.name,
        count_CC=identification.confusion(true_N, found_N, len(classes)),
        classes=classes,
        interval=identification.accuracy_interval(found_N == true_N, group_N),
        protocol=f"each whole utterance is given the most likely of {len(classes)} classes by the "
        f"head of the training; interval by bootstrap over {drawn}",
        model_sha256=card["sha256"],
        commit=card.get("commit"),
    )


def true_classes(path: Path, ids: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """The number of each utterance's class; ValueError where the model does not know one."""
    told, index = read_table(path), {name: number for number, name in enumerate(classes)}
    missing = [utterance for utterance in ids if utterance not in told]
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} utterances have no class, got {missing[0]}; add their lines"
        )
    unknown = sorted({told[utterance] for utterance in ids} - index.keys())
    if unknown:
        raise ValueError(
            f"{path}: the model knows {len(classes)} classes, got {len(unknown)} others "
            f"({', '.join(unknown[:5])}); leave them out, or train with them"
        )
    return np.array([index[told[utterance]] for utterance in ids])


def speakers_of(path: Path, ids: Sequence[str]) -> np.ndarray | None:
    """The number of each utterance's speaker; None where they are not told."""
    told = read_table(path) if path.exists() else {}
    if not told.keys() >= set(ids):
        return None
    return np.unique([told[utterance] for utterance in ids], return_inverse=True)[1]
