"""Trainings of small models from features, on a CPU or a GPU, with and without CUDA graphs."""

import json
import sys
from itertools import cycle
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "models"))

import launches
from members import SMALL

from speakerlab.config import build
from speakerlab.config.schema import load_config
from speakerlab.core.batch import Batch
from speakerlab.training.graphs import Graphed, GraphedTask
from speakerlab.training.precision import Precision
from speakerlab.training.writer import CheckpointWriter

CPU = torch.device("cpu")
CROPS, STEPS, ACCUMULATION = 4, 5, 2


def make(model: str = "xvector", *overrides: str, **args: object):
    args = {key: value for key, value in SMALL[model].items() if key != "feat_dim"} | args
    component = json.dumps({"name": model, "args": args})
    short = ["data.crop_seconds=0.5", "augment.room_prob=0", "augment.noise_prob=0"]
    return load_config([], [f"model={component}", *short, "augment.speeds=[1.0]", *overrides])


class Trained:
    """Steps of a training from features, of which the first is of the head alone."""

    def __init__(
        self,
        config,
        precision: str = "fp32",
        *,
        folder: Path | None = None,
        device: torch.device = CPU,
    ):
        used = Precision(precision, device.type, "tested")
        self.task = build.build_task(config, num_classes=10, precision=used)
        how = {"accumulation": ACCUMULATION, "device": device}
        batch = launches.draw_batch(config, self.task, CROPS)
        self.task.to(device)
        self.trainer = launches.build_trainer(config, self.task, batch, **how)
        self.batches = []
        for seed in range(3):
            torch.manual_seed(seed)
            feats_BTF, label_B = torch.randn(CROPS, 48, 80), torch.randint(10, (CROPS,))
            self.batches.append(batch._replace(feats_BTF=feats_BTF, label_B=label_B))
        self.read(self.batches)
        if folder is not None:
            self.trainer.state.writer = CheckpointWriter(folder, keep=3)
            self.trainer.state.resume()

    def read(self, batches: list[Batch]) -> None:
        """Train on copies of these, one after the other; features are overwritten."""
        self.trainer.inputs.batches = (batch.map(torch.clone) for batch in cycle(batches))

    def use_graphs(self) -> "Trained":
        trainer = self.trainer
        trainer.graphed = GraphedTask(self.task, trainer.updater, accumulation=ACCUMULATION)
        return self

    @property
    def graphed(self) -> Graphed:
        assert self.trainer.graphed is not None
        return self.trainer.graphed.graphed

    def run(self, steps: int = STEPS):
        """Return the sums after each step, and the state after the last."""
        found = []
        for _ in range(steps):
            self.trainer.train_step()
            found.append(self.trainer.sums.sums.tolist())
        return found, {name: value.clone() for name, value in self.task.state_dict().items()}


def require_equal(found, expected) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())
