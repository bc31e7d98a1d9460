"""Training steps and inference of CAM++ and ERes2Net-base, beside 3D-Speaker's modules.

    python benchmarks/models.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: fixed features, the same weights on both sides. Out: a line and a row for each model, kind of
work and number format, {"name", "ours", "peer", "ratio", "unit"}; without --peer, ours alone.

Each side is a process of its own. They take turns, A B A B, so that what else the machine does
falls on both; the one whose turn it is not sleeps on a pipe. Rates are medians over the turns.
Before anything is timed, both must give the same embeddings, loss, gradients and statistics. A
training step is the backbone with a margin head of 1,000 classes, forward and backward, and an SGD
step; inference is the backbone without autograd.

3D-Speaker's CAM++ recomputes a part of each dense layer in the backward pass unless told not to,
and its recipes do not tell it. The rows named `...peer_stores` compare with it told so.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("models_worker.py")
MODELS = ("campplus", "eres2net")
CHUNK_SECONDS = 1.0  # of one turn, so that a slow spell of the machine meets both sides
MIN_TURNS = 3
# The largest difference over the largest value. That both compute the same shows in float64; in
# fp32 these deep networks are far from themselves: rounding moves some gradients by a hundredth.
ALLOWED = {"float64": 1e-6, "float32": 0.1}


class Measured(NamedTuple):
    """Medians over the turns, and the quartiles of the ratio of one turn to the next."""

    rate: float
    peer_rate: float | None
    ratio: float | None
    quartiles: tuple[float, float] | None


class Process:
    """A side in a process of its own, which sleeps unless it is told to work."""

    def __init__(self, side: str, root: Path, options: argparse.Namespace, **case: Any) -> None:
        words = {
            "side": side,
            "model": case["model"],
            "args": json.dumps(case["args"]),
            "weights": case["weights"],
            "device": options.device,
            "micro-batch": options.micro_batch,
            "frames": options.frames,
        }
        command = [sys.executable, str(WORKER), *(f"--{k}={v}" for k, v in words.items())]
        # Threads that wait must not spin on the cores of the side whose turn it is.
        spin = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
        threads = {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), **spin, **threads},
        )
        self._answer()

    def tell(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"models.py: a side ended with {self.process.wait()}; see above")
        return json.loads(line)

    def end(self) -> None:
        self.process.communicate()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def require_equal(ours: Process, peer: Process, folder: Path, label: str) -> None:
    """Print how far the sides are apart; exit where they do not compute the same."""
    paths = [folder / "ours.pt", folder / "peer.pt"]
    for dtype, allowed in ALLOWED.items():
        for process, path in zip((ours, peer), paths):
            process.tell(do="values", path=str(path), dtype=dtype)
        found, expected = (torch.load(path, weights_only=True) for path in paths)
        errors = {
            name: float((found[name] - value).abs().max() / value.abs().max())
            for name, value in expected.items()
        }
        listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        say(f"{label} in {dtype}, largest difference: {listed}")
        wrong = [name for name, error in errors.items() if not error <= allowed]
        if wrong:
            raise SystemExit(f"{label}: {' and '.join(wrong)} are not equal; nothing was timed")


def measure(
    ours: Process, peer: Process | None, *, work: str, precision: str, options: argparse.Namespace
) -> Measured:
    """Turns of about a second each, for so many seconds on each side."""
    sides = [ours] if peer is None else [ours, peer]
    order = {"do": work, "precision": precision}
    for side in sides:
        side.tell(**order, steps=1)  # memory is taken and kernels are chosen
    slowest = max(side.tell(**order, steps=1)["seconds"] for side in sides)
    steps = max(1, round(min(CHUNK_SECONDS, options.seconds / MIN_TURNS) / slowest))
    turns = max(MIN_TURNS, round(options.seconds / (steps * slowest)))
    crops = steps * options.micro_batch
    rates: list[list[float]] = [
        [crops / side.tell(**order, steps=steps)["seconds"] for side in sides] for _ in range(turns)
    ]
    medians = [statistics.median(rate) for rate in zip(*rates)]
    if peer is None:
        return Measured(medians[0], None, None, None)
    pairs = [mine / theirs for mine, theirs in rates]
    low, _, high = statistics.quantiles(pairs, n=4)
    return Measured(medians[0], medians[1], medians[0] / medians[1], (low, high))


def report(name: str, measured: Measured) -> dict[str, Any]:
    """Print a line; the row for the file."""
    line = f"{name:32s} ours {measured.rate:8.2f}"
    if measured.quartiles is not None:
        low, high = measured.quartiles
        line += f"   peer {measured.peer_rate:8.2f}   ratio {measured.ratio:5.2f}"
        line += f"   (half of the pairs in {low:.2f} - {high:.2f})"
    say(line + "   utt/s")
    row = {"name": name, "ours": measured.rate, "peer": measured.peer_rate}
    return {**row, "ratio": measured.ratio, "unit": "utt/s"}


def compare(model: str, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The rows of one model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = {"model": model, "args": {}, "weights": folder / "weights.pt"}
        ours = Process("ours", ROOT, options, **case)
        peers: list[tuple[str, Process | None]] = [("", None)]
        if options.peer is not None:
            peers = [("", Process("3dspeaker", options.peer, options, **case))]
            if model == "campplus" and "train" in options.work:
                case["args"] = {"memory_efficient": False}
                stores = Process("3dspeaker", options.peer, options, **case)
                peers.append((".peer_stores", stores))
        for suffix, peer in peers:
            if peer is not None:
                require_equal(ours, peer, folder, model + suffix)
        for precision in options.precisions:
            for work in options.work:
                for suffix, peer in peers if work == "train" else peers[:1]:
                    found = measure(ours, peer, work=work, precision=precision, options=options)
                    yield report(f"{work}.{model}.{precision}{suffix}", found)
        for process in [ours, *(peer for _, peer in peers)]:
            if process is not None:
                process.end()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, help="a checkout of 3D-Speaker")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--work", nargs="+", default=["train", "infer"], choices=["train", "infer"])
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=["fp32", "bf16"],
        help="default: both on a GPU; fp32 on a CPU, where bf16 may be emulated",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of each side; default: what torch takes")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--frames", type=int, default=298, help="default: a crop of 3 s")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each side of each row")
    options = parser.parse_args(words)
    if options.peer is not None and not (options.peer / "speakerlab/models/campplus").is_dir():
        parser.error(f"--peer: must be a checkout of 3D-Speaker, got {options.peer}")
    if options.precisions is None:
        options.precisions = ["fp32"] if options.device == "cpu" else ["fp32", "bf16"]
    return options


def main() -> None:
    options = parse()
    threads = options.threads or torch.get_num_threads()
    say(
        f"torch {torch.__version__}, {options.device}, {threads} threads, "
        f"{options.micro_batch} crops of {options.frames} frames; bf16 is autocast"
    )
    rows = [row for model in options.models for row in compare(model, options)]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
