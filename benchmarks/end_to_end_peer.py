"""3D-Speaker's side of end_to_end.py: its train.py's own loop over what its recipe builds.

In: lines of JSON, {"do": "train" | "facts" | "peak", ...}, and the data directories of
data_corpus.py. Out: a line of JSON for each. PYTHONPATH is its checkout.

Data set, processors, loader, network, classifier, loss, optimizer and schedules come from its
recipe's YAML by its own builder, and its `train()` runs over them. Besides what data_peer.py
replaces, each by something cheaper:
 - `Tensor.cuda` gives the tensor itself where there is no GPU;
 - DistributedDataParallel, which one process does not need, is left out;
 - the list is drawn from without end, so that its loader's workers are not started anew at the end
   of the short epochs of a small corpus.
"""

import argparse
import logging
import resource
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import data_peer
import resting
import torch
from sides import Answer, Order, import_from_root, serve
from torch import nn
from torch.utils.data import RandomSampler

ENDLESS = 1 << 40  # crops
RECIPES = {
    "campplus": "egs/3dspeaker/sv-cam++/conf/cam++.yaml",
    "eres2net": "egs/3dspeaker/sv-eres2net/conf/eres2net.yaml",
}
if not torch.cuda.is_available():
    torch.Tensor.cuda = lambda self, *_args, **_more: self  # pyright: ignore[reportAttributeAccessIssue]

train = import_from_root("speakerlab.bin.train")
builder = import_from_root("speakerlab.utils.builder")
its_config = import_from_root("speakerlab.utils.config")


def config_of(options: argparse.Namespace) -> Any:
    """Its recipe's configuration, with what both sides must have alike."""
    folder = Path(options.folder)
    values = {
        "data": data_peer.write_list(folder / "wav", options.crop_seconds),
        "noise": folder / "noise/wav.scp",
        "reverb": folder / "rirs/wav.scp",
        "exp_dir": folder / "peer_exp",
        "wav_len": options.crop_seconds,
        "aug_prob": options.prob,
        "batch_size": options.micro_batch,
        "num_workers": options.workers,
    }
    root = Path(its_config.__file__).parents[2]
    words = [f"--{key}={value}" for key, value in values.items()]
    return its_config.build_config(str(root / RECIPES[options.model]), words)


class Some:
    """The next batches of an endless loader, as a loader of its own."""

    def __init__(self, batches: Iterator[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batches, self.count)


class Side:
    """One training, as its train.py sets it up."""

    def __init__(self, options: argparse.Namespace) -> None:
        config = config_of(options)
        self.config, self.device = config, torch.device(options.device)
        dataset = builder.build("dataset", config)
        sampler = RandomSampler(dataset, replacement=True, num_samples=ENDLESS)
        config.dataloader["args"] |= {"sampler": sampler, "worker_init_fn": resting.tie_to_parent}
        loader = builder.build("dataloader", config)
        self.backbone = builder.build("embedding_model", config)
        config.num_classes = len(config.label_encoder) * (3 if config.speed_pertub else 1)
        model = nn.Sequential(self.backbone, builder.build("classifier", config))
        self.model = model.to(self.device)
        config.optimizer["args"]["params"] = model.parameters()
        self.optimizer = builder.build("optimizer", config)
        self.criterion = builder.build("loss", config)
        self.schedulers = []
        for name in ("lr_scheduler", "margin_scheduler"):
            getattr(config, name)["args"]["step_per_epoch"] = len(loader)
            self.schedulers.append(builder.build(name, config))
        torch.backends.cudnn.benchmark = True
        self.batches = iter(loader)

    def train(self, steps: int) -> float:
        """Seconds of so many steps of its own loop."""

        def work() -> None:
            train.train(
                Some(self.batches, steps),
                self.model,
                self.criterion,
                self.optimizer,
                1,
                *self.schedulers,
                logging.getLogger("3D-Speaker"),
                self.config,
                0,
            )

        return resting.timed(work, self.device)

    def facts(self) -> Answer:
        """What the other side must have, too."""
        parameters = sum(p.numel() for p in self.backbone.parameters())
        return {"parameters": parameters, "classes": self.config.num_classes}


def start() -> Callable[[Order], Answer]:
    parser = argparse.ArgumentParser()
    for name in ("folder", "model", "device"):
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
