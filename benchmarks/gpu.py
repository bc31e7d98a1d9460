"""Check and measure a GPU, in five parts of at most nine minutes each, which also run alone.

    bash benchmarks/gpu.sh [--out DIR] [--part N ...] [--corpus DIR] [--peers NAME=DIR ...]
    bash benchmarks/gpu.sh --device cpu --quick         # a dry run of every row, in minutes
    python benchmarks/suite.py --read DIR/part*.json --store          # their tables in RESULTS.md

1. `speakerlab doctor` and the tests that need a GPU (checks.py).
2. Launches, limits of the device; training and inference in each precision and with other kernels.
3. Data path, training from files, waiting for data, memory beside the plan.
4. Extraction, harmed trainings, EER after a training on the mini corpus and on --corpus.
5. The same models, trainings, extraction and features beside the toolkits of --peers.

Out: DIR/part<N>.json in the format of suite.py, written after each row, and DIR/part<N>.log. Where
a row fails or takes too long, the next ones are measured by another process; the file has the
reason, and the exit status is 1. The same command continues: it keeps the rows that this commit has
measured on this machine.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from corpus import SHARED
from gpu_steps import PARTS, WORDS, Step
from sides import HERE, ROOT, die_with_parent, environment, say
from suite import find_checkouts
from suite_facts import facts_of, kind_of_machine

from speakerlab.bench.stopwatch import number
from speakerlab.core.atomic import write_json

LIMITS = 300.0, 540.0  # seconds of a row, of a part
LOG_LINES = 15  # shown of a call that failed


class Part:
    """The rows of a part, kept in its file, and the reasons of those that are missing."""

    def __init__(self, number: int, folder: Path, facts: dict[str, Any]) -> None:
        self.number, self.facts, self.began = number, facts, time.monotonic()
        # A dry run takes as long as it takes.
        self.row_seconds, self.most_seconds = [math.inf] * 2 if facts["quick"] else LIMITS
        self.path = folder / f"part{number}.json"
        self.log = self.path.with_suffix(".log")
        self.rows: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}
        if self.path.exists():
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if all(kept["facts"][key] == facts[key] for key in ("machine", "commit", "quick")):
                self.rows = {row["name"]: row for row in kept["rows"]}
                say(f"part {number}: {len(self.rows)} rows kept from {self.path}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def write(self) -> None:
        part = {"part": self.number, "seconds": self.seconds, "missing": self.missing}
        rows = list(self.rows.values())
        write_json(self.path, {"facts": self.facts, "parts": [part], "rows": rows})

    def take(self, path: Path) -> bool:
        """Add the rows that a case has written to `path`; return whether there was a new one."""
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        new = [row for row in found if row["name"] not in self.rows]
        for row in new:
            self.rows[row["name"]] = row
            say(f"{row['name']:54}{number(row['ours']):>12} {row['unit']}")
        if new:
            self.write()
        return bool(new)

    def measure(self, step: Step, options: argparse.Namespace) -> None:
        """Call the case until each row is there or has failed."""
        left = [name for name in step.rows if name not in self.rows]
        while left:
            reason = self.call(step, left, options)
            left = [name for name in left if name not in self.rows]
            if left:
                say(f"{left[0]}: {reason}")
                self.missing[left.pop(0)] = reason
                self.write()

    def call(self, step: Step, rows: Sequence[str], options: argparse.Namespace) -> str:
        """Run the case for these rows; return why it ended."""
        if self.seconds > self.most_seconds:
            return f"no time is left of {self.most_seconds:g} s; run the same command again"
        with tempfile.TemporaryDirectory() as folder, self.log.open("ab") as log:
            path = Path(folder) / "rows.json"
            began, env = log.tell(), environment(ROOT, None)
            if options.quick:  # compiling takes minutes
                env["TORCHDYNAMO_DISABLE"] = "1"
            process = subprocess.Popen(
                words_of(step, rows, path, options),
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that all that it started can be killed
                preexec_fn=die_with_parent,
            )
            try:
                reason = self.wait(process, path)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self.take(path)
            text = self.log.read_bytes()[began:].decode(errors="replace")
        if any(name not in self.rows for name in rows):
            say("\n".join(text.splitlines()[-LOG_LINES:]))
        return reason

    def wait(self, process: subprocess.Popen[bytes], path: Path) -> str:
        """Wait for the end of a case, and take its rows meanwhile; return why it ended."""
        last = time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            if self.take(path):
                last = time.monotonic()
            if time.monotonic() - last > self.row_seconds:
                return f"took longer than {self.row_seconds:g} s"
            if self.seconds > self.most_seconds:
                return f"not finished in the {self.most_seconds:g} s of a part; run it again"
        return f"exited with {process.returncode}; see {self.log}"


def words_of(step: Step, rows: Sequence[str], path: Path, options: argparse.Namespace) -> list[str]:
    """Return the command of a case for these rows."""
    words = [*WORDS.get(step.case, ((), ()))[options.quick], *step.words]
    names = importlib.import_module(step.case).PEERS if step.peers else ()
    folders = [str(options.checkouts[name]) for name in names if name in options.checkouts]
    words += ["--peer", *folders] if folders else []
    script = [sys.executable, str(HERE / f"{step.case}.py")]
    return [*script, f"--json={path}", f"--device={options.device}", *words, "--rows", *rows]


def find_facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts about this machine."""
    threads = torch.get_num_threads()
    kind = kind_of_machine(options.device, threads)
    command = "bash benchmarks/gpu.sh" + (" --quick" if options.quick else "")
    return facts_of(options, kind=kind, threads=threads, command=command)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu.sh", description=(__doc__ or "").partition("\n")[0])
    add: Any = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="(exp/gpu, of a dry run exp/gpu_quick)")
    add("--part", type=int, nargs="+", default=list(PARTS), choices=list(PARTS), metavar="N")
    add("--corpus", type=Path, metavar="DIR", help="recorded speech for learning.py")
    add("--peers", nargs="+", default=[], metavar="NAME=DIR", help="checkouts, for part 5")
    add("--device", default="cuda")
    add("--quick", action="store_true", help="few and small inputs, whose rows mean nothing")
    options = parser.parse_args(words)
    options.on_gpu = options.device != "cpu"
    if options.on_gpu and not torch.cuda.device_count():
        parser.error("--device: no GPU found; for a dry run, use --device cpu --quick")
    if options.corpus is not None and not options.corpus.is_dir():
        parser.error(f"--corpus: {options.corpus}: no such folder")
    options.checkouts, options.threads = find_checkouts(parser, options.peers), None
    options.out = options.out or ROOT / ("exp/gpu_quick" if options.quick else "exp/gpu")
    if options.corpus is None and (SHARED / "librispeech-mini").is_dir():
        options.corpus = SHARED / "librispeech-mini"
    return options


def main() -> int:
    options = parse(None)
    # In another process: what this one held of the GPU would be counted as memory in use.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        facts = pool.submit(find_facts, options).result()
    return run_parts(options, facts)


def run_parts(options: argparse.Namespace, facts: dict[str, Any]) -> int:
    """Return the exit status: 1 where a row is missing."""
    options.out.mkdir(parents=True, exist_ok=True)
    parts = list[Part]()
    for chosen in options.part:
        parts.append(part := Part(chosen, options.out, facts))
        for step in PARTS[chosen](options):
            part.measure(step, options)
        say(f"part {chosen}: {len(part.rows)} rows in {part.seconds:.0f} s")
    missing = [(part, name) for part in parts for name in part.missing]
    for part, name in missing:
        say(f"part {part.number}: {name} is missing: {part.missing[name]}")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
