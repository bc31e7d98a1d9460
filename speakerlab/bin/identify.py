"""Identify the enrolled speaker of recordings, or report that it is none of them."""

import logging
import sys
from collections.abc import Sequence
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
from speakerlab.bin.embed import find_recordings
from speakerlab.core import process
from speakerlab.data.tables import one_line
from speakerlab.inference.decisions import Identification

log = logging.getLogger(__name__)
UNCALIBRATED = "no calibration; run `speakerlab calibrate`, or give --threshold"
OF_OTHER_MODEL = "the speakers were enrolled by another model; give --threshold"


def main(arguments: Sequence[str]) -> None:
    options = parser("identify", __doc__)
    options.add("files FILE", "recordings, or folders of them", nargs="+")
    options.add_speakers()
    point = options.add_mutually_exclusive_group()
    options.add_far(point)
    options.add_threshold(point)
    options.add("--top N", "print the N best speakers", least=0, default=5)
    options.add_channel()
    options.add_json("recording")
    options.add_model_options()
    args = options.parse_args(arguments)
    check_threshold(args.threshold)
    files = find_recordings(args.files, where="identify")
    model = model_of(args)
    model.load_speakers(args.speakers)
    # An error of the speakers or of the rate is the same for all recordings.
    any_embedding_D = np.ones(model.embed_dim, dtype=np.float32)
    model.rank(any_embedding_D, far=args.far)
    no_threshold = UNCALIBRATED
    if model.enrolled_by != model.sha256:
        no_threshold = OF_OTHER_MODEL

    num_failed = 0
    for file in files:
        try:
            with collect_warnings() as warnings:
                result = model.identify(
                    file,
                    far=args.far,
                    threshold=args.threshold,
                    channels=args.channel,
                )
        except (ValueError, OSError) as error:
            num_failed += 1
            text = one_line(plain_text(error))
            sys.stderr.write(f"{text}\n")
            # A line for each recording, so that a script need not count.
            if args.json:
                sys.stdout.write(json_line({"file": str(file), "error": text}))
            continue
        if args.json:
            sys.stdout.write(to_json(result, file, top=args.top, warnings=warnings))
        elif len(files) > 1:
            line = to_line(result, no_threshold)
            sys.stdout.write(f"{one_line(file)}: {line}\n")
        else:
            sys.stdout.write(to_lines(result, no_threshold, top=args.top))
        # So that the results of a long list appear one by one.
        sys.stdout.flush()
    if num_failed:
        total = len(files)
        if total > 1:
            log.error("%d of %d recordings could not be identified", num_failed, total)
        process.leave(process.EXIT_INPUT)


def to_lines(result: Identification, no_threshold: str, *, top: int) -> str:
    """Return the best speakers and the decision of the only recording.

    no_threshold: why there is none, and what to do.
    """
    lines: list[str] = []
    for name, score in result.ranking[:top]:
        lines.append(f"{score:.6f}  {name}")
    lines.append(f"speech: {result.speech_seconds:.2f} s")
    # Without a calibration there is no threshold for a decision.
    if not result.has_speech:
        decision = "none (the recording has no speech)"
    elif result.is_known is None:
        decision = f"none ({no_threshold})"
    else:
        speaker = result.name or "unknown speaker"
        decision = f"{speaker} (threshold {result.threshold:.6f})"
    lines.append(f"decision: {decision}")
    return "\n".join(lines) + "\n"


def to_line(result: Identification, no_threshold: str) -> str:
    """Return the decision, with what it is made from, in one line."""
    best, score = result.ranking[0]
    facts = f"score {score:.6f}"
    if result.threshold is not None:
        facts += f", threshold {result.threshold:.6f}"
    facts += f", {result.speech_seconds:.2f} s of speech"
    if not result.has_speech:
        return f"no decision without speech (best: {best}, {facts})"
    if result.is_known is None:
        return f"no decision ({no_threshold}; best: {best}, {facts})"
    if result.name is None:
        return f"unknown speaker (best: {best}, {facts})"
    return f"{best} ({facts})"


def to_json(
    result: Identification,
    file: Path,
    *,
    top: int,
    warnings: Sequence[str],
) -> str:
    """Return one line with the decision about a recording."""
    _, score = result.ranking[0]
    fields = {
        "file": str(file),
        "name": result.name,
        "known": result.is_known,
        "score": score,
        "threshold": result.threshold,
        "speech_seconds": round(result.speech_seconds or 0.0, 3),
        "ranking": dict(result.ranking[:top]),
        "warnings": list(warnings),
    }
    return json_line(fields)
