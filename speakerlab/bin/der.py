"""Score diarization: DER, JER and number of speakers of RTTM files or folders of them."""

import logging
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakerlab.bin.command import json_line, parser
from speakerlab.core import done
from speakerlab.core.atomic import check_writable, write_json
from speakerlab.core.reading import read_json
from speakerlab.data.tables import read_recordings, read_table
from speakerlab.diarization.regions import (
    Region,
    Turn,
    list_rttm,
    merge_turns,
    read_rttm,
    read_uem,
)
from speakerlab.diarization.scoring import extent, score_recordings
from speakerlab.experiments.diarization import format_diarization, results_of

log = logging.getLogger(__name__)
REFERENCE = "reference"  # value of --uem: score the extent of REF, as md-eval does
JER_PROTOCOL = "no collar, overlap scored, frames of 10 ms"
PRINTED = Path("-")  # value of --json without a file: a line for each pair
MAX_NAMED = 5  # recordings named in a warning
# The hypothesis by the reference, in all recordings. Times in milliseconds are 1000 times as long.
# With ends instead of durations, the last turn ends at almost twice its time.
MAX_SPEECH_RATIO = 3.0
MAX_END_RATIO = 1.5


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    # Check before the work: an error at the end would lose the results.
    for path in (args.json, args.report):
        if path and path != PRINTED:
            check_writable(path)
    if args.data:
        read_recordings(args.data / "wav.scp")
    files = [args.ref, args.hyp, *args.more]
    pairs: list[Namespace] = []
    for ref, hyp in zip(files[::2], files[1::2]):
        pair = Namespace(**{**vars(args), "ref": ref, "hyp": hyp})
        # One line with a fix, instead of an error that only reports a missing file.
        require_turns(pair)
        pairs.append(pair)
    for pair in pairs:
        if len(pairs) > 1 and args.json != PRINTED:
            sys.stdout.write(f"{pair.ref} {pair.hyp}\n")
        score_pair(pair)
        # So that the results of many pairs appear one by one.
        sys.stdout.flush()


def score_pair(args: Namespace) -> None:
    """Score a hypothesis; print the results, and write what the options ask for."""
    to_file = args.json if args.json != PRINTED else None
    inputs = inputs_of(args)
    reference = read_rttm(args.ref)
    hypothesis = read_rttm(args.hyp)
    # Warn before results are reused, so that each run warns.
    warn_of_turns(args, reference, hypothesis)
    may_reuse = not args.force
    if to_file and may_reuse and is_scored(to_file, inputs):
        return

    regions, scope = regions_to_score(args.uem, reference)
    errors_of = score_recordings(
        reference,
        hypothesis,
        regions=regions,
        collar=args.collar,
        skip_overlap=args.skip_overlap,
    )
    has_speech = any(errors.scored for errors in errors_of.values())
    if not has_speech:
        raise ValueError(
            f"{args.ref}: has no speech to score; check REF, --uem and --collar"
        )
    protocol = {
        "collar": args.collar,
        "overlap": not args.skip_overlap,
        "regions": scope,
        "jer": JER_PROTOCOL,
    }
    results = results_of(errors_of, protocol)
    if args.json == PRINTED:
        fields = {"ref": str(args.ref), "hyp": str(args.hyp), **results}
        sys.stdout.write(json_line(fields))
    else:
        sys.stdout.write(format_diarization(results) + "\n")

    if to_file:
        # The record describes the old results, so remove it before they change.
        done.forget(record_of(to_file))
        write_json(to_file, results)
        log.info("%s: wrote the results", to_file)
    if args.report:
        write_page(args, results, reference, hypothesis, regions=regions)
    # Write the record last: if it exists, all files are complete.
    if to_file:
        outputs: list[str] = []
        if args.report:
            outputs.append(str(args.report.absolute()))
        inputs["results"] = done.file_digest(to_file)
        done.record(record_of(to_file), inputs, outputs=outputs)


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("der", __doc__, builds_components=False)
    options.add("ref REF", "RTTM of the true turns: a file, or a folder of .rttm files")
    options.add("hyp HYP", "RTTM of the turns to score")
    options.add(
        "more MORE",
        "more pairs REF HYP, each with its own results",
        nargs="*",
        value_type=Path,
    )
    uem = (
        "UEM file of the regions to score (default: each recording from the first to"
        f" the last turn of REF and HYP); {REFERENCE}: the same of REF alone, as"
        " md-eval does"
    )
    # A string, because the word `reference` is not a path.
    options.add("--uem FILE", uem, value_type=str)
    collar = "seconds not scored before and after each bound of a true turn"
    options.add("--collar SECONDS", collar, least=0.0, default=0.0)
    options.add("--skip-overlap", "leave out where two or more true speakers speak")
    options.add_argument(
        "--json",
        metavar="FILE",
        type=_results_file,
        nargs="?",
        const=PRINTED,
        help="file to write the results to; without FILE, print a JSON object per pair,"
        " each on a line",
    )
    options.add("--force", "score again what --json has of the same inputs")
    options.add("--report FILE", "page to write the results to, as HTML")
    options.add(
        "--data DIR",
        "data directory whose wav.scp lets the report play its worst minutes",
    )
    args = options.parse_args(arguments)
    if args.data and not args.report:
        options.error("--data: needs --report")
    if len(args.more) % 2:
        raise ValueError(
            f"{args.more[-1]}: has no hypothesis; give pairs REF HYP, and --json without"
            " a file after them"
        )
    is_one_file = args.report or args.json not in (None, PRINTED)
    if args.more and is_one_file:
        raise ValueError(
            "der: --report and --json FILE are of a single pair; print all with --json"
        )
    return args


def _results_file(text: str) -> Path:
    """Read FILE of --json.

    It may be REF or HYP instead, behind a --json that was meant to print: results would replace it.
    """
    path = Path(text)
    is_turns = path.suffix.lower() == ".rttm"
    if path.is_file():
        with path.open("rb") as file:
            first_bytes = file.read(100).lstrip()
        # Results of an earlier call are an object; an empty file has nothing to lose.
        is_results = first_bytes.startswith(b"{")
        is_turns = is_turns or (first_bytes != b"" and not is_results)
    if is_turns or path.is_dir():
        raise ArgumentTypeError(
            f"{text} is no file of results, and is not replaced; to print them, write"
            " --json after REF and HYP"
        )
    return path


def warn_of_turns(
    args: Namespace,
    reference: Mapping[str, list[Turn]],
    hypothesis: Mapping[str, list[Turn]],
) -> None:
    """Warn about overlapping turns of a speaker, and about recordings without a diarization."""
    for path, turns in ((args.ref, reference), (args.hyp, hypothesis)):
        # Scoring merges them; here they are only counted.
        num_merged = 0
        for recording_turns in turns.values():
            _, num_merged_here = merge_turns(recording_turns)
            num_merged += num_merged_here
        if num_merged:
            log.warning(
                "%s: overlapping turns of one speaker merged: %d", path, num_merged
            )
    # A UEM file may leave out any part of the hypothesis.
    if args.uem is None:
        warn_of_units(args, reference, hypothesis)
    missing = sorted(reference.keys() - hypothesis.keys())
    if missing:
        names = ", ".join(missing[:MAX_NAMED])
        if len(missing) > MAX_NAMED:
            names += ", ..."
        log.warning(
            "%s: recordings lacking, all missed: %d (%s)", args.hyp, len(missing), names
        )


def warn_of_units(
    args: Namespace,
    reference: Mapping[str, list[Turn]],
    hypothesis: Mapping[str, list[Turn]],
) -> None:
    """Warn if turns of the hypothesis are so long or late that other columns may have been read."""
    speech = {args.ref: 0.0, args.hyp: 0.0}
    ends = {args.ref: 0.0, args.hyp: 0.0}
    for name in reference.keys() & hypothesis.keys():
        for path, turns in ((args.ref, reference[name]), (args.hyp, hypothesis[name])):
            speech[path] += sum(turn.end - turn.start for turn in turns)
            ends[path] += max((turn.end for turn in turns), default=0.0)
    for quantity, seconds, max_ratio in (
        ("speech", speech, MAX_SPEECH_RATIO),
        ("time up to the last turns", ends, MAX_END_RATIO),
    ):
        if seconds[args.hyp] > max_ratio * seconds[args.ref] > 0:
            log.warning(
                "%s: has %.6g s of %s, REF has %.6g s; the columns must be start and"
                " duration, in seconds",
                args.hyp,
                seconds[args.hyp],
                quantity,
                seconds[args.ref],
            )
            return


def require_turns(args: Namespace) -> None:
    """Raise FileNotFoundError, one line, if REF or HYP does not exist."""
    if not args.ref.exists():
        raise FileNotFoundError(
            f"{args.ref}: does not exist; give the RTTM of the true turns, which the"
            " prepare.py of a recipe of diarization writes for a public corpus"
        )
    if not args.hyp.exists():
        command = f"speakerlab diarize RECORDINGS --model MODEL --out {args.hyp}"
        raise FileNotFoundError(f"{args.hyp}: does not exist; run `{command}`")


def record_of(path: Path) -> Path:
    """Return the path of the record with the inputs of a results file."""
    return path.with_name(f".{path.name}.done")


def inputs_of(args: Namespace) -> dict[str, Any]:
    """Return the inputs of the results and the report, for their record."""
    audio = None
    if args.data:
        audio = done.file_digest(args.data / "wav.scp")
    regions = args.uem
    if args.uem not in (None, REFERENCE):
        uem_digest = done.file_digest(Path(args.uem))
        regions = [args.uem, uem_digest]
    report = None
    if args.report:
        report = args.report.absolute()
    return {
        "reference": turns_digest(args.ref),
        "hypothesis": turns_digest(args.hyp),
        "regions": regions,
        "collar": args.collar,
        "skip_overlap": args.skip_overlap,
        "report": report,
        "audio": audio,
        "code": done.code_digest(),
    }


def turns_digest(path: Path) -> str:
    """Return the digest of paths and bytes of an RTTM file, or of a folder of RTTM files."""
    digests: list[tuple[str, str]] = []
    for file in list_rttm(path):
        digests.append((file.name, done.file_digest(file)))
    return done.digest([str(path), digests])


def is_scored(path: Path, inputs: Mapping[str, Any]) -> bool:
    """Return whether a file has the results of these inputs; if so, print them."""
    if not path.is_file():
        return False
    # The digest of the results is part of the record: another command may have replaced them.
    with_results = {**inputs, "results": done.file_digest(path)}
    if not done.is_done(record_of(path), with_results):
        return False
    results = read_json(path)
    sys.stdout.write(format_diarization(results) + "\n")
    log.info("%s: already scored with these inputs, kept (--force scores again)", path)
    return True


def write_page(
    args: Namespace,
    results: dict[str, Any],
    reference: Mapping[str, list[Turn]],
    hypothesis: Mapping[str, list[Turn]],
    *,
    regions: Mapping[str, list[Region]] | None,
) -> None:
    """Write the page of --report: the results, and the minutes with the most errors."""
    from speakerlab.experiments.report import write_diarization_page
    from speakerlab.experiments.timeline import worst_minutes

    audio = None
    if args.data:
        audio = read_table(args.data / "wav.scp")
    minutes = worst_minutes(
        reference,
        hypothesis,
        audio=audio,
        regions=regions,
        collar=args.collar,
        skip_overlap=args.skip_overlap,
    )
    files = {"REF": args.ref, "HYP": args.hyp}
    write_diarization_page(
        args.report,
        title=f"Diarization: {args.hyp.name}",
        results=results,
        minutes=minutes,
        facts={"Files": files, "Protocol": results["protocol"]},
    )
    log.info("%s: wrote the report", args.report)


def regions_to_score(
    uem: str | None,
    reference: Mapping[str, Sequence[Turn]],
) -> tuple[dict[str, list[Region]] | None, str]:
    """Return the regions to score from --uem, and their name in the protocol of the results.

    The regions are None for the extent of reference and hypothesis.
    """
    scope = "first to last turn of REF"
    if uem is None:
        return None, f"{scope} and HYP"
    if uem == REFERENCE:
        extents = {name: extent(turns) for name, turns in reference.items()}
        return extents, scope
    return read_uem(Path(uem)), uem
