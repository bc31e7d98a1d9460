"""Utterances a second against ranks: 1 and 2 measured here, 1 to 64 simulated from that.

    python benchmarks/scaling.py --measure DIR [--models campplus eres2net] [--precisions fp32 bf16]
    python benchmarks/scaling.py --simulate DIR

In: nothing, then the JSON that the first command wrote. Out: tables in Markdown; the first checks
the simulation against the two ranks that were measured.

A rank is a process with one thread, so two ranks have two cores where one has one. No GPU is
measured: its tables are arithmetic from a step of so many ms, and from what is assumed of links.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rows import STARTED
from scaling_simulation import Gradient, Head, Link, Rank, step_seconds, typical_slowest_pace
from sides import ROOT, environment, say

Cases = dict[str, dict[str, Any]]  # what the workers told, by model, precision and classes
RANKS = (1, 2, 4, 8, 16, 32, 64)
REACHED = 0.8  # of a link's nominal rate
# Nominal rate each way in bytes a second, and seconds of a round. Assumed, not measured.
LINKS = tuple(
    Link(name, REACHED * rate, seconds)
    for name, rate, seconds in [
        ("NVLink 4", 450e9, 5e-6),
        ("PCIe 4 x16", 31.5e9, 10e-6),
        ("100 Gbit/s", 12.5e9, 15e-6),
        ("25 Gbit/s", 3.125e9, 30e-6),
        ("10 Gbit/s", 1.25e9, 40e-6),
        ("1 Gbit/s", 0.125e9, 80e-6),
    ]
)
EMBED_DIM = {"campplus": 512, "eres2net": 192}
CLASSES = (1_000, 10_000, 100_000, 1_000_000)
GPU_ROWS = 64  # crops of a micro-batch
GPU_PACES = (0.98, 1.0, 1.02)  # a spread of 2 %


class Gpu(NamedTuple):
    """A step of 64 crops with a head of 1,000 classes, if it takes so long; the card's data sheet.

    The times are 45 % of the roofline of a card, which is arithmetic too: 3,550 and 1,150
    utterances a second on an H100, 339 on a V100.
    """

    model: str
    card: str
    precision: str
    step_ms: float
    bytes_per_second: float
    fp32_flops: float

    def __str__(self) -> str:
        return f"{self.model}, {self.card} {self.precision}: {self.step_ms:g} ms"


GPUS = (
    Gpu("campplus", "H100", "bf16", 18.0, 3.35e12, 67e12),
    Gpu("eres2net", "H100", "bf16", 55.7, 3.35e12, 67e12),
    Gpu("campplus", "V100", "fp32", 189.0, 0.9e12, 15.7e12),
)
# Passes over the rows of a head: normalised (2 forward, 4 backward), product (1 and 2), norm and
# clipping of the gradient (3), momentum and update (5); and products of so many FLOPs a value.
HEAD_PASSES, HEAD_FLOPS = (3, 6, 8), (2, 4, 0)


def measure(
    folder: Path, *, models: Sequence[str], precisions: Sequence[str], words: list[str]
) -> None:
    """A file of `folder` for each model and precision, and more for heads of 50,000 classes."""
    folder.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("scaling_worker.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    for model in models:
        for precision in precisions:
            own = [f"--model={model}", f"--precision={precision}", *words]
            done = subprocess.run(
                [sys.executable, *launch, *own],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env=environment(ROOT, 1),
            )
            found = json.loads(done.stdout.splitlines()[-1]) | STARTED
            name = f"{model}.{precision}.{found['case']['classes']}"
            name += ".split" if found["case"]["split"] else ""
            (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
            say(f"measured {name}")


def rank_of(found: dict[str, Any], mode: str) -> Rank:
    """The medians of a mode, the spread of its steps, and when gradients are ready."""
    steps = found["steps"][mode]
    forward, backward, update = (statistics.median(part) for part in zip(*steps))
    totals = [sum(parts) for parts in steps]
    # Noted in other steps than these, so in proportion to the last gradient.
    last = max(seconds for seconds, _ in found["gradients"])
    case = found["case"]
    rank = Rank(
        forward,
        backward,
        update,
        tuple(Gradient(seconds * backward / last, size) for seconds, size in found["gradients"]),
        paces=tuple(total / statistics.median(totals) for total in totals),
    )
    if not case["split"]:
        return rank
    head = Head(case["classes"], EMBED_DIM[case["model"]], 0.0, 0.0, 0.0)
    return rank.with_head(head, num_ranks=2, rows=case["micro_batch"], is_split=True)


def link_of(found: dict[str, Any], name: str = "loopback") -> Link:
    """gloo between two processes of this machine: from all-reduces of 4 KiB, 1 MiB and 25 MiB."""
    by_size = {row["bytes"]: row for row in found["link"]}
    small, medium, large = (by_size[size] for size in (1 << 12, 1 << 20, 25 << 20))
    rate = (large["bytes"] - medium["bytes"]) / (large["seconds"] - medium["seconds"])
    return Link(name, rate, small["seconds"] / 2, large["core_share"])


def check_lines(cases: Cases) -> Iterator[str]:
    """Two ranks: measured, and simulated from what a rank takes beside another.

    The typical step is the median; that of mean steps depends on the few longest.
    """
    yield (
        "| case | 1 rank, utt/s | 2 ranks, utt/s | speed-up | 2 simulated, utt/s | error | "
        "error of mean steps |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, found in cases.items():
        rows, link, rank = found["case"]["micro_batch"], link_of(found), rank_of(found, "beside")
        totals = {mode: [sum(parts) for parts in steps] for mode, steps in found["steps"].items()}
        typical = replace(rank, paces=(typical_slowest_pace(rank.paces, 2),))
        expected, mean = (step_seconds(one, 2, link) for one in (typical, rank))
        alone, joined = (statistics.median(totals[mode]) for mode in ("alone", "joined"))
        of_mean = statistics.mean(totals["joined"]) / mean - 1
        yield (
            f"| {name} | {rows / alone:.2f} | {2 * rows / joined:.2f} | {2 * alone / joined:.2f} | "
            f"{2 * rows / expected:.2f} | {joined / expected - 1:+.1%} | {of_mean:+.1%} |"
        )


def rank_lines(cases: Cases) -> Iterator[str]:
    """Utterances a second of ranks of one core each, over this machine's link and slower ones."""
    yield "| case | over | " + " | ".join(map(str, RANKS)) + " |"
    yield "|---|---|" + "---|" * len(RANKS)
    for name, found in cases.items():
        rank, rows = rank_of(found, "alone"), found["case"]["micro_batch"]
        if found["case"]["split"]:
            continue
        for link in (link_of(found), *LINKS[4:]):
            rates = [n * rows / step_seconds(rank, n, link) for n in RANKS]
            yield f"| {name} | {link.name} | {' | '.join(f'{rate:.1f}' for rate in rates)} |"


def gpu_rank(cases: Cases, gpu: Gpu) -> Rank:
    """The measured shape of a step, as long as that of a GPU might be; a spread of 2 %."""
    rank = rank_of(cases[f"{gpu.model}.{gpu.precision}.1000"], "alone")
    return replace(rank.scaled(gpu.step_ms / 1000 / rank.step_seconds), paces=GPU_PACES)


def gpu_step(
    rank: Rank, gpu: Gpu, num_classes: int, num_ranks: int, link: Link, *, is_split: bool
) -> float:
    """A step with a head of so many classes, which is passes over its rows and products.

    Each row meets the crops of one rank, or a part of the rows those of all.
    """
    values = num_classes * EMBED_DIM[gpu.model]
    own = values / num_ranks if is_split else values
    seconds = [
        4 * own * passes / gpu.bytes_per_second + GPU_ROWS * values * flops / gpu.fp32_flops
        for passes, flops in zip(HEAD_PASSES, HEAD_FLOPS)
    ]
    head = Head(num_classes, EMBED_DIM[gpu.model], *seconds)
    whole = rank.with_head(head, num_ranks=num_ranks, rows=GPU_ROWS, is_split=is_split)
    return step_seconds(whole, num_ranks, link)


def gpu_lines(cases: Cases, *, num_ranks: int) -> Iterator[str]:
    """If a step takes x ms: how many times as fast `num_ranks` GPUs are, whole / split head."""
    names = " | ".join(link.name for link in LINKS)
    yield f"| if 64 crops take | classes | ms of 1 rank | {names} |"
    yield "|---|---|---|" + "---|" * len(LINKS)
    for gpu in GPUS:
        rank = gpu_rank(cases, gpu)
        for classes in CLASSES:
            alone = gpu_step(rank, gpu, classes, 1, LINKS[0], is_split=False)
            cells = []
            for link in LINKS:
                took = [
                    gpu_step(rank, gpu, classes, num_ranks, link, is_split=is_split)
                    for is_split in (False, True)
                ]
                cells.append(" / ".join(f"{num_ranks * alone / seconds:.1f}" for seconds in took))
            yield f"| {gpu} | {classes:,} | {1000 * alone:.1f} | {' | '.join(cells)} |"


def due_lines(cases: Cases) -> Iterator[str]:
    """The number of classes from which on a split head is the faster one."""
    names = " | ".join(link.name for link in LINKS)
    yield f"| if 64 crops take | ranks | {names} |"
    yield "|---|---|" + "---|" * len(LINKS)
    for gpu in GPUS:
        rank = gpu_rank(cases, gpu)
        for num_ranks in (2, 8, 64):
            cells = [f"{split_due(rank, gpu, num_ranks, link):,}" for link in LINKS]
            yield f"| {gpu} | {num_ranks} | {' | '.join(cells)} |"


def split_due(rank: Rank, gpu: Gpu, num_ranks: int, link: Link) -> int:
    """To two digits; 10 million where it never is before."""
    candidates = [digit * 10**power // 10 for power in range(3, 7) for digit in range(10, 100, 5)]
    for classes in candidates:
        whole, split = (
            gpu_step(rank, gpu, classes, num_ranks, link, is_split=is_split)
            for is_split in (False, True)
        )
        if split < whole:
            return classes
    return 10_000_000


def fixed_batch_lines(cases: Cases, *, global_batch: int) -> Iterator[str]:
    """The same global batch on more ranks: fewer accumulations, then smaller micro-batches."""
    yield (
        f"| a global batch of {global_batch}, 64 crops in x ms | "
        + " | ".join(f"{n} ({min(GPU_ROWS, global_batch // n)})" for n in RANKS)
        + " |"
    )
    yield "|---|" + "---|" * len(RANKS)
    for gpu in GPUS:
        rank = gpu_rank(cases, gpu)
        for link in (LINKS[0], LINKS[2], LINKS[4]):
            took = [fixed_batch_seconds(rank, n, link, global_batch) for n in RANKS]
            gains = " | ".join(f"{took[0] / seconds:.1f}" for seconds in took)
            yield f"| {gpu}; {link.name} | {gains} |"


def fixed_batch_seconds(rank: Rank, num_ranks: int, link: Link, global_batch: int) -> float:
    """A step of `global_batch` crops, a micro-batch being 64 or all that falls to a rank."""
    rows = min(GPU_ROWS, global_batch // num_ranks)
    smaller = replace(rank.scaled(rows / GPU_ROWS), update_seconds=rank.update_seconds)
    accumulation = global_batch // num_ranks // rows
    return step_seconds(smaller, num_ranks, link, accumulation=accumulation)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", type=Path, metavar="DIR")
    parser.add_argument("--simulate", type=Path, metavar="DIR")
    parser.add_argument("--models", nargs="+", default=["campplus", "eres2net"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--words", default="", help="more options of scaling_worker.py")
    options = parser.parse_args()
    if not options.measure and not options.simulate:
        parser.error("give --measure DIR, then --simulate DIR")
    if options.measure:
        words = options.words.split()
        measure(options.measure, models=options.models, precisions=options.precisions, words=words)
    if options.simulate:
        paths = sorted(options.simulate.glob("*.json"))
        cases = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
        needed = {f"{gpu.model}.{gpu.precision}.1000" for gpu in GPUS}
        if not needed <= cases.keys():
            parser.error(
                f"--simulate: {options.simulate} must hold {', '.join(sorted(needed))}, got "
                f"{', '.join(cases) or 'nothing'}; run --measure {options.simulate} first"
            )
        for name, found in cases.items():
            say(f"{name}: measured {found.get('date')} at {found.get('commit')}")
        say("\n".join(["", "Measured and simulated, utt/s", "", *check_lines(cases), ""]))
        say("\n".join(["One core a rank, utt/s", "", *rank_lines(cases), ""]))
        say("\n".join(["GPUs, speed-up on 8", "", *gpu_lines(cases, num_ranks=8), ""]))
        say("\n".join(["GPUs, speed-up on 64", "", *gpu_lines(cases, num_ranks=64), ""]))
        say("\n".join(["From how many classes a split head is faster", "", *due_lines(cases), ""]))
        lines = fixed_batch_lines(cases, global_batch=256)
        say("\n".join(["One global batch", "", *lines]))


if __name__ == "__main__":
    main()
