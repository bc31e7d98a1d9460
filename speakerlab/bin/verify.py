"""Compare two recordings, or the recordings of every trial in a list."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speakerlab.bin.command import model_of, parser
from speakerlab.core.reading import read_text
from speakerlab.data.tables import read_table
from speakerlab.inference.speaker_model import Verification
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.trials import Trials, read_trials


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    model = model_of(args)
    if args.trials is None:
        first, second = args.files
        result = model.verify(first, second, far=args.far)
        sys.stdout.write(result_text(result, far=args.far))
        return

    # The import loads scipy, which `--help` does not need.
    from speakerlab.scoring.chain import build_chain

    trials = read_pairs(args.trials)
    # Without a wav.scp, ids are paths.
    files = {name: name for name in trials.ids}
    if args.wav_scp is not None:
        files = read_table(args.wav_scp)
        trials.check_known(files, where=str(args.trials))

    # Each recording is embedded once, even if it is in many trials.
    ids = list(trials.ids)
    paths = [Path(files[name]) for name in ids]
    emb_ND = model.embed_many(paths, progress=True)
    table = EmbeddingTable(ids, emb_ND, model.sha256)
    back_end = build_chain("cosine", None)
    scored = back_end.score(table, table, trials)
    for enrol, test, score in zip(trials.enrol_N, trials.test_N, scored.scores_N):
        pair = f"{trials.enrol_ids[enrol]} {trials.test_ids[test]}"
        sys.stdout.write(f"{pair} {score:.6f}\n")


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("verify", __doc__)
    options.add("files A B", "two recordings", nargs="*", value_type=Path)
    options.add_far()
    options.add(
        "--trials FILE",
        "trial list, with labels or without: print the score of each pair",
    )
    options.add(
        "--wav-scp FILE", "paths of the ids in the trial list (default: ids are paths)"
    )
    options.add_model_options()
    args = options.parse_args(arguments)
    num_files = len(args.files)
    if num_files != (0 if args.trials else 2):
        and_trials = " and --trials" if args.trials else ""
        raise ValueError(
            f"verify: {num_files} recordings{and_trials} given; give either two"
            " recordings or --trials FILE"
        )
    if args.trials and args.far is not None:
        raise ValueError(
            f"--far: {args.far:g} has no effect with --trials; leave it out"
        )
    return args


def result_text(result: Verification, *, far: float | None) -> str:
    """Return the lines about two recordings; only the score without a calibration."""
    if result.llr is None:
        decision = "none (no calibration; run `speakerlab calibrate`)"
        return f"score: {result.score:.6f}\ndecision: {decision}\n"
    operating_point = "EER"
    if far is not None:
        operating_point = f"{100 * far:g} % false alarms"
    return (
        f"score: {result.score:.6f}\n"
        f"log-likelihood ratio: {result.llr:+.3f}\n"
        f"threshold: {result.threshold:.6f} (at {operating_point})\n"
        f"decision: {'same speaker' if result.is_same else 'different speakers'}\n"
    )


def read_pairs(path: Path) -> Trials:
    """Read a trial list, or a list of pairs without labels, whose labels are set to False."""
    rows: list[list[str]] = []
    for line in read_text(path).splitlines():
        fields = line.split()
        if fields:
            rows.append(fields)
    # The first line determines the format, as in `read_trials`.
    if not rows or len(rows[0]) != 2:
        return read_trials(path)
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise ValueError(
                f"{path}:{number}: {' '.join(row)!r} is not a pair 'a b'; correct it"
            )
    # Name -> number, in order of appearance on either side.
    index_of: dict[str, int] = {}
    enrol: list[int] = []
    test: list[int] = []
    for enrol_id, test_id in rows:
        enrol.append(index_of.setdefault(enrol_id, len(index_of)))
        test.append(index_of.setdefault(test_id, len(index_of)))
    return Trials(
        enrol_ids=list(index_of),
        test_ids=list(index_of),
        enrol_N=np.array(enrol, dtype=np.int32),
        test_N=np.array(test, dtype=np.int32),
        is_target_N=np.zeros(len(rows), dtype=np.bool_),
    )
