"""Compare two recordings, or the recordings of every trial in a list."""

import logging
import sys
from argparse import Namespace
from collections.abc import Container, Iterable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path

import numpy as np

from speakerlab.bin.command import (
    check_threshold,
    collect_warnings,
    json_line,
    model_of,
    parser,
    plain_text,
)
from speakerlab.bin.embed import as_path
from speakerlab.core import process
from speakerlab.core.counting import count_of
from speakerlab.core.faults import Faults
from speakerlab.core.trial_lines import read_pair_lines
from speakerlab.data.convert import read_wave
from speakerlab.data.tables import one_line, read_recordings
from speakerlab.inference.decisions import Verification
from speakerlab.inference.recording_embedder import Result
from speakerlab.inference.speaker_model import SpeakerModel
from speakerlab.inference.speech import warn_of_little_speech
from speakerlab.scoring.pair_scores import dot_scores, unit_rows
from speakerlab.scoring.trials import Trials

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    model = model_of(args)
    if args.trials is not None:
        verify_trials(args, model)
        return
    first, second = args.files
    check_far(args, model)
    try:
        with collect_warnings() as warnings:
            result = model.verify(
                first,
                second,
                far=args.far,
                threshold=args.threshold,
                channels=args.channel,
            )
    except (ValueError, OSError) as error:
        # The line of `identify --json` about a recording that cannot be read.
        if args.json:
            text = one_line(plain_text(error))
            sys.stdout.write(error_line(str(first), str(second), text))
        raise
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
    """Print the score of each trial of a list, with the decision if one is asked for.

    If recordings cannot be read, the exit code is 1.
    """
    check_far(args, model)
    trials = read_pairs(args.trials)
    # Without a wav.scp, ids are paths.
    files = {name: name for name in trials.ids}
    if args.wav_scp is not None:
        files = read_recordings(args.wav_scp)
        trials.check_known(files, where=str(args.trials))
    # Each recording is embedded once, even if it is in many trials.
    path_of = {name: as_path(files[name]) for name in trials.ids}
    if not args.json and args.threshold is None and args.far is None:
        error_of = score_trials(args, model, trials, path_of)
    else:
        error_of = decide_trials(args, model, trials, path_of)
    leave_if_any(error_of, args, len(path_of))


def score_trials(
    args: Namespace, model: SpeakerModel, trials: Trials, path_of: Mapping[str, Path]
) -> dict[str, str]:
    """Print the scores without decisions; return id -> error of what cannot be read.

    Trials of such recordings are left out.
    """
    paths = list(path_of.values())
    results = model.embed_each(paths, progress=True, channels=args.channel)
    emb_of, error_of = sort_results(results, list(path_of))
    print_scores(keep_trials(trials, emb_of), emb_of)
    return error_of


def decide_trials(
    args: Namespace, model: SpeakerModel, trials: Trials, path_of: Mapping[str, Path]
) -> dict[str, str]:
    """Print the scores, decisions and speech of trials; return id -> error of what is unreadable.

    Trials of such recordings are left out; with --json, they have a line with the error.
    """
    seconds_of: dict[Path, float] = {}
    warnings_of: dict[Path, list[str]] = {}

    # The speech is measured where the recording is read, in a thread beside the embedding.
    def read(path: Path) -> np.ndarray:
        with collect_warnings() as warnings:
            # The list is filled in this block, and kept if an error ends it.
            warnings_of[path] = warnings
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

    sources = [partial(read, path) for path in path_of.values()]
    results = model.embed_each(sources, progress=True, check_levels=False)
    emb_of, error_of = sort_results(results, list(path_of))
    for enrol, test in zip(trials.enrol_N, trials.test_N):
        names = (trials.enrol_ids[enrol], trials.test_ids[test])
        errors = [error_of[name] for name in names if name in error_of]
        if errors:
            if args.json:
                # Once, if both recordings are the same.
                text = "; ".join(dict.fromkeys(errors))
                sys.stdout.write(error_line(*names, text))
            continue
        result = model.compare(
            emb_of[names[0]],
            emb_of[names[1]],
            far=args.far,
            threshold=args.threshold,
        )
        first, second = (path_of[name] for name in names)
        seconds = (seconds_of[first], seconds_of[second])
        result = result.with_speech(seconds)
        if args.json:
            warnings = [*warnings_of[first], *warnings_of[second]]
            sys.stdout.write(to_json(result, *names, warnings))
        else:
            decision = "none"
            if result.is_same is not None:
                decision = "same" if result.is_same else "different"
            columns = [columns_of(*names), f"{result.score:.6f}", decision]
            columns += [f"{speech:.2f}" for speech in seconds]
            sys.stdout.write(f"{' '.join(columns)}\n")
    return error_of


def check_far(args: Namespace, model: SpeakerModel) -> None:
    """Raise ValueError if the model cannot decide at the rate of --far, for any recordings."""
    any_embedding_D = np.ones(model.embed_dim, dtype=np.float32)
    model.compare(any_embedding_D, any_embedding_D, far=args.far)


def sort_results(
    results: Iterable[Result], ids: Sequence[str]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return id -> embedding, and id -> error, in the order of the ids; print the errors."""
    result_of = dict(results)
    emb_of: dict[str, np.ndarray] = {}
    error_of: dict[str, str] = {}
    for row, name in enumerate(ids):
        result = result_of[row]
        if isinstance(result, Exception):
            error_of[name] = one_line(plain_text(result))
            sys.stderr.write(f"{error_of[name]}\n")
        else:
            emb_of[name] = result
    return emb_of, error_of


def keep_trials(trials: Trials, ids: Container[str]) -> Trials:
    """Return the trials with both sides in `ids`."""
    in_enrol_N, in_test_N = trials.look_up(lambda name: name in ids)
    is_kept_N = in_enrol_N & in_test_N
    # Number the remaining ids from 0.
    enrol, enrol_N = np.unique(trials.enrol_N[is_kept_N], return_inverse=True)
    test, test_N = np.unique(trials.test_N[is_kept_N], return_inverse=True)
    return Trials(
        enrol_ids=[trials.enrol_ids[index] for index in enrol],
        test_ids=[trials.test_ids[index] for index in test],
        enrol_N=enrol_N.astype(np.int32),
        test_N=test_N.astype(np.int32),
        is_target_N=trials.is_target_N[is_kept_N],
    )


def leave_if_any(error_of: Sized, args: Namespace, total: int) -> None:
    """Exit with code 1 if recordings could not be used."""
    num_failed = len(error_of)
    if not num_failed:
        return
    fix = ""
    if num_failed == total and args.wav_scp is None:
        fix = "; if the list has ids instead of paths, give --wav-scp FILE"
    log.error("%d of %d recordings could not be used%s", num_failed, total, fix)
    process.leave(process.EXIT_INPUT)


def print_scores(trials: Trials, emb_of: Mapping[str, np.ndarray]) -> None:
    """Print the lines of a score file without labels."""
    if not len(trials):
        return
    enrol_ED = np.stack([emb_of[name] for name in trials.enrol_ids])
    test_TD = np.stack([emb_of[name] for name in trials.test_ids])
    scores_N = dot_scores(
        unit_rows(enrol_ED, trials.enrol_ids),
        unit_rows(test_TD, trials.test_ids),
        trials,
    )
    for enrol, test, score in zip(trials.enrol_N, trials.test_N, scores_N):
        pair = columns_of(trials.enrol_ids[enrol], trials.test_ids[test])
        sys.stdout.write(f"{pair} {score:.6f}\n")


def columns_of(*names: str) -> str:
    """Return names as columns between blanks; a name with blanks is in double quotes."""
    columns: list[str] = []
    for name in names:
        is_word = name.split() == [name]
        columns.append(name if is_word else f'"{name}"')
    return " ".join(columns)


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


def error_line(first: str, second: str, text: str) -> str:
    """Return the line of --json about a pair with a recording that cannot be read."""
    return json_line({"a": first, "b": second, "error": text})


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
        decision = (
            "none (no calibration; run `speakerlab calibrate`, or give --threshold)"
        )
    else:
        decision = "same speaker" if result.is_same else "different speakers"
    lines.append(f"decision: {decision}")
    return "\n".join(lines) + "\n"


def read_pairs(path: Path) -> Trials:
    """Read the pairs of a list, with labels or without; all labels are set to False."""
    faults = Faults()
    # Name -> number, in order of appearance on either side.
    index_of: dict[str, int] = {}
    enrol: list[int] = []
    test: list[int] = []
    for _, enrol_id, test_id in read_pair_lines(path, faults):
        enrol.append(index_of.setdefault(enrol_id, len(index_of)))
        test.append(index_of.setdefault(test_id, len(index_of)))
    faults.raise_if_any(f"{path}: refused, no pair was compared")
    if not enrol:
        raise ValueError(f"{path}: has no pairs; correct the list")
    return Trials(
        enrol_ids=list(index_of),
        test_ids=list(index_of),
        enrol_N=np.array(enrol, dtype=np.int32),
        test_N=np.array(test, dtype=np.int32),
        is_target_N=np.zeros(len(enrol), dtype=np.bool_),
    )
