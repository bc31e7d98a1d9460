"""Training steps and inference of models, beside 3D-Speaker's, WeSpeaker's and SpeechBrain's own.

    python benchmarks/models.py --peer DIR [DIR ...] --json FILE     # checkouts of any of the three

In: fixed features, the same weights on both sides. Out: a line and a row for each model, kind of
work, number format and peer, {"name", "ours", "peer", "ratio", "unit"} and, where they are known,
the quartiles of the ratio, the peak memory of both sides and the `share` of ours: the time that the
model's convolutions and linear layers alone take here, over the time of our step. Without --peer,
ours alone.

Each side is a process of its own; they take turns (sides.py). Before anything is timed, both must
give the same embeddings, loss, gradients and statistics, on features so few that it takes seconds.
A training step is the backbone with a margin head of 1,000 classes, forward and backward, and an
SGD step; inference is the backbone alone. Ours is what training and extraction build from
`conf/<model>.yaml`: with their kernels, for inference with BatchNorm folded.

Rows beside WeSpeaker and SpeechBrain end in `.wespeaker` and `.speechbrain`, those beside
3D-Speaker in nothing. A row in bf16 has ours in bf16 and the peer as it ships: in fp32 where it has
no bf16 (3D-Speaker, WeSpeaker). `...peer_bf16` puts that peer's module under autocast, too.
3D-Speaker's CAM++ recomputes a part of each dense layer in the backward pass unless told not to,
and its recipes do not tell it; `...peer_stores` compares with it told so.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from models_sides import CASES, HAS_BF16, MARKS, REGISTERED, Case, micro_batch
from rows import report, write_rows
from sides import ROOT, Measured, Process, add_peers, measure, recognise_peers, say

sys.path.insert(0, str(ROOT))
from speakerlab.checkpoints.names import to_our_name

WORKER = Path(__file__).with_name("models_worker.py")
# The largest difference over the largest value. That both compute the same shows in float64; in
# fp32 these deep networks are far from themselves: rounding moves some gradients by a hundredth.
# In bf16 only ours is; that it computes the same thing shows in what the passes end with.
ALLOWED = {
    ("float64", "fp32"): {"embeddings": 1e-6, "loss": 1e-6, "gradients": 1e-6, "statistics": 1e-6},
    ("float32", "fp32"): {"embeddings": 0.1, "loss": 0.1, "gradients": 0.1, "statistics": 0.1},
    ("float32", "bf16"): {"embeddings": 0.1, "loss": 0.3},
}
# Inference first: after trainings in the same process it was up to a third slower.
WORKS, PRECISIONS = ["infer", "train"], ["fp32", "bf16"]


@dataclass(frozen=True)
class Row:
    """What is measured for one row: the formats are those of our side and of the peer's."""

    name: str
    work: str
    precision: str
    peer_precision: str


def rows_of(model: str, case: Case | None, options: argparse.Namespace) -> list[Row]:
    """The rows of a model beside one peer, or alone; only those that were asked for."""
    suffix = "" if case is None else case.suffix
    ships = "bf16" if case is not None and case.peer in HAS_BF16 else "fp32"
    rows: list[Row] = []
    works = [work for work in WORKS if work in options.work]
    for work, precision in product(works, options.precisions):
        name = f"{work}.{model}.{precision}{suffix}"
        if case is not None and not case.has(work, precision):
            continue
        if precision == "fp32":
            rows.append(Row(name, work, "fp32", "fp32"))
            continue
        rows.append(Row(name, work, precision, ships))
        if case is not None and ships != precision:
            rows.append(Row(f"{name}.peer_bf16", work, precision, precision))
    return [row for row in rows if not options.rows or row.name in options.rows]


class Ours:
    """Our side of a model, in a process of its own; what it can at most is measured once."""

    def __init__(self, model: str, args: Mapping[str, object], options: argparse.Namespace) -> None:
        self.model, self.args, self.options = model, args, options
        self.alone: dict[tuple[str, str], float] = {}

    @cached_property
    def process(self) -> Process:
        return start(ROOT, self.options, model=self.model, args=json.dumps(self.args), case=-1)

    def share(self, row: Row, rate: float) -> float | None:
        """The convolutions' own time over that of a step."""
        if self.options.no_share:
            return None
        key = row.work, row.precision
        if key not in self.alone:
            order = {"work": row.work, "precision": row.precision, "seconds": self.options.seconds}
            self.alone[key] = self.process.tell(do="convolutions", **order)["seconds"]
        return self.alone[key] * rate / size_of(self.model, self.options)


def start(root: Path, options: argparse.Namespace, **case: Any) -> Process:
    """A side with one model: `case` is its name, more arguments, and the number of its peer."""
    words = {
        **case,
        "device": options.device,
        "micro-batch": size_of(case["model"], options),
        "frames": options.frames,
    }
    return Process(WORKER, root, words=words, threads=options.threads)


def size_of(model: str, options: argparse.Namespace) -> int:
    return options.micro_batch or micro_batch(model, options.device)


def to_ours(values: Mapping[str, torch.Tensor], model: str, case: Case) -> dict[str, torch.Tensor]:
    """A peer's tensors by our names."""
    if case.peer == "speechbrain":  # 3D-Speaker's names are from there
        return dict(values)
    toolkit: Any = case.peer
    registered = REGISTERED.get(model, model)
    return {
        to_our_name(name, model=registered, toolkit=toolkit): value
        for name, value in values.items()
    }


def require_equal(
    ours: Process, peer: Process, folder: Path, *, model: str, case: Case, precisions: list[str]
) -> None:
    """Print how far the sides are apart; exit where they do not compute the same."""
    weights = [folder / "ours.weights", folder / "peer.weights"]
    paths = [folder / "ours.values", folder / "peer.values"]
    peer.tell(do="save", weights=str(weights[1]))
    torch.save(to_ours(torch.load(weights[1]), model, case), weights[0])
    for (dtype, precision), allowed in ALLOWED.items():
        if precision not in precisions and dtype != "float64":
            continue
        order = {"do": "values", "dtype": dtype}
        formats = (precision, "fp32")
        for side, path, of_side, used in zip((ours, peer), paths, weights, formats):
            side.tell(**order, weights=str(of_side), path=str(path), precision=used)
        found, expected = (torch.load(path) for path in paths)
        errors = {
            name: furthest(found[name], to_ours(expected[name], model, case)) for name in allowed
        }
        label = f"{model}{case.suffix}"
        listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        kind = dtype if precision == "fp32" else "bf16 (ours) beside float32"
        say(f"{label} in {kind}, largest difference: {listed}")
        wrong = [name for name, error in errors.items() if not error <= allowed[name]]
        if wrong:
            raise SystemExit(f"{label}: {' and '.join(wrong)} are not equal; nothing was timed")


def furthest(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference over the largest value, of all tensors together."""
    assert found.keys() >= expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    apart = (float((found[name] - value).abs().max()) for name, value in expected.items())
    return max(apart) / largest


def measure_row(row: Row, ours: Ours, peer: Process | None) -> dict[str, Any]:
    """Turns of both sides; then what each takes of the memory, and our share."""
    options = ours.options
    turns = [(ours.process, {"do": row.work, "precision": row.precision})]
    if peer is not None:
        turns.append((peer, {"do": row.work, "precision": row.peer_precision}))
    size = size_of(ours.model, options)
    found: Measured = measure(turns, utterances_per_step=size, seconds=options.seconds)
    peaks = [
        side.tell(do="peak", work=order["do"], precision=order["precision"])["mib"]
        for side, order in turns
    ]
    share = ours.share(row, found.rate)
    more = {"share": share, "peak_mib": peaks[0], "peer_peak_mib": (*peaks, None)[1]}
    return report(row.name, found, **more)


def compare(model: str, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The rows of one model: beside each peer that has it, or alone."""
    cases = [case for case in CASES[model] if case.peer in options.peers]
    with ExitStack() as stack:
        sides: dict[str, Ours] = {}
        for case in cases or [None]:
            rows = rows_of(model, case, options)
            if not rows:
                continue
            args = {} if case is None else case.ours
            ours = sides.setdefault(json.dumps(args), Ours(model, args, options))
            peer = None
            if case is not None:
                number = CASES[model].index(case)
                root = options.peers[case.peer]
                peer = start(root, options, model=model, args="{}", case=number)
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                precisions = sorted({row.precision for row in rows})
                require_equal(
                    ours.process, peer, folder, model=model, case=case, precisions=precisions
                )
            yield from (measure_row(row, ours, peer) for row in rows)
            if peer is not None:
                peer.end()
        for ours in sides.values():
            ours.process.end()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_peers(parser, MARKS)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--work", nargs="+", default=WORKS, choices=WORKS)
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"]
    )
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of each side; default: what torch takes")
    parser.add_argument("--micro-batch", type=int, help="default: by model and device")
    parser.add_argument("--frames", type=int, default=298, help="default: a crop of 3 s")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each side of each row")
    parser.add_argument(
        "--no-share", action="store_true", help="do not time the convolutions alone"
    )
    options = parser.parse_args(words)
    options.peers = recognise_peers(parser, options.peer, MARKS)
    return options


def main() -> None:
    options = parse()
    threads = options.threads or torch.get_num_threads()
    sizes = ", ".join(f"{model} {size_of(model, options)}" for model in options.models)
    say(
        f"torch {torch.__version__}, {options.device}, {threads} threads, crops of "
        f"{options.frames} frames in micro-batches: {sizes}"
    )
    rows = [row for model in options.models for row in compare(model, options)]
    if not rows:
        raise SystemExit("models: no such row is made with these options and peers; nothing ran")
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
