"""Compare two recordings, or those of every trial of a list: score, likelihood ratio, decision."""

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from speakerlab.bin.command import parser
from speakerlab.bin.model_options import add_model_options, open_model
from speakerlab.data.tables import read_table
from speakerlab.inference.speaker_model import SpeakerModel, Verification
from speakerlab.scoring.backend import cosine_scores
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.trials import Trials, read_trials


def main(words: Sequence[str]) -> None:
    """`speakerlab verify A B --model MODEL [--far RATE]`, or `--trials FILE` in place of A B"""
    options = parser("verify", __doc__)
    options.add_argument("files", type=Path, nargs="*", metavar="A B", help="two recordings")
    options.add_argument(
        "--far",
        type=float,
        metavar="RATE",
        help="decide at this share of false alarms instead of at the EER",
    )
    options.add_argument(
        "--trials", type=Path, metavar="FILE", help="pairs, with labels or without"
    )
    options.add_argument("--wav-scp", type=Path, metavar="FILE", help="what the names in it are")
    add_model_options(options)
    args = options.parse_args(words)
    if len(args.files) != (0 if args.trials else 2):
        beside = " and --trials" if args.trials else ""
        raise ValueError(
            f"verify: needs either two recordings or --trials, got {len(args.files)} files"
            f"{beside}; see --help"
        )
    if args.trials and args.far is not None:
        raise ValueError(
            f"--far: decides about two recordings, got {args.far:g} with --trials, which gives "
            "scores; leave it out"
        )
    model = open_model(args)
    if args.trials is None:
        sys.stdout.write(describe(model.verify(*args.files, far=args.far), far=args.far))
        return
    trials = read_pairs(args.trials)
    scores_N = score(model, trials, paths_of(trials, args.trials, args.wav_scp))
    for enrol, test, value in zip(trials.enrol_N, trials.test_N, scores_N):
        sys.stdout.write(f"{trials.enrol_ids[enrol]} {trials.test_ids[test]} {value:.6f}\n")


def describe(result: Verification, *, far: float | None) -> str:
    """What a comparison gave, a line each."""
    if result.llr is None:
        return f"score      {result.score:.6f}\ndecision   none: the model has no calibration\n"
    at = "the EER" if far is None else f"{100 * far:g} % false alarms"
    decision = "the same speaker" if result.is_same else "two speakers"
    return (
        f"score      {result.score:.6f}\n"
        f"llr        {result.llr:+.3f}\n"
        f"threshold  {result.threshold:.6f} (at {at})\n"
        f"decision   {decision}\n"
    )


def read_pairs(path: Path) -> Trials:
    """Trials; of pairs without labels, what is said to be true of them means nothing."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such trial list; correct --trials")
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows or len(rows[0]) != 2:
        return read_trials(path)
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise ValueError(f"{path}:{number}: is no pair, got {' '.join(row)!r}; write 'a b'")
    names = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(rows)))}
    pair_N2 = np.array([[names[name] for name in row] for row in rows], dtype=np.int32)
    is_target_N = np.zeros(len(rows), dtype=np.bool_)
    return Trials(list(names), list(names), pair_N2[:, 0], pair_N2[:, 1], is_target_N)


def paths_of(trials: Trials, where: Path, wav_scp: Path | None) -> dict[str, Path]:
    """id -> recording: the id itself is its path where there is no wav.scp."""
    if wav_scp is None:
        return {name: Path(name) for name in trials.ids}
    table = read_table(wav_scp)
    trials.check_known(table, where=str(where))
    return {name: Path(table[name]) for name in trials.ids}


def score(model: SpeakerModel, trials: Trials, paths: dict[str, Path]) -> np.ndarray:
    """score_N, the cosine that stage 6 gives."""
    emb_ND = model.embed_many(list(paths.values()), progress=True)
    table = EmbeddingTable(list(paths), emb_ND, model.sha256)
    return cosine_scores(table, table, trials)
