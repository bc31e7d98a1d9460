"""Our side of end_to_end.py: a training as `speakerlab train` builds it, step by step.

In: lines of JSON, {"do": "train" | "facts" | "peak", ...}, and the data directories of
data_corpus.py. Out: a line of JSON for each.
"""

import argparse
import resource
from collections.abc import Callable
from pathlib import Path

import resting
from sides import ROOT, Answer, Order, serve

from speakerlab.config.schema import Config, load_config
from speakerlab.core import process
from speakerlab.experiments.setup import start_rank
from speakerlab.experiments.train import build_training
from speakerlab.training.signals import Signals


def config_of(options: argparse.Namespace) -> Config:
    """conf/<model>.yaml, and of it only what both sides must have alike is changed."""
    values = {
        "data.dir": options.folder,
        "data.train": f"[{options.source}]",
        "data.valid_speakers": 0,
        "data.crop_seconds": options.crop_seconds,
        "augment.room_prob": options.prob,
        "augment.noise_prob": options.prob,
        "training.global_batch": options.micro_batch,
        "training.bn_batch": "null",
        "training.num_epochs": 10000,  # never done
        "runtime.micro_batch": options.micro_batch,
        "runtime.num_workers": options.workers,
        "runtime.precision": options.precision,
    }
    layers = [ROOT / "conf" / f"{options.model}.yaml"]
    return load_config(layers, [f"{key}={value}" for key, value in values.items()])


class Side:
    """One training."""

    def __init__(self, options: argparse.Namespace) -> None:
        config, exp = config_of(options), Path(options.exp)
        exp.mkdir()
        ranks = start_rank(config)
        self.device = ranks.device
        assert self.device.type == options.device, f"ours runs on {self.device}"
        self.training = build_training(exp, None, config, ranks, Signals(process.leave))
        self.trainer = self.training.trainer
        self.trainer.start()
        self.trainer.open()

    def train(self, steps: int) -> float:
        """Seconds of so many steps."""

        def work() -> None:
            for _ in range(steps):
                self.trainer.take_step()

        return resting.timed(work, self.device)

    def facts(self) -> Answer:
        """What the other side must have, too."""
        backbone = self.training.embedder.get_submodule("backbone")
        parameters = sum(p.numel() for p in backbone.parameters())
        return {"parameters": parameters, "classes": len(self.training.classes)}


def start() -> Callable[[Order], Answer]:
    parser = argparse.ArgumentParser()
    for name in ("folder", "source", "model", "precision", "exp", "device"):
        parser.add_argument(f"--{name}", required=True)
    for name, kind in (("prob", float), ("crop-seconds", float)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("micro-batch", "workers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    side = Side(parser.parse_args())

    def answer(order: Order) -> Answer:
        if order["do"] == "facts":
            return side.facts()
        if order["do"] == "peak":
            return {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        return {"seconds": side.train(order["steps"])}

    return answer


if __name__ == "__main__":
    serve(start)
    resting.leave()
