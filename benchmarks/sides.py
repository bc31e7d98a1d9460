"""Run a benchmark case: two sides in processes of their own that take turns, and their rows.

A case is one file beside this one. It has `PEERS`, the toolkits that it compares with; `QUICK`, its
options in the suite's `--quick`; `SIDES`, name -> class; `add_options(parser)`; `compare(options)`,
which yields rows; and it ends with a call of `run_case`. It imports our package only in functions:
in a peer's process `speakerlab` may be the peer's package.

A side is started as `python benchmarks/sides.py CASE SIDE OPTIONS` with the tree to import from,
ours or a checkout, first in PYTHONPATH. Each line of JSON on its stdin, {"do": METHOD, ...}, calls
a method of the class and is answered by a line with the result. Sides take turns, A B A B, so that
a slow spell of the machine meets both; the other one sleeps on its pipe.
"""

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from peak import PROC, status_bytes

HERE = Path(__file__).parent
ROOT = HERE.resolve().parent
# Short, so that a slow spell of the machine meets both sides.
TURN_SECONDS = 1.0
MIN_TURNS = 3
TOOLKITS = {
    "3dspeaker": "3D-Speaker",
    "wespeaker": "WeSpeaker",
    "speechbrain": "SpeechBrain",
}
MARKS = {  # toolkit -> a path that only its checkout has
    "3dspeaker": "speakerlab/models/campplus",
    "wespeaker": "wespeaker/models/speaker_model.py",
    "speechbrain": "speechbrain/lobes/models/ECAPA_TDNN.py",
}
# Packages whose `__init__` is not run: it would import whole toolkits.
BARE = {
    "speakerlab": [],
    "wespeaker": ["wespeaker", "wespeaker.frontend"],
    "speechbrain": [
        f"speechbrain{part}"
        for part in ("", ".dataio", ".lobes", ".lobes.models", ".nnet", ".utils")
    ],
}
FINISHED = "finished"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A turn has our value and, where there is a peer, the peer's.
Turns = Sequence[Sequence[float]]


class Process:
    """A side in a separate process; `ask` calls one of its methods."""

    def __init__(
        self,
        case: str,
        side: str,
        root: Path = ROOT,
        *,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        """Start a side that imports from the tree `root`; `options` go to its constructor."""
        encoded_options = json.dumps(options, default=str)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "sides.py"), case, side, encoded_options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(root, threads),
        )
        self._answer()

    def ask(self, method: str, /, **order: Any) -> Any:
        """Return what the side's method `what` returns."""
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"do": method, **order}, default=str) + "\n"
        )
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            reason = "see above"
            if status == -signal.SIGKILL:
                reason = "perhaps for lack of memory: models.py has --micro-batch"
            raise SystemExit(f"benchmark: a side exited with {status}; {reason}")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()


class Side:
    """Base of a side on one device, which reports its peak memory."""

    device: str

    def peak(self) -> float | None:
        """Return the MiB that this process has held at most; on a GPU, that torch took there.

        None where that is unknown.
        """
        if self.device.startswith("cuda"):
            import torch

            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return status_bytes("VmHWM") / 2**20 if PROC.exists() else None


def start_sides(
    case: str, threads: int | None, peers: Mapping[str, Path], **settings: Any
) -> list[Process]:
    """Start our side of a case, then that of each peer; peers: toolkit -> checkout."""
    trees = {"ours": ROOT, **peers}
    return [
        Process(case, side, root, threads=threads, **settings)
        for side, root in trees.items()
    ]


def run_of(
    side: Process, method: str = "run", /, **order: Any
) -> Callable[[int], float]:
    """Return a function of a number of steps that a side runs: their seconds."""
    return lambda steps: side.ask(method, steps=steps, **order)


def peaks_of(sides: Sequence[Process]) -> dict[str, float | None]:
    """Return the fields of a row for the peak memory of each side."""
    peaks = [side.ask("peak") for side in sides]
    return dict(zip(("peak_mib", "peer_peak_mib"), peaks))


def require_equal(
    what: str,
    sides: Sequence[Process],
    folder: Path,
    *,
    allowed: float,
    distance: Callable[[Any, Any], float] | None = None,
    **order: Any,
) -> None:
    """Compare the arrays that the method `values` of our and of the peer's side writes.

    distance: of two arrays; None: the largest difference.
    """
    import numpy as np

    tables = []
    for number, side in enumerate(sides):
        path = folder / f"side{number}.npz"
        side.ask("values", path=path, **order)
        tables.append(dict(np.load(path)))
    ours, theirs = tables
    assert ours.keys() == theirs.keys()
    distance = distance or (lambda a, b: float(np.abs(a - b).max()))
    apart = [distance(ours[name], theirs[name]) for name in ours]
    require_close(what, max(apart), allowed)


def require_close(what: str, apart: float, allowed: float) -> None:
    """Print how far the sides are apart; exit where they do not compute the same."""
    say(f"{what} differ by at most {apart:.1e}")
    if not apart <= allowed:
        raise SystemExit(f"{what} are not equal; nothing was timed")


def require_same_facts(name: str, sides: Sequence[Process]) -> Any:
    """Return what the method `facts` of every side returns; exit where they differ."""
    facts = [side.ask("facts") for side in sides]
    if facts[0] != facts[-1]:
        raise SystemExit(f"{name}: the trainings differ: {facts}; nothing was timed")
    return facts[0]


def close_sides(sides: Iterable[Process]) -> None:
    for side in sides:
        side.close()


def environment(root: Path, threads: int | None) -> dict[str, str]:
    """Return the environment of a script that imports from the tree at `root`."""
    # Packages may be in folders of PYTHONPATH; ours would hide a peer's.
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in folders if folder not in ("", str(ROOT))]
    # Waiting threads must not spin on the cores of the side whose turn it is.
    variables = {
        "PYTHONPATH": os.pathsep.join([str(root), *others]),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000"),
    }
    if threads:
        variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {**os.environ, **variables}


def run_to_end(
    command: Sequence[object],
    *,
    threads: int | None = None,
    seconds: float | None = None,
    log: IO[bytes] | None = None,
) -> str:
    """Run a command of ours; return how it ended: FINISHED or, after "it", what went wrong.

    seconds: then it is killed, with all that it has started. log: takes what it prints; None: the
    terminal.
    """
    process = subprocess.Popen(
        [str(argument) for argument in command],
        env=environment(ROOT, threads),
        stdout=log,
        stderr=log,
        start_new_session=True,  # so that all that it started can be killed
        preexec_fn=die_with_parent,
    )
    try:
        status = process.wait(seconds)
        return f"exited with {status}" if status else FINISHED
    except subprocess.TimeoutExpired:
        return f"was not finished in {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def serve(case: str, name: str, options: str) -> None:
    """Build a side and answer orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a side prints is not an answer
    side = importlib.import_module(case).SIDES[name](**json.loads(options))
    answers.write("null\n")
    answers.flush()
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps(getattr(side, order.pop("do"))(**order)) + "\n")
        answers.flush()
    # A regular exit would wait for them.
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)


def peer_tree() -> Path:
    """Return the tree that this side imports from: the first in PYTHONPATH."""
    tree, _, _ = os.environ["PYTHONPATH"].partition(os.pathsep)
    return Path(tree).resolve()


def import_peer(name: str) -> Any:
    """Import a module of the peer's tree, even if another of its name is installed."""
    root = peer_tree()
    top = name.partition(".")[0]
    has_init = (root / top / "__init__.py").exists()
    for package in BARE[top] if has_init else [top, *BARE[top]]:
        opened = sys.modules.setdefault(package, types.ModuleType(package))
        opened.__path__ = [str(root.joinpath(*package.split(".")))]
    module = importlib.import_module(name)
    assert root in Path(str(module.__file__)).resolve().parents, (
        f"{name} is not from {root}"
    )
    return module


def replace_module(name: str, **members: Any) -> None:
    """Have `import name` give a module with these members, for what a peer does not use here."""
    top, _, _ = name.partition(".")
    sys.modules.setdefault(top, types.ModuleType(top))
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


# Not imported, because in a peer's process `speakerlab` may be the peer's package.
stopwatch = runpy.run_path(str(ROOT / "speakerlab/bench/stopwatch.py"))


def timed(work: Callable[[], object], device: str = "cpu", *, steps: int = 1) -> float:
    """Return the seconds of so many calls; loader workers of this process sleep before and after.

    They read ahead: what they catch up with would be taken from the other side's turn.
    """
    _signal_workers(signal.SIGCONT)
    seconds = steps * stopwatch["seconds_of"](work, device, calls=steps)
    _signal_workers(signal.SIGSTOP)
    return seconds


def _signal_workers(number: signal.Signals) -> None:
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            os.kill(worker.pid, number)


def die_with_parent(_worker: int = 0) -> None:
    """Have this process killed when its parent dies, even while it is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def take_turns(
    sides: Sequence[Callable[[int], float]],
    *,
    amount: float,
    seconds: float,
    least_steps: int = 1,
) -> Turns:
    """Return the rates of turns of about a second: `amount` of each step over its seconds.

    sides: seconds of so many steps. seconds: for each side in all. least_steps: of the first turn,
    which is not timed, and of every other.
    """
    for side in sides:
        side(least_steps)  # takes memory and chooses kernels
    turn_seconds = min(TURN_SECONDS, seconds / MIN_TURNS)
    once = [side(1) for side in sides]
    steps = [max(least_steps, round(turn_seconds / took)) for took in once]
    longest = max(n * took for n, took in zip(steps, once))
    num_turns = max(MIN_TURNS, round(seconds / longest))
    return [
        [n * amount / side(n) for n, side in zip(steps, sides)]
        for _ in range(num_turns)
    ]


def report(name: str, turns: Turns, *, unit: str = "utt/s", **fields: Any) -> Any:
    """Print and return the `Row` of some turns: medians, and quartiles of the turns' ratios."""
    from rows import Row

    rates_of_sides = list(zip(*turns))
    ours = statistics.median(rates_of_sides[0])
    if len(rates_of_sides) == 2:
        peer = statistics.median(rates_of_sides[1])
        ratios = [our_rate / peer_rate for our_rate, peer_rate in turns]
        low, _, high = statistics.quantiles(ratios, n=4)
        fields |= {"peer": peer, "ratio": ours / peer, "quartiles": (low, high)}
    row = Row(name=name, ours=ours, unit=unit, **fields)
    say(row.line())
    return row


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def wants(options: argparse.Namespace, name: str) -> bool:
    """Return whether a row was asked for: all are, without --rows."""
    return not options.rows or name in options.rows


def suffix(peer: str | None) -> str:
    """Return the end of a row's name: empty beside 3D-Speaker, else the toolkit's name."""
    return "" if peer in (None, "3dspeaker") else f".{peer}"


def run_case(
    doc: str | None,
    compare: Callable[[argparse.Namespace], Iterable[Any]],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    *,
    peers: Sequence[str],
) -> None:
    """Parse the options of a case, run it in a temporary folder, and write each row at once."""
    sys.path.insert(0, str(ROOT))
    import torch

    from speakerlab.checkpoints import provenance
    from speakerlab.core.atomic import write_text

    started = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    names = ", ".join(TOOLKITS[name] for name in peers) or "no toolkit"
    parser.add_argument(
        "--peer",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help=f"checkouts of {names}; without one, ours alone",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--device", help="cuda where there is a GPU, else cpu")
    parser.add_argument("--threads", type=int, help="of each side (what torch takes)")
    add_options(parser)
    options = parser.parse_args()
    options.peers = find_peers(parser, "--peer", options.peer, peers)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            "-1"  # also for sides and the commands that they run
        )
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows, stamp = [], {"date": started, "commit": provenance.commit()}
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        for row in compare(options):
            rows.append({**row.to_json(), **stamp})
            if options.json is not None:
                write_text(options.json, json.dumps(rows, indent=1) + "\n")
    if not rows:
        raise SystemExit(
            f"{parser.prog}: these options and peers give no row; nothing was timed"
        )


def add_seconds(parser: argparse.ArgumentParser, default: float) -> None:
    """Add the option --seconds, for how long a row is measured."""
    help_text = "of each side of each row"
    parser.add_argument("--seconds", type=float, default=default, help=help_text)


def find_peers(
    parser: argparse.ArgumentParser,
    option: str,
    folders: Sequence[Path],
    peers: Sequence[str],
) -> dict[str, Path]:
    """Return toolkit -> checkout in the order of `peers`; the parser rejects others."""
    checkouts: dict[str, Path] = {}
    for folder in folders:
        names = [name for name in peers if (folder / MARKS[name]).exists()]
        if not names:
            toolkits = " or ".join(TOOLKITS[name] for name in peers)
            parser.error(f"{option}: {folder}: not a checkout of {toolkits}")
        checkouts[names[0]] = folder.resolve()
    return {name: checkouts[name] for name in peers if name in checkouts}


if __name__ == "__main__":
    serve(*sys.argv[1:])
