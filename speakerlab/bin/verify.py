"""Compare two recordings, or the recordings of every trial in a list."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from speakerlab.bin.command import model_of, parser
from speakerlab.core.reading import read_text
from speakerlab.data.tables import read_table
from speakerlab.inference.speaker_model import Verification
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.trials import Trials, read_trials


def main(words: Sequence[str]) -> None:
    args = parse(words)
    model = model_of(args)
    if args.trials is None:
        sys.stdout.write(result_text(model.verify(*args.files, far=args.far), far=args.far))
        return
    from speakerlab.scoring.chain import build_chain  # scipy: `--help` needs none

    trials = read_pairs(args.trials)
    files = {name: name for name in trials.ids}  # without wav.scp, ids are paths
    if args.wav_scp is not None:
        files = read_table(args.wav_scp)
        trials.check_known(files, where=str(args.trials))
    ids = list(trials.ids)
    emb_ND = model.embed_many([Path(files[name]) for name in ids], progress=True)
    table = EmbeddingTable(ids, emb_ND, model.sha256)
    scores_N = build_chain("cosine", None).score(table, table, trials).scores_N
    for enrol, test, score in zip(trials.enrol_N, trials.test_N, scores_N):
        sys.stdout.write(f"{trials.enrol_ids[enrol]} {trials.test_ids[test]} {score:.6f}\n")


def parse(words: Sequence[str]) -> Namespace:
    options = parser("verify", __doc__)
    options.add("files A B", "two recordings", nargs="*", type=Path)
    options.add_far()
    options.add("--trials FILE", "trial list, with labels or without: print the score of each pair")
    options.add("--wav-scp FILE", "paths of the ids in the trial list (default: ids are paths)")
    options.add_model_options()
    args = options.parse_args(words)
    if len(args.files) != (0 if args.trials else 2):
        raise ValueError(
            f"verify: {len(args.files)} recordings{' and --trials' if args.trials else ''} given; "
            "give either two recordings or --trials FILE"
        )
    if args.trials and args.far is not None:
        raise ValueError(f"--far: {args.far:g} has no effect with --trials; leave it out")
    return args


def result_text(result: Verification, *, far: float | None) -> str:
    if result.llr is None:
        decision = "none (no calibration; run `speakerlab calibrate`)"
        return f"score: {result.score:.6f}\ndecision: {decision}\n"
    at = "EER" if far is None else f"{100 * far:g} % false alarms"
    return (
        f"score: {result.score:.6f}\n"
        f"log-likelihood ratio: {result.llr:+.3f}\n"
        f"threshold: {result.threshold:.6f} (at {at})\n"
        f"decision: {'same speaker' if result.is_same else 'different speakers'}\n"
    )


def read_pairs(path: Path) -> Trials:
    """Read a trial list; the labels of a list of plain pairs are all False and mean nothing."""
    rows = [line.split() for line in read_text(path).splitlines() if line.strip()]
    if not rows or len(rows[0]) != 2:
        return read_trials(path)
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise ValueError(f"{path}:{number}: {' '.join(row)!r} is not a pair 'a b'; correct it")
    names = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(rows)))}
    pair_N2 = np.array([[names[name] for name in row] for row in rows], dtype=np.int32)
    is_target_N = np.zeros(len(rows), dtype=np.bool_)
    return Trials(list(names), list(names), pair_N2[:, 0], pair_N2[:, 1], is_target_N)
