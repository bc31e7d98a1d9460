"""What every comparison with a peer shares: sides in processes of their own, and turns.

A side is a script that waits on stdin and answers each line of JSON with one: {"do": ..., ...} in,
{"seconds": ...} or what was asked out. Sides take turns, A B A B, so that what else the machine
does falls on both; the one whose turn it is not sleeps on a pipe. Rates are medians over the turns.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TURN_SECONDS = 1.0  # short, so that a slow spell of the machine meets both sides
MIN_TURNS = 3
TOOLKITS = {"3dspeaker": "3D-Speaker", "wespeaker": "WeSpeaker", "speechbrain": "SpeechBrain"}

Order = dict[str, Any]
Answer = dict[str, Any]


class Measured(NamedTuple):
    """Medians over the turns, and the quartiles of the ratio of one turn to the next."""

    rate: float
    peer_rate: float | None
    ratio: float | None
    quartiles: tuple[float, float] | None


class Process:
    """A side in a process of its own, which sleeps unless it is told to work."""

    def __init__(
        self, script: Path, root: Path, *, words: Mapping[str, object], threads: int | None = None
    ) -> None:
        """`root` is the tree to import `speakerlab` from; `words` are the script's options."""
        command = [sys.executable, str(script), *(f"--{k}={v}" for k, v in words.items())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(root, threads),
        )
        self._answer()

    def tell(self, **order: Any) -> Answer:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmark: a side ended with {self.process.wait()}; see above")
        return json.loads(line)

    def end(self) -> None:
        self.process.communicate()


def environment(root: Path, threads: int | None) -> dict[str, str]:
    """The environment of a script that imports `speakerlab` from the tree at `root`."""
    # Threads that wait must not spin on the cores of the side whose turn it is.
    own = {"PYTHONPATH": str(root), "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
    if threads:
        own |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, **own}


def serve(start: Callable[[], Callable[[Order], Answer]]) -> None:
    """A side's life: `start` gives what answers an order, then each line of stdin is one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a side prints is no answer
    answer = start()
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def import_from_root(name: str, bare: Sequence[str] = ()) -> Any:
    """A module of the package in PYTHONPATH, also where another of that name is installed.

    bare: packages whose own `__init__`, which imports what no comparison needs, is not run.
    """
    root = Path(os.environ["PYTHONPATH"]).resolve()
    top = name.partition(".")[0]
    unopened = bare if (root / top / "__init__.py").exists() else [top, *bare]
    for package in unopened:
        opened = sys.modules.setdefault(package, types.ModuleType(package))
        opened.__path__ = [str(root.joinpath(*package.split(".")))]
    module = importlib.import_module(name)
    assert root in Path(str(module.__file__)).resolve().parents, f"{name} is not from {root}"
    return module


def add_peers(parser: argparse.ArgumentParser, marks: Mapping[str, str]) -> None:
    """`--peer DIR [DIR]`: checkouts, each known by a file or folder that only it has."""
    named = " and of ".join(TOOLKITS[name] for name in marks)
    some = "" if len(marks) == 1 else ", any of them"
    parser.add_argument(
        *("--peer",),
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help=f"checkouts of {named}{some}",
    )


def recognise_peers(
    parser: argparse.ArgumentParser, folders: Sequence[Path], marks: Mapping[str, str]
) -> dict[str, Path]:
    """name -> folder, in the order of `marks`; the parser refuses a folder that is none."""
    found: dict[str, Path] = {}
    for folder in folders:
        names = [name for name, mark in marks.items() if (folder / mark).exists()]
        if not names:
            known = " or of ".join(TOOLKITS[name] for name in marks)
            parser.error(f"--peer: must be a checkout of {known}, got {folder}")
        found[names[0]] = folder
    return {name: found[name] for name in marks if name in found}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def measure(
    turns: Sequence[tuple[Process, Order]],
    *,
    utterances_per_step: int,
    seconds: float,
    least_steps: int = 1,
) -> Measured:
    """One side's rate, or two sides' and their ratio: turns of about a second each, in turn.

    Every order gets `steps` and is answered with `seconds`; `seconds` are for each side in all.
    least_steps: of the first turn, which is not timed, and of every other.
    """
    for side, order in turns:
        side.tell(**order, steps=least_steps)  # memory is taken and kernels are chosen
    turn_seconds = min(TURN_SECONDS, seconds / MIN_TURNS)
    once = [side.tell(**order, steps=1)["seconds"] for side, order in turns]
    steps = [max(least_steps, round(turn_seconds / took)) for took in once]
    longest = max(n * took for n, took in zip(steps, once))
    num_turns = max(MIN_TURNS, round(seconds / longest))
    rates = [
        [
            n * utterances_per_step / side.tell(**order, steps=n)["seconds"]
            for n, (side, order) in zip(steps, turns)
        ]
        for _ in range(num_turns)
    ]
    rate, *peer = (statistics.median(of_side) for of_side in zip(*rates))
    if not peer:
        return Measured(rate, None, None, None)
    low, _, high = statistics.quantiles([mine / theirs for mine, theirs in rates], n=4)
    return Measured(rate, peer[0], rate / peer[0], (low, high))
