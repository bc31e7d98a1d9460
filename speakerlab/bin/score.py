"""Score trial lists with an experiment's embeddings; write results.json and report.html."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speakerlab import provenance
from speakerlab.bin.command import parser
from speakerlab.bin.extract import embeddings_stem
from speakerlab.config import load_config
from speakerlab.data.tables import read_table
from speakerlab.layers import flatten
from speakerlab.published import find_model, read_calibration
from speakerlab.scoring import plots, report
from speakerlab.scoring.backend import cosine_scores
from speakerlab.scoring.calibration import quality
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.metrics import eer, operating_points, summary
from speakerlab.scoring.trials import Trials, read_trials

log = logging.getLogger(__name__)
PROTOCOL = "each trial compares two whole utterances by the cosine of their embeddings"


def main(words: Sequence[str]) -> None:
    """`speakerlab score --exp DIR --trials FILE...`"""
    options = parser("score", __doc__)
    options.add_argument("--exp", type=Path, required=True, metavar="DIR")
    options.add_argument("--trials", type=Path, nargs="+", required=True, metavar="FILE")
    args = options.parse_args(words)
    model = find_model(args.exp)
    card = json.loads((model / "card.json").read_text(encoding="utf-8"))
    calibration = read_calibration(model)
    rows: list[report.Row] = []
    figures: dict[str, Path] = {}
    for path in args.trials:
        name = f"{path.parent.name}/{path.name}"
        trials = read_trials(path)
        trained = score(args.exp, path, trials)
        untrained = score_untrained(args.exp, path, trials)
        if untrained is None:
            log.info("%s: no untrained embeddings (extract --untrained), left out", name)
        speakers = trials.speakers(read_table(path.parent / "utt2spk"))
        row = report.result_row(
            trials=name,
            system=args.exp.name,
            eer_untrained=None if untrained is None else eer(untrained, trials.is_target_N),
            backend="cosine",
            protocol=PROTOCOL,
            model_sha256=card["sha256"],
            commit=card.get("commit"),
            calibrated=calibration and quality(calibration, trained, trials.is_target_N),
            bn_batch=card.get("bn_batch"),
            **summary(trained, trials.is_target_N, *speakers),
        )
        rows = report.update_results(args.exp / "results.json", row)
        figures |= draw(args.exp / "scores", name, trials, trained, untrained)
    config = flatten(load_config([args.exp / "config.yaml"]).to_dict())
    report.write_html(
        args.exp / "report.html",
        rows,
        figures,
        {**card, "scored_by_commit": provenance.commit(), "configuration": config},
        title=f"Speaker verification: {args.exp.name}",
    )
    sys.stdout.write(report.format_table(rows) + "\n")
    log.info("%s: results.json and report.html written", args.exp)


def score(exp_dir: Path, path: Path, trials: Trials) -> np.ndarray:
    """Cosine scores of the trained model, written to `scores/`."""
    table = EmbeddingTable.load(embeddings_stem(exp_dir, path.parent.name, untrained=False))
    scores_N = cosine_scores(table, table, trials)
    name = f"{path.parent.name}_{path.name}.txt"
    report.write_scores(exp_dir / "scores" / name, trials, scores_N)
    return scores_N


def score_untrained(exp_dir: Path, path: Path, trials: Trials) -> np.ndarray | None:
    """Those of the initial weights, None where they were not extracted."""
    stem = embeddings_stem(exp_dir, path.parent.name, untrained=True)
    if not stem.with_suffix(".json").exists():
        return None
    table = EmbeddingTable.load(stem)
    return cosine_scores(table, table, trials)


def draw(
    folder: Path, name: str, trials: Trials, trained: np.ndarray, untrained: np.ndarray | None
) -> dict[str, Path]:
    """The DET curves and the histogram of a trial list: caption -> picture."""
    stem = name.replace("/", "_")
    det, histogram = folder / f"{stem}_det.png", folder / f"{stem}_scores.png"
    curves = {"trained": trained} | ({} if untrained is None else {"untrained": untrained})
    plots.plot_det(
        det, {label: operating_points(s, trials.is_target_N)[:2] for label, s in curves.items()}
    )
    plots.plot_scores(histogram, trained, trials.is_target_N)
    return {f"{name}: DET curve": det, f"{name}: scores of the trained model": histogram}
