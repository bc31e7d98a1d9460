"""Score diarization: DER, JER and number of speakers of RTTM files or folders of them."""

import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakerlab.bin.command import parser
from speakerlab.core.atomic import check_writable, write_json
from speakerlab.data.tables import read_table
from speakerlab.diarization.regions import Turn, merge_turns, read_rttm, read_uem
from speakerlab.diarization.scoring import extent, score_recordings
from speakerlab.experiments.diarization import format_diarization, results_of

log = logging.getLogger(__name__)
REFERENCE = "reference"  # --uem: score the extent of the reference, as md-eval does
JER_PROTOCOL = "no collar, overlap scored, frames of 10 ms"
MAX_NAMED = 5  # recordings in a warning


def main(words: Sequence[str]) -> None:
    options = parser("der", __doc__)
    options.add("ref REF", "RTTM of the true turns: a file, or a folder of .rttm files")
    options.add("hyp HYP", "RTTM of the turns to score")
    uem = (
        "UEM file of the regions to score (default: each recording from the first to the last turn "
        f"of REF and HYP); {REFERENCE}: the same of REF alone, as md-eval does"
    )
    options.add("--uem FILE", uem, type=str)
    collar = "seconds not scored before and after each bound of a true turn"
    options.add("--collar SECONDS", collar, least=0.0, default=0.0)
    options.add("--skip-overlap", "leave out where two or more true speakers speak")
    options.add("--json FILE", "file to write the results to")
    options.add("--report FILE", "page to write the results to, as HTML")
    options.add("--data DIR", "data directory whose wav.scp lets the report play its worst minutes")
    args = options.parse_args(words)
    for path in filter(None, (args.json, args.report)):
        check_writable(path)
    if args.data and not args.report:
        options.error("--data: needs --report")
    reference, hypothesis = read_rttm(args.ref), read_rttm(args.hyp)
    for path, turns in ((args.ref, reference), (args.hyp, hypothesis)):
        if num_merged := sum(merge_turns(own)[1] for own in turns.values()):
            log.warning("%s: overlapping turns of one speaker merged: %d", path, num_merged)
    regions, scope = _scored(args.uem, reference)
    how = {"regions": regions, "collar": args.collar, "skip_overlap": args.skip_overlap}
    found = score_recordings(reference, hypothesis, **how)
    if not any(errors.scored for errors in found.values()):
        raise ValueError(f"{args.ref}: has no speech to score; check REF, --uem and --collar")
    if missing := sorted(reference.keys() - hypothesis.keys()):
        names = ", ".join(missing[:MAX_NAMED]) + (", ..." if len(missing) > MAX_NAMED else "")
        log.warning("%s: recordings lacking, all missed: %d (%s)", args.hyp, len(missing), names)
    protocol = {"collar": args.collar, "overlap": not args.skip_overlap, "regions": scope}
    results = results_of(found, protocol | {"jer": JER_PROTOCOL})
    sys.stdout.write(format_diarization(results) + "\n")
    if args.json:
        write_json(args.json, results)
        log.info("%s: wrote the results", args.json)
    if args.report:
        _write_page(args, results, reference, hypothesis, **how)


def _write_page(
    args: Namespace, results: dict[str, Any], *turns: Mapping[str, list[Turn]], **how: Any
) -> None:
    from speakerlab.experiments.report import write_diarization_page
    from speakerlab.experiments.timeline import worst_minutes

    audio = read_table(args.data / "wav.scp") if args.data else None
    write_diarization_page(
        args.report,
        title=f"Diarization: {args.hyp.name}",
        results=results,
        minutes=worst_minutes(*turns, audio=audio, **how),
        facts={"Files": {"REF": args.ref, "HYP": args.hyp}, "Protocol": results["protocol"]},
    )
    log.info("%s: wrote the report", args.report)


def _scored(uem: str | None, reference: Mapping[str, Sequence[Turn]]) -> tuple[Any, str]:
    """Return the regions to score, and what they are."""
    scope = "first to last turn of REF"
    if uem is None:
        return None, f"{scope} and HYP"
    if uem == REFERENCE:
        return {name: extent(turns) for name, turns in reference.items()}, scope
    return read_uem(Path(uem)), uem
