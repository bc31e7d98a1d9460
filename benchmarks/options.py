"""What each way to make a training step faster gives here, and whether it changes the loss.

    python benchmarks/options.py --json FILE                        # one process
    torchrun --standalone --nproc-per-node 2 benchmarks/options.py  # what concerns ranks

In: a model and made-up features. Out: a line and a row for each option: its rate over that of the
plain step (they take turns, medians), and how far its losses are from the plain ones over 20 steps
of the same model in float64, where a difference beyond rounding would show. What does not pay is
off by default (docs/hardware.md).
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rows import write_rows
from sides import ROOT, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(ROOT))
from speakerlab.config import build
from speakerlab.config.schema import load_config
from speakerlab.core import process
from speakerlab.training.distributed import start_ranks
from speakerlab.training.optim import OPTIMIZERS
from speakerlab.training.update import Updater

CLASSES = 1000
COMPARED_STEPS = 20
COMPARED = {"dtype": "float64", "micro_batch": 4, "frames": 100}
LR = 1e-5  # larger, and rounding alone grows with each step
Loss = Callable[[], float]


class Side:
    """A model in training with one option; `step` computes one step on the same features."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        config = load_config([ROOT / "conf" / f"{options.model}.yaml"], ["seed=1"])
        self.backbone: nn.Module = build.build_embedder(config).get_submodule("backbone").to(device)
        embed_dim: int = self.backbone.embed_dim  # pyright: ignore[reportAssignmentType]
        self.head = build.build_head(config, embed_dim=embed_dim, num_classes=CLASSES).to(device)
        self.module: nn.Module = nn.ModuleList([self.backbone, self.head])
        self.device, self.dtype = device, getattr(torch, options.dtype)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.module.to(wide)
        if name == "channels_last":
            self.backbone.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.run: nn.Module = self.backbone
        if name == "compile":
            self.run = torch.compile(self.backbone)  # pyright: ignore[reportAttributeAccessIssue]
        if dist_size() > 1:
            self.run = DistributedDataParallel(
                self.backbone,
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=name != "bucket_copies",
                static_graph=name == "static_graph",
            )
        torch.manual_seed(int(os.environ.get("RANK", 0)))
        shape = (options.micro_batch, options.frames, 80)
        self.feats_BTF = torch.randn(shape, device=device, dtype=wide)
        self.label_B = torch.randint(CLASSES, (options.micro_batch,), device=device)
        parameters = list(self.module.parameters())
        optimizer = OPTIMIZERS["sgd"](parameters, lr=LR)
        self.updater = Updater(
            self.module, optimizer, device=device, clip_norm=50.0, scale_loss=False
        )
        self.not_fused: torch.optim.Optimizer | None = None
        if name == "not_fused":
            kept = ("lr", "momentum", "nesterov", "weight_decay")
            same = {key: optimizer.param_groups[0][key] for key in kept}
            self.not_fused = torch.optim.SGD(parameters, foreach=True, **same)

    def step(self) -> float:
        """The loss of this step."""
        self.module.train()
        enabled = self.dtype == torch.bfloat16
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled):
            emb_BD = self.run(self.feats_BTF)
        loss, _ = self.head(emb_BD, self.label_B, 0.1)
        loss.backward()
        self.updater.guard.before_step()
        if self.not_fused is None:
            self.updater.step(LR)
        else:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.updater.clip_norm)
            self.not_fused.step()
            self.not_fused.zero_grad(set_to_none=True)
        return float(loss.detach())


def dist_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def compare(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """The row of one option."""
    sides = [Side(one, options, device) for one in ("plain", name)]
    wide = argparse.Namespace(**{**vars(options), **COMPARED})
    exact = [Side(one, wide, device) for one in ("plain", name)]
    losses = [[side.step() for _ in range(COMPARED_STEPS)] for side in exact]
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses))
    seconds: list[list[float]] = [[], []]
    for _ in range(options.turns):
        for side, taken in zip(sides, seconds):
            began = time.perf_counter()
            for _ in range(options.steps):
                side.step()
            taken.append((time.perf_counter() - began) / options.steps)
    plain, own = (options.micro_batch / statistics.median(taken) for taken in seconds)
    ratios = sorted(a / b for a, b in zip(*seconds))
    middle = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    if os.environ.get("RANK", "0") == "0":
        say(
            f"{options.model} {options.dtype} {name:14s} {own / plain:5.2f} x the plain step (half "
            f"of the pairs in {middle[0]:.2f} - {middle[1]:.2f}), {own:7.1f} crops/s; losses of "
            f"{COMPARED_STEPS} steps in float64 within {apart:.1e}"
        )
    return {
        "name": f"option.{name}.{options.model}.{options.dtype}",
        "ours": own,
        "peer": plain,
        "ratio": own / plain,
        "unit": "crops/s",
        "loss_difference": apart,
    }


def main() -> None:
    """Compare each option in its turn."""
    names = ["not_fused", "channels_last", "compile"]
    if dist_size() > 1:
        names = ["bucket_copies", "static_graph"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--option", nargs="+", default=names, choices=names)
    parser.add_argument("--model", default="campplus", metavar="NAME")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--frames", type=int, default=298)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=2, help="in a turn")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="has no such thing: left alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ranks = start_ranks(timeout_minutes=10)
    rows = [compare(name, options, ranks.device) for name in options.option]
    if ranks.is_first:
        write_rows(options.json, rows)
    process.leave(0)


if __name__ == "__main__":
    main()
