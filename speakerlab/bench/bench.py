"""What `speakerlab bench` measures: the machine, models, and the data path of a training."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from speakerlab.bench.data import DataBench, build_bench, data_rows
from speakerlab.bench.machine import machine_rows
from speakerlab.bench.models import WORKS, micro_batch_of, model_rows
from speakerlab.bench.rows import Row
from speakerlab.bench.synthetic import with_synthetic_corpus
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.experiments.setup import start_rank
from speakerlab.training.distributed import Ranks

PARTS = {"all": ("machine", "model", "data")}  # else the part itself


@dataclass(frozen=True)
class Bench:
    """This machine, as one rank, and the models to measure on it."""

    configs: Mapping[str, Config]  # by the name in the rows
    has_data: bool  # whether the first has data directories; else a corpus is synthesized
    ranks: Ranks

    def rows(self, part: str, *, seconds: float) -> Iterator[Row]:
        """Yield the rows of `machine`, `model`, `train` (of model, only training), `data` or `all`.

        seconds: of each measurement, about.
        """
        device = self.ranks.device
        for name in PARTS.get(part, (part,)):
            if name == "machine":
                yield from machine_rows(device, seconds=2 * seconds)
            elif name == "data":
                with self.data() as data:
                    yield from data_rows(data, next(iter(self.configs)), seconds=seconds)
            else:
                works = WORKS if name == "model" else ("train",)
                for model, config in self.configs.items():
                    how = {"device": device, "works": works, "seconds": seconds}
                    yield from model_rows(config, model, **how)

    @contextmanager
    def data(self) -> Iterator[DataBench]:
        """Yield the data path of the first configuration."""
        config = next(iter(self.configs.values()))
        with tempfile.TemporaryDirectory() as folder:
            if not self.has_data:
                size = micro_batch_of(config, self.ranks.device)
                config = with_synthetic_corpus(config, Path(folder), micro_batch=size)
            yield build_bench(config, self.ranks)

    def headline(self) -> str:
        """Return the versions, device and threads of the measurements."""
        device, threads = self.ranks.device, torch.get_num_threads()
        what = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        cpus = process.available_cpus()
        return f"torch {torch.__version__}, {what}, {threads} threads, {cpus} CPUs"


def start_bench(configs: Mapping[str, Config], *, has_data: bool) -> Bench:
    """Set up this process as training does, on the GPU if there is one."""
    return Bench(configs, has_data, start_rank(next(iter(configs.values()))))
