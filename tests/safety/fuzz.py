"""Read damaged files with every parser, and print what should not have happened.

    python tests/safety/fuzz.py --inputs 1000000        # or: make fuzz N=1000000

An input follows from the seed, the parser and its number. A parser either refuses it, with an
error that names the file and leaves all files as they were, or returns a value that, once written,
is read and written again as the same bytes; in 5 seconds and with 1 GB. The inputs of failures are
kept, and printed by the first of their kind.
"""

import argparse
import logging
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from damage import raw
from parsers import PARSERS

from speakerlab.bin.command import plain_text
from speakerlab.core.parallel import map_in_processes
from speakerlab.core.system import available_cpus

MAX_SECONDS = 5.0
MAX_BYTES = 1 << 30
CHUNK = 500  # inputs of a parser of share 1 that a process reads in a row


States = dict[str, tuple[int, int]]  # path -> size and time of change
Job = tuple[str, int, int]  # parser, first and last number


class Hang(BaseException):
    """Raised in a parser that takes too long."""


class Failure(NamedTuple):
    """What should not have happened, and by which input."""

    parser: str
    kind: str  # equal for failures of one cause
    text: str
    file: str
    content: bytes


class Bench:
    """A folder with valid files of a parser, one of which is damaged at a time."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.parser = PARSERS[name]
        self.folder = root / name
        self.again = root / f"{name}.again"
        self.again.mkdir(parents=True)
        self.folder.mkdir()
        self.parser.make(self.folder)
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        self.valid = {
            str(path.relative_to(self.folder)): path.read_bytes() for path in paths
        }
        match = self.parser.files
        self.files = [file for file in self.valid if any(map(Path(file).match, match))]
        assert self.files, name

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        for file, content in self.valid.items():
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / file).write_bytes(content)

    def damaged(self, seed: int, number: int) -> tuple[str, bytes]:
        """Return a file and other content for it."""
        rng = Random(f"{seed} {self.name} {number}")
        file = rng.choice(self.files)
        content = self.valid[file]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            try:
                content = self.parser.damage(content, rng)
            except Exception:  # damaged too much to be understood
                content = raw(content, rng)
        return file, content

    def attempt(self, file: str, content: bytes) -> Failure | None:
        """Read a folder with this content in one of its files."""
        path = self.folder / file
        path.unlink()  # the one before may be mapped
        path.write_bytes(content)
        self.parser.forge(path)
        before = states(self.folder)
        used = peak_bytes()
        set_timers(MAX_SECONDS)
        try:
            kind, text = self._read(path, self.again / file, before)
        finally:
            set_timers(0)
        if peak_bytes() - used > MAX_BYTES:
            kind = "memory"
            text = f"{(peak_bytes() - used) / 2**30:.1f} GiB {text}"
        if states(self.folder) == before:
            path.unlink()
            path.write_bytes(self.valid[file])
        else:
            self.restore()
        return Failure(self.name, kind, text, file, content) if kind else None

    def _read(self, path: Path, again: Path, before: States) -> tuple[str, str]:
        """Return the kind of a failure, or "", and its text."""
        try:
            value = self.parser.read(path)
            if self.parser.write is not None:
                self.written_twice(again, value)
        except (ValueError, OSError) as error:
            text = plain_text(error)
            if (self.parser.named or str(self.folder)) not in text:
                return f"the file is not named {place_of(error)}", text
            if states(self.folder) != before:
                return f"files changed {place_of(error)}", text
        except (Exception, Hang) as error:
            return f"{type(error).__name__} {place_of(error)}", f"{error}"
        return "", ""

    def written_twice(self, path: Path, value: object) -> bytes:
        """Return what a value is written as; AssertionError unless it is read as it was written."""
        assert self.parser.write is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.parser.write(path, value)
            first = path.read_bytes() if path.exists() else b""
            self.parser.write(path, self.parser.read(path))
            second = path.read_bytes() if path.exists() else b""
        except (ValueError, OSError) as error:
            raise AssertionError(
                f"cannot be written and read again: {error}"
            ) from error
        assert second == first, f"{first!r} is not read as it was written"
        return first


def states(folder: Path) -> States:
    """Return size and time of change of all files and folders below a folder."""
    states_by_name: States = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            state = entry.stat(follow_symlinks=False)
            is_folder = entry.is_dir(follow_symlinks=False)
            states_by_name[entry.path] = (
                (0, 0) if is_folder else (state.st_size, state.st_mtime_ns)
            )
            if is_folder:
                states_by_name |= states(Path(entry.path))
    return states_by_name


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def place_of(error: BaseException) -> str:
    """Return the last lines of the package that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [
        f for f in frames if "/speakerlab/" in f.filename or "/egs/" in f.filename
    ]
    last = own_frames[-1:] or frames[-1:]
    return " ".join(f"at {Path(f.filename).name}:{f.lineno} in {f.name}" for f in last)


def set_timers(seconds: float) -> None:
    """Bound CPU time, and the time of the clock ten times as high: this machine may be busy."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, 5 * seconds)  # ends the process even in C


@contextmanager
def limits(folder: Path) -> Iterator[None]:
    """Bound time and memory of what follows, and put temporary files into a folder."""

    def stop(*_: object) -> None:
        raise Hang(f"takes more than {MAX_SECONDS:g} s")

    old = signal.signal(signal.SIGALRM, stop)
    usual = resource.RLIMIT_DATA
    place = tempfile.tempdir
    signal.signal(signal.SIGPROF, stop)
    timer = signal.getitimer(signal.ITIMER_REAL)
    memory = resource.getrlimit(usual)
    now = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(usual, (now + 4 * MAX_BYTES, memory[1]))
    tempfile.tempdir = str(folder)
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", RuntimeWarning)
            yield
    finally:
        tempfile.tempdir = place
        logging.disable(logging.NOTSET)
        resource.setrlimit(usual, memory)
        signal.signal(signal.SIGALRM, old)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def read_chunk(
    root: Path, seed: int, job: tuple[str, int, int]
) -> tuple[int, float, list[Failure]]:
    """Read the inputs of a parser from number `first` to `last`; return seconds and failures."""
    name, first, last = job
    place = root / f"{name}-{first}"
    began = time.process_time()
    bench = Bench(name, place)
    failures = list[Failure]()
    with limits(place):
        for number in range(first, last):
            failure = bench.attempt(*bench.damaged(seed, number))
            failures += [failure] if failure else []
    shutil.rmtree(place)
    return last - first, time.process_time() - began, failures


def jobs_of(names: list[str], num_inputs: int) -> list[Job]:
    """Divide the inputs among parsers by their shares, and those of a parser into chunks."""
    total = sum(PARSERS[name].share for name in names)
    jobs: list[Job] = []
    for name in names:
        share = PARSERS[name].share
        count = math.ceil(num_inputs * share / total)
        size = max(1, round(CHUNK * share))
        jobs += [
            (name, first, min(first + size, count)) for first in range(0, count, size)
        ]
    return sorted(jobs, key=lambda job: job[1] / PARSERS[job[0]].share)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--inputs", type=int, default=1_000_000, metavar="N")
    options.add_argument("--seed", type=int, default=0, metavar="S")
    options.add_argument(
        "--only", nargs="+", default=list(PARSERS), choices=list(PARSERS)
    )
    options.add_argument(
        "--num-workers", type=int, default=available_cpus(), metavar="N"
    )
    args = options.parse_args()
    root = Path(tempfile.mkdtemp(prefix="speakerlab-fuzz-"))
    jobs = jobs_of(args.only, args.inputs)
    began = time.monotonic()
    done = Counter[str]()
    seconds = Counter[str]()
    kinds = Counter[tuple[str, str]]()
    read = partial(read_chunk, root, args.seed)
    try:
        for job, (count, cpu, failures) in zip(
            jobs, map_in_processes(read, jobs, args.num_workers)
        ):
            done[job[0]] += count
            seconds[job[0]] += cpu
            for failure in failures:
                kinds[failure[:2]] += 1
                if kinds[failure[:2]] == 1:
                    folder = root / f"found-{len(kinds):03d}-{failure.parser}"
                    folder.write_bytes(failure.content)
                    text = failure.text.replace("\n", "\n    ")[:500]
                    print(
                        f"{failure.parser}: {failure.kind}\n    {text}\n   "
                        f" {failure.file}: {folder}"
                    )
    except BrokenProcessPool:
        sys.exit(
            "a process died; its input is in one of"
            f" {', '.join(map(str, root.glob('*-*')))}"
        )
    print(f"{'parser':16} {'inputs':>8} {'ms each':>8} {'failures':>8}")
    for name, count in done.items():
        failures = sum(n for (parser, _), n in kinds.items() if parser == name)
        print(f"{name:16} {count:8} {1000 * seconds[name] / count:8.2f} {failures:8}")
    wall = time.monotonic() - began
    print(f"{done.total()} inputs in {wall:.0f} s, {done.total() / wall:.0f} a second")
    sys.exit(
        f"{len(kinds)} kinds of failures; inputs in {root}"
        if kinds
        else shutil.rmtree(root)
    )


if __name__ == "__main__":
    main()
