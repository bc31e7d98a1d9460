"""Run all benchmark cases, one after the other, and compare with the peers.

    make bench PEERS="3dspeaker=DIR wespeaker=DIR speechbrain=DIR" [ARGS="--quick ..."]
    python benchmarks/suite.py --peers 3dspeaker=DIR --only models data --json FILE

In: checkouts of the peers; without them, or where one has no such case, rows of ours alone. Out: a
table of all rows and, with --json, {"facts": ..., "rows": ...}. RESULTS.md has the tables of past
runs and results.json their rows, by machine.

Each case is a script that runs alone, too (sides.py). A case that fails does not stop the others;
the exit status is then 1. --quick takes some 20 minutes: fewer rows and seconds, of the same sizes.
learning.py, which takes hours and a corpus, only runs alone.

The only setting for speed that the suite makes is GOMP_SPINCOUNT=2000, for both sides, if it is not
set. Others in the environment (an allocator, huge pages) apply to both sides and are among the
facts.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from sides import FINISHED, HERE, ROOT, TOOLKITS, find_peers, run_to_end, say

sys.path.insert(0, str(ROOT))
from facts import facts_of
from rows import table

from speakerlab.core.atomic import write_json

CASES = (
    "data",
    "frontend",
    "models",
    "self_supervised",
    "end_to_end",
    "extract",
    "diarization",
    "scoring",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print their table; return 1 if a case failed."""
    options = parse(arguments)
    facts = facts_of(options)
    rows: list[dict[str, Any]] = []
    failed_cases = []
    for case in CASES:
        if case not in options.only:
            continue
        case_options = case_arguments(case, options)
        say(f"\n{case}: {' '.join(case_options)}")
        case_rows, ending = call_case(case, case_options, threads=options.threads)
        rows += case_rows
        if ending != FINISHED or not case_rows:
            say(f"suite: {case}: {ending}, with {len(case_rows)} rows; see above")
            failed_cases.append(case)
        # After each case, so that an interrupted run keeps its rows.
        if options.json is not None:
            write_json(options.json, {"facts": facts, "rows": rows})

    say(f"\n{facts['date']}, commit {facts['commit']}, {facts['machine']}\n")
    say(table(rows))
    if failed_cases:
        say(f"suite: {', '.join(failed_cases)} failed; see above")
    return 1 if failed_cases else 0


def call_case(
    case: str,
    arguments: Sequence[str],
    *,
    threads: int | None = None,
    seconds: float | None = None,
    log: IO[bytes] | None = None,
) -> tuple[list[dict[str, Any]], str]:
    """Run the script of a case; return its rows, also if it failed, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, HERE / f"{case}.py", f"--json={path}", *arguments]
        ending = run_to_end(command, threads=threads, seconds=seconds, log=log)
        rows = []
        if path.exists():
            rows = json.loads(path.read_text(encoding="utf-8"))
    return rows, ending


def case_arguments(case: str, options: argparse.Namespace) -> list[str]:
    """Return the options of a case's script."""
    module = importlib.import_module(case)
    arguments = list(module.QUICK) if options.quick else []
    arguments.append(f"--device={options.device}")
    if options.threads:
        arguments.append(f"--threads={options.threads}")
    toolkits = [name for name in module.PEERS if name in options.checkouts]
    if toolkits:
        arguments.append("--peer")
        arguments += [str(options.checkouts[name]) for name in toolkits]
    return arguments


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add: Any = parser.add_argument
    peers = f"checkouts, each with its NAME of {', '.join(TOOLKITS)}"
    add("--peers", nargs="*", default=[], metavar="NAME=DIR", help=peers)
    only = f"only these of {', '.join(CASES)}"
    add("--only", nargs="+", default=CASES, choices=CASES, metavar="CASE", help=only)
    add("--quick", action="store_true", help="fewer rows and seconds (20 minutes)")
    add("--json", type=Path, metavar="FILE", help="write facts and rows")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="of each side (what torch takes)")
    options = parser.parse_args(arguments)
    folders = [Path(peer.rpartition("=")[2]) for peer in options.peers]
    options.checkouts = find_peers(parser, "--peers", folders, list(TOOLKITS))
    for peer in options.peers:
        name = peer.rpartition("=")[0]
        if name not in options.checkouts:
            parser.error(f"--peers: {peer}: not the folder of a toolkit of this name")
    return options


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ValueError, OSError) as error:
        raise SystemExit(f"suite: {error}") from None
