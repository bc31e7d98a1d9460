"""Check and measure a GPU, in five parts of at most nine minutes each, which also run alone.

    bash benchmarks/gpu.sh [--out DIR] [--part N ...] [--corpus DIR]
    bash benchmarks/gpu.sh --device cpu --quick         # a dry run of every row, in minutes

1. `speakerlab doctor`, the tests that need a GPU, and harmed trainings (checks.py).
2. Training from files: speed, memory, waiting for data.
3. Training and inference in each precision and with other kernels; extraction.
4. EER after a training on the mini corpus and on --corpus.
5. Data path: what needs no GPU.

The packages of recipes are enough; what needs pytest, espeak-ng or recordings is left out, with a
line, where they are missing.

Out: DIR/part<N>.json in the format of suite.py, DIR/gpu.log, and a table. Where a row fails,
another process measures the next ones; the file has the reason, and the exit status is 1. The same
command continues: it keeps the rows that this commit has measured on this machine. Without a
repository, SPEAKERLAB_COMMIT names the commit. To measure beside other toolkits, run the cases with
--peer, or suite.py.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from corpus import SHARED
from facts import facts_of
from gpu_steps import OPTIONS, PARTS, Step
from rows import table
from sides import ROOT, say
from suite import call_case

from speakerlab.bench.stopwatch import number as format_number
from speakerlab.core.atomic import write_json
from speakerlab.training.devices import count_gpus

PART_SECONDS = 540.0
NO_TIME = "no time is left in this part; run the same command again"
LOG_LINES = 15  # shown of a call that failed
Rows = dict[str, dict[str, Any]]  # by name


def run_parts(options: argparse.Namespace, facts: dict[str, Any]) -> int:
    """Return the exit status: 1 where a row is missing."""
    options.out.mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    for number in options.part:
        for name, reason in run_part(number, options, facts).items():
            missing[f"part {number}: {name}"] = reason
    for name, reason in missing.items():
        say(f"{name} is missing: {reason}")
    return 1 if missing else 0


def run_part(
    number: int, options: argparse.Namespace, facts: dict[str, Any]
) -> dict[str, str]:
    """Measure the rows of a part that its file lacks; return the missing ones with reasons."""
    began = time.monotonic()
    path = options.out / f"part{number}.json"
    rows, missing = read_part(path, facts)
    for step in PARTS[number](options):
        left = [name for name in step.rows if name not in rows]
        # Rows that failed before come last: one that hangs uses up the part.
        left.sort(key=lambda name: missing.get(name, NO_TIME) != NO_TIME)
        while left:
            seconds = PART_SECONDS - (time.monotonic() - began)
            new_rows, reason = measure(step, left, seconds, options)
            rows |= new_rows
            left = [name for name in left if name not in rows]
            missing = {name: why for name, why in missing.items() if name not in rows}
            if left:
                missing[left.pop(0)] = reason
            spent = time.monotonic() - began
            part = {"part": number, "seconds": spent, "missing": missing}
            listed = list(rows.values())
            write_json(path, {"facts": facts, "parts": [part], "rows": listed})

    say(f"part {number}: {len(rows)} rows in {time.monotonic() - began:.0f} s")
    say(table(rows.values()))
    return missing


def read_part(path: Path, facts: dict[str, Any]) -> tuple[Rows, dict[str, str]]:
    """Return the rows in a part's file, and the reasons of the missing ones.

    Both are empty where another commit or machine measured them.
    """
    if not path.exists():
        return {}, {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    for fact in ("machine", "commit", "quick"):
        if stored["facts"][fact] != facts[fact]:
            return {}, {}
    rows = {row["name"]: row for row in stored["rows"]}
    say(f"{path}: {len(rows)} rows kept")
    return rows, stored["parts"][0]["missing"]


def measure(
    step: Step,
    names: Sequence[str],
    seconds: float,
    options: argparse.Namespace,
) -> tuple[Rows, str]:
    """Call a case for these rows; return the rows it gave, and why others are missing."""
    if options.quick:
        limit = None  # a dry run takes as long as it takes
    elif seconds <= 0:
        return {}, NO_TIME
    else:
        limit = seconds
    arguments = [*case_arguments(step, options), "--rows", *names]
    log_path = options.out / "gpu.log"
    with log_path.open("ab") as log:
        start = log.tell()
        case_rows, ending = call_case(step.case, arguments, seconds=limit, log=log)

    rows = {row["name"]: row for row in case_rows}
    for row in case_rows:
        say(f"{row['name']:54}{format_number(row['ours']):>12} {row['unit']}")
    if len(rows) < len(names):
        printed = log_path.read_bytes()[start:].decode(errors="replace")
        say("\n".join(printed.splitlines()[-LOG_LINES:]))
    return rows, f"{ending}; see {log_path}"


def case_arguments(step: Step, options: argparse.Namespace) -> list[str]:
    """Return the options of a step's case."""
    measured, dry = OPTIONS.get(step.case, ((), ()))
    arguments = [f"--device={options.device}", *(dry if options.quick else measured)]
    return [*arguments, *step.arguments]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="gpu.sh", description=summary)
    add: Any = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="(exp/gpu, of a dry run exp/gpu_quick)")
    parts = list(PARTS)
    add("--part", type=int, nargs="+", default=parts, choices=parts, metavar="N")
    add("--corpus", type=Path, metavar="DIR", help="recorded speech for learning.py")
    work = ROOT / "exp/gpu_work"
    add("--work", type=Path, default=work, metavar="DIR", help="(exp/gpu_work)")
    add("--device", default="cuda")
    add("--quick", action="store_true", help="small inputs, whose rows mean nothing")
    options = parser.parse_args(arguments)

    options.on_gpu = options.device != "cpu"
    if options.on_gpu and not torch.cuda.device_count():
        parser.error("--device: no GPU found; for a dry run, use --device cpu --quick")
    if options.corpus is not None and not options.corpus.is_dir():
        parser.error(f"--corpus: {options.corpus}: no such folder")
    options.threads, options.checkouts = None, {}  # for facts_of
    if options.out is None:
        options.out = ROOT / ("exp/gpu_quick" if options.quick else "exp/gpu")
    if options.corpus is None and (SHARED / "librispeech-mini").is_dir():
        options.corpus = SHARED / "librispeech-mini"
    return options


def check_machine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of a run; raise ValueError if this torch cannot use the GPU."""
    if options.on_gpu:
        count_gpus()
    return facts_of(options)


def main() -> int:
    options = parse(None)
    if options.quick:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes minutes
    # In another process: what this one held of the GPU would be counted as memory in use.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            facts = pool.submit(check_machine, options).result()
        except ValueError as error:
            raise SystemExit(f"gpu.sh: {error}") from None
    if facts["commit"] == "unknown":
        say("commit: unknown; to name it in the results, set SPEAKERLAB_COMMIT")
    return run_parts(options, facts)


if __name__ == "__main__":
    raise SystemExit(main())
