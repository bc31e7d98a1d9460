"""Compare two recordings, or the recordings of every trial in a list."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from speakerlab.bin.command import (
    check_threshold,
    collect_warnings,
    json_line,
    model_of,
    parser,
)
from speakerlab.bin.embed import as_path
from speakerlab.core.counting import count_of
from speakerlab.core.reading import open_text
from speakerlab.data.convert import read_wave
from speakerlab.data.tables import COLUMNS, read_table
from speakerlab.inference.speaker_model import SpeakerModel, Verification
from speakerlab.inference.speech import warn_of_little_speech
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.scoring.trials import Trials, read_trials


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    model = model_of(args)
    if args.trials is not None:
        verify_trials(args, model)
        return
    first, second = args.files
    with collect_warnings() as warnings:
        result = model.verify(first, second, far=args.far, channels=args.channel)
    result = decide(result, args.threshold)
    if args.json:
        sys.stdout.write(to_json(result, str(first), str(second), warnings))
    else:
        sys.stdout.write(result_text(result, args))


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("verify", __doc__)
    options.add("files A B", "two recordings", nargs="*", value_type=Path)
    point = options.add_mutually_exclusive_group()
    options.add_far(point)
    options.add_threshold(point)
    options.add(
        "--trials FILE",
        "trial list, with labels or without: print the score of each pair, with --far or"
        " --threshold also the decision and the seconds of speech",
    )
    options.add(
        "--wav-scp FILE", "paths of the ids in the trial list (default: ids are paths)"
    )
    options.add_channel(takes_two=True)
    options.add_json("pair")
    options.add_model_options()
    args = options.parse_args(arguments)
    num_files = len(args.files)
    if num_files != (0 if args.trials else 2):
        and_trials = " and --trials" if args.trials else ""
        raise ValueError(
            f"verify: {count_of(num_files, 'recording')}{and_trials} given; give either"
            " two recordings or --trials FILE"
        )
    if args.trials is not None and isinstance(args.channel, tuple):
        first, second = args.channel
        raise ValueError(
            f"--channel: {first},{second} is for two recordings; give one channel with"
            " --trials"
        )
    check_threshold(args.threshold)
    return args


def verify_trials(args: Namespace, model: SpeakerModel) -> None:
    """Print the score of each trial of a list, with the decision if one is asked for."""
    trials = read_pairs(args.trials)
    # Without a wav.scp, ids are paths.
    files = {name: name for name in trials.ids}
    if args.wav_scp is not None:
        files = read_table(args.wav_scp, columns=COLUMNS["wav.scp"])
        trials.check_known(files, where=str(args.trials))
    # Each recording is embedded once, even if it is in many trials.
    ids = list(trials.ids)
    paths = [as_path(files[name]) for name in ids]

    is_plain = not args.json and args.threshold is None and args.far is None
    if is_plain:
        emb_ND = model.embed_many(paths, progress=True, channels=args.channel)
        print_scores(trials, EmbeddingTable(ids, emb_ND, model.sha256))
        return

    seconds_of: dict[Path, float] = {}
    warnings_of: dict[Path, list[str]] = {}

    # The speech is measured where the recording is read, in a thread beside the embedding.
    def read(path: Path) -> np.ndarray:
        with collect_warnings() as warnings_of[path]:
            wave_S = read_wave(
                path,
                sample_rate=model.sample_rate,
                channels=args.channel,
            )
            seconds_of[path] = warn_of_little_speech(
                wave_S,
                sample_rate=model.sample_rate,
                where=str(path),
            )
        return wave_S

    sources = [partial(read, path) for path in paths]
    emb_ND = model.embed_many(sources, progress=True, check_levels=False)
    row_of = {name: row for row, name in enumerate(ids)}
    for enrol, test in zip(trials.enrol_N, trials.test_N):
        names = (trials.enrol_ids[enrol], trials.test_ids[test])
        first, second = (row_of[name] for name in names)
        result = model.compare(emb_ND[first], emb_ND[second], far=args.far)
        pair = (paths[first], paths[second])
        seconds = (seconds_of[pair[0]], seconds_of[pair[1]])
        result = decide(result.with_speech(seconds), args.threshold)
        if args.json:
            warnings = [text for path in pair for text in warnings_of[path]]
            sys.stdout.write(to_json(result, *names, warnings))
        else:
            decision = "none"
            if result.is_same is not None:
                decision = "same" if result.is_same else "different"
            columns = [*names, f"{result.score:.6f}", decision]
            columns += [f"{speech:.2f}" for speech in seconds]
            sys.stdout.write(f"{' '.join(columns)}\n")


def print_scores(trials: Trials, table: EmbeddingTable) -> None:
    """Print the lines of a score file without labels."""
    # The import loads scipy, which `--help` does not need.
    from speakerlab.scoring.chain import build_chain

    back_end = build_chain("cosine", None)
    scored = back_end.score(table, table, trials)
    for enrol, test, score in zip(trials.enrol_N, trials.test_N, scored.scores_N):
        pair = f"{trials.enrol_ids[enrol]} {trials.test_ids[test]}"
        sys.stdout.write(f"{pair} {score:.6f}\n")


def decide(result: Verification, threshold: float | None) -> Verification:
    """Return a comparison decided at a given cosine; None keeps the decision."""
    if threshold is None:
        return result
    is_same = result.score >= threshold if result.has_speech else None
    return replace(result, threshold=threshold, is_same=is_same)


def to_json(
    result: Verification,
    first: str,
    second: str,
    warnings: Sequence[str],
) -> str:
    """Return one line with a comparison of two recordings, given by path or id."""
    seconds = result.speech_seconds or ()
    fields = {
        "a": first,
        "b": second,
        "score": result.score,
        "llr": result.llr,
        "threshold": result.threshold,
        "same": result.is_same,
        "speech_seconds": [round(second, 3) for second in seconds],
        # Once, if both recordings are the same.
        "warnings": list(dict.fromkeys(warnings)),
    }
    return json_line(fields)


def result_text(result: Verification, args: Namespace) -> str:
    """Return the lines about two recordings; no decision without a threshold."""
    lines = [f"score: {result.score:.6f}"]
    if result.llr is not None:
        lines.append(f"log-likelihood ratio: {result.llr:+.3f}")
    if result.threshold is not None:
        operating_point = "at EER"
        if args.far is not None:
            operating_point = f"at {100 * args.far:g} % false alarms"
        elif args.threshold is not None:
            operating_point = "of --threshold"
        lines.append(f"threshold: {result.threshold:.6f} ({operating_point})")
    if result.speech_seconds is not None:
        first, second = result.speech_seconds
        lines.append(f"speech: {first:.2f} s and {second:.2f} s")
    if not result.has_speech:
        decision = "none (a recording has no speech)"
    elif result.is_same is None:
        decision = "none (no calibration; run `speakerlab calibrate`)"
    else:
        decision = "same speaker" if result.is_same else "different speakers"
    lines.append(f"decision: {decision}")
    return "\n".join(lines) + "\n"


def read_pairs(path: Path) -> Trials:
    """Read a trial list, or a list of pairs without labels, whose labels are set to False."""
    rows: list[list[str]] = []
    with open_text(path) as lines:
        for line in lines:
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
