"""One of the ranks that `scaling.py` measures. In: a case as options, torchrun's variables.

Out: rank 0 prints one line of JSON: seconds of steps of a rank alone while the others sleep, of
ranks beside one another that exchange nothing, and of ranks joined by DistributedDataParallel;
when each gradient is ready; seconds of all-reduces and the share of a core that they take.

Letters: B rows of a rank.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sides import ROOT, say
from torch import Tensor

sys.path.insert(0, str(ROOT))
from speakerlab.training.gradients import Gradients

from speakerlab.config import build
from speakerlab.config.schema import Config, load_config
from speakerlab.core import process
from speakerlab.experiments import setup as setup_training
from speakerlab.losses.shards import Shards
from speakerlab.training.batch_size import BatchPlan
from speakerlab.training.distributed import Ranks, start_ranks
from speakerlab.training.precision import resolve_precision
from speakerlab.training.update import Updater

LR, MARGIN = 1e-5, 0.2  # a rate so small that training on noise stays finite
REDUCED_BYTES = (1 << 12, 1 << 20, 1 << 23, 25 << 20, 100 << 20)
MODES = ("alone", "beside", "joined")


@dataclass(frozen=True)
class Pretended:
    """Rank 0 of `world_size`, whose others have just what it has: their work without them."""

    world_size: int
    rank: int = 0

    def sum(self, values: Tensor) -> Tensor:
        return values.clone()

    def max(self, values: Tensor) -> Tensor:
        return values.clone()

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat([values] * self.world_size)


class Side:
    """The trainer's own step on a batch of noise, which is always the same."""

    def __init__(
        self, config: Config, ranks: Ranks, options: argparse.Namespace, shards: Shards | None
    ) -> None:
        precision = resolve_precision(options.precision, ranks.device)
        self.task = build.build_task(
            config, num_classes=options.classes, precision=precision, shards=shards
        ).to(ranks.device)
        setup_training.choose_kernels(config, self.task)
        batch = setup_training.throw_away_batch(config, ranks.device, options.micro_batch)
        self.updater = Updater(
            self.task,
            build.build_optimizer(config, self.task.parameters(), lr=LR),
            device=ranks.device,
            clip_norm=config.training.clip_norm,
            scale_loss=precision.scales_loss,
            split=list(self.task.split.values()),
            sum_over_ranks=ranks.sum,
        )
        self.gradients = Gradients(
            task=self.task,
            plan=BatchPlan(options.micro_batch, 1, ranks.world_size, ""),
            ranks=ranks,
            batches=lambda start_step, attempt: itertools.repeat(batch),
            throw_away_batch=batch,
            frozen_steps=0,
            seed=1,
        )
        self.gradients.join(self.updater.guard)
        self.inputs = self.gradients.inputs(0, 0)
        self.num_steps, self.began = 0, 0.0
        self.ready: dict[str, float] = {}

    def watch_gradients(self) -> None:
        """Note when each gradient is ready, seconds after the backward pass began."""

        def noting(name: str) -> Callable[[Tensor], None]:
            def note(_: Tensor) -> None:
                self.ready[name] = time.perf_counter() - self.began

            return note

        for name, parameter in self.task.named_parameters():
            parameter.register_post_accumulate_grad_hook(noting(name))

    def step(self) -> tuple[float, float, float]:
        """Seconds of the forward pass with its front end, the backward pass, and the rest."""

        def begin_backward(loss: Tensor) -> Tensor:
            self.began = time.perf_counter()
            return self.updater.scale.apply(loss)

        began = time.perf_counter()
        self.updater.guard.before_step()
        self.gradients.make(self.num_steps, self.inputs, margin=MARGIN, scaled=begin_backward)
        made = time.perf_counter()
        self.updater.check(self.num_steps, self.updater.step(LR))
        self.num_steps += 1
        ended = time.perf_counter()
        return self.began - began, made - self.began, ended - made


def measure_modes(
    bare: Side, joined: Side, ranks: Ranks, *, turns: int, steps: int
) -> dict[str, list[tuple[float, float, float]]]:
    """The parts of each step by mode; modes take turns, so that slow spells meet all of them."""
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    for turn, mode in itertools.product(range(turns + 1), MODES):
        ranks.barrier(mode)
        if mode != "alone" or ranks.is_first:
            side = joined if mode == "joined" else bare
            parts = [side.step() for _ in range(steps)]
            if turn:  # memory is taken and kernels are chosen in the first
                found[mode] += parts
    return found


def measure_gradients(bare: Side, *, steps: int) -> list[tuple[float, int]]:
    """(seconds after the beginning of the backward pass, bytes) of each gradient that travels."""
    times: dict[str, list[float]] = {}
    bare.watch_gradients()
    for _ in range(steps):
        bare.step()
        for name, seconds in bare.ready.items():
            times.setdefault(name, []).append(seconds)
    sizes = {name: p.nbytes for name, p in bare.task.named_parameters()}
    travels = [name for name in times if name not in bare.task.split]
    return [(statistics.median(times[name]), sizes[name]) for name in travels]


def measure_link(ranks: Ranks, *, repeats: int = 7) -> list[dict[str, float]]:
    """All-reduces of several sizes: the median of their seconds, and what share of a core."""
    rows = []
    for size in REDUCED_BYTES:
        values, seconds = torch.zeros(size // 4, device=ranks.device), []
        dist.all_reduce(values)
        used = time.process_time()
        for _ in range(repeats):
            ranks.barrier("link")
            began = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - began)
        used, whole = time.process_time() - used, sum(seconds)
        took = statistics.median(seconds)
        rows.append({"bytes": size, "seconds": took, "core_share": min(used / whole, 1.0)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="campplus")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--split", action="store_true", help="rows of the head over the ranks")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in a turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = start_ranks(timeout_minutes=10)
    config = load_config([ROOT / "conf" / f"{options.model}.yaml"], ["seed=1"])
    lone = Ranks(rank=0, local_rank=0, world_size=1, local_size=1, device=ranks.device)
    bare = Side(config, lone, options, Pretended(ranks.world_size) if options.split else None)
    joined = Side(config, ranks, options, ranks if options.split else None)
    found: dict[str, Any] = {"case": vars(options), "link": measure_link(ranks)}
    found["steps"] = measure_modes(bare, joined, ranks, turns=options.turns, steps=options.steps)
    ranks.barrier("alone again")
    if ranks.is_first:
        found["gradients"] = measure_gradients(bare, steps=3)
        say(json.dumps(found))
    ranks.barrier("told")
    process.leave(0)


if __name__ == "__main__":
    main()
