"""Our side of data.py: crops read, drawn, put together; then speed, room, noise, fbank on the CPU.

In: lines of JSON, {"do": "to_device" | "full_cpu" | "hops" | "values", ...}, and the data
directories of data_corpus.py. Out: a line of JSON for each.

Everything is built as training builds it, from a configuration, with a loader without workers.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sides import Answer, Order, serve
from stopwatch import Hop, Stopwatch, bytes_read
from torch import Tensor

from speakerlab.config.build import build_augment
from speakerlab.config.schema import Config, load_config
from speakerlab.core.batch import Batch
from speakerlab.data import dataset, loader, manifest
from speakerlab.data.sampler import MicroBatches
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments.corpus import read_corpus
from speakerlab.frontend.fbank import Fbank

ENDLESS = 1 << 40  # steps
HOPS: list[Hop] = [
    ("read", manifest.Manifest, "read"),
    ("draw", dataset.TrainCrops, "__getitem__"),
    ("collate", loader, "collate"),
    ("fbank", Fbank, "forward"),
]


class Chain:
    """A data directory's crops, batch after batch, and what the front end makes of them."""

    def __init__(self, config: Config) -> None:
        corpus = read_corpus(config)
        names = dataset.class_names(corpus.train.speakers, config.augment.speeds)
        self.augment = build_augment(
            config,
            rooms=corpus.rooms,
            noises=corpus.noise,
            noise_kinds=corpus.noise.kinds,
            noise_on_device=corpus.noise_on_device,
        )
        self.crops = setup_training.train_crops(config, corpus, names, self.augment)
        order = setup_training.epoch_order(config, corpus)
        batches = MicroBatches(
            order, start_step=0, stop_step=ENDLESS, micro_batch=config.training.global_batch
        )
        self.loader = loader.train_loader(self.crops, batches, num_workers=0, pin_memory=False)
        self.fbank = Fbank(**config.frontend).eval()

    def feats(self, batch: Batch, watch: Stopwatch | None = None) -> Tensor:
        """feats_BTF; with a watch, each stage of the augmentation is a hop."""
        with torch.no_grad():
            if watch is None:
                return self.fbank(self.augment(batch))
            wave_BS = self.augment.scale(batch)
            for name in self.augment.wave_names:
                wave_BS = watch.timed(name, self.augment.run)(name, wave_BS, batch)
            return self.fbank(wave_BS)


class Side:
    """The chain of one source of audio."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.options = options
        self.chain = Chain(self._config(options.source, prob=options.prob))
        self.batches: Iterator[Batch] = iter(self.chain.loader)

    def _config(self, source: str, *, prob: float, **more: object) -> Config:
        values = {
            "model.name": "campplus",
            "data.dir": self.options.folder,
            "data.train": f"[{source}]",
            "data.valid_speakers": 0,
            "data.crop_seconds": self.options.crop_seconds,
            "augment.room_prob": prob,
            "augment.noise_prob": prob,
            "training.global_batch": self.options.micro_batch,
            **more,
        }
        return load_config([], [f"{key}={value}" for key, value in values.items()])

    def run(self, work: str, steps: int) -> float:
        """Seconds that so many batches take."""
        start = time.perf_counter()
        for _ in range(steps):
            batch = next(self.batches)
            if work == "full_cpu":
                self.chain.feats(batch)
        return time.perf_counter() - start

    def hops(self, steps: int) -> Answer:
        """Where the time goes, how much is read, and how often what was drawn."""
        watch, done = Stopwatch(), list[Batch]()
        with watch.watching(HOPS):
            chain = Chain(self._config(self.options.source, prob=self.options.prob))
            batches = iter(chain.loader)
            chain.feats(next(batches))
            watch.seconds.clear()
            before, start = bytes_read(), time.perf_counter()
            for _ in range(steps):
                batch = next(batches)
                chain.feats(batch, watch)
                done.append(batch)
            total, after = time.perf_counter() - start, bytes_read()
        drawn = {
            name: sum(len(draws.rows) for batch in done for draws in batch.draws.get(name, ()))
            for name in ("speed", "room", "noise")
        }
        read = None if before is None or after is None else after - before
        return {"total": total, "hops": dict(watch.seconds), "read": read, "drawn": drawn}

    def values(self, path: Path) -> None:
        """Write feats_TF of each clip, nothing done to it."""
        more = {"augment.speeds": "[1.0]", "training.global_batch": 1}
        chain = Chain(self._config("clips", prob=0.0, **more))
        feats: dict[str, np.ndarray] = {}
        for row, name in enumerate(chain.crops.manifest.ids):
            batch = loader.collate([chain.crops[(0, row, row)]])
            feats[name] = chain.feats(batch)[0].numpy()
        np.savez(path, **feats)  # pyright: ignore[reportArgumentType]


def start() -> Callable[[Order], Answer]:
    parser = argparse.ArgumentParser()
    for name in ("folder", "source"):
        parser.add_argument(f"--{name}", required=True)
    for name, kind in (("prob", float), ("crop-seconds", float), ("micro-batch", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    side = Side(parser.parse_args())

    def answer(order: Order) -> dict[str, Any]:
        if order["do"] == "values":
            side.values(order["path"])
            return {"written": True}
        if order["do"] == "hops":
            return side.hops(order["steps"])
        return {"seconds": side.run(order["do"], order["steps"])}

    return answer


if __name__ == "__main__":
    serve(start)
