"""Training steps and inference of CAM++ and ERes2Net-base, beside 3D-Speaker's modules.

    python benchmarks/models.py --peer DIR --json FILE      # DIR: a checkout of 3D-Speaker

In: fixed features, the same weights on both sides. Out: a line and a row for each model, kind of
work and number format, {"name", "ours", "peer", "ratio", "unit"}; without --peer, ours alone.

Each side is a process of its own; they take turns (sides.py). Before anything is timed, both must
give the same embeddings, loss, gradients and statistics. A training step is the backbone with a
margin head of 1,000 classes, forward and backward, and an SGD step; inference is the backbone
without autograd.

3D-Speaker's CAM++ recomputes a part of each dense layer in the backward pass unless told not to,
and its recipes do not tell it. The rows named `...peer_stores` compare with it told so.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sides import ROOT, Process, measure, report, say, write_rows

WORKER = Path(__file__).with_name("models_worker.py")
MODELS = ("campplus", "eres2net")
# The largest difference over the largest value. That both compute the same shows in float64; in
# fp32 these deep networks are far from themselves: rounding moves some gradients by a hundredth.
ALLOWED = {"float64": 1e-6, "float32": 0.1}


def start(side: str, root: Path, options: argparse.Namespace, **case: Any) -> Process:
    """A side with one model; `case` is its name, more arguments and the file of its weights."""
    words = {
        "side": side,
        "model": case["model"],
        "args": json.dumps(case["args"]),
        "weights": case["weights"],
        "device": options.device,
        "micro-batch": options.micro_batch,
        "frames": options.frames,
    }
    return Process(WORKER, root, words=words, threads=options.threads)


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


def compare(model: str, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The rows of one model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = {"model": model, "args": {}, "weights": folder / "weights.pt"}
        ours = start("ours", ROOT, options, **case)
        peers: list[tuple[str, Process | None]] = [("", None)]
        if options.peer is not None:
            peers = [("", start("3dspeaker", options.peer, options, **case))]
            if model == "campplus" and "train" in options.work:
                case["args"] = {"memory_efficient": False}
                stores = start("3dspeaker", options.peer, options, **case)
                peers.append((".peer_stores", stores))
        for suffix, peer in peers:
            if peer is not None:
                require_equal(ours, peer, folder, model + suffix)
        for precision in options.precisions:
            for work in options.work:
                for suffix, peer in peers if work == "train" else peers[:1]:
                    order = {"do": work, "precision": precision}
                    found = measure(
                        [(side, order) for side in (ours, peer) if side is not None],
                        utterances_per_step=options.micro_batch,
                        seconds=options.seconds,
                    )
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
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
