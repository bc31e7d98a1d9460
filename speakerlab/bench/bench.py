"""What `speakerlab bench` measures. In: configurations. Out: the rows of each part, one by one."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from speakerlab.bench.data import DataBench, build_bench
from speakerlab.bench.made_up import on_made_up_corpus
from speakerlab.bench.rows import (
    Row,
    data_rows,
    machine_rows,
    micro_batch_of,
    model_rows,
    precisions_of,
)
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.training.distributed import Ranks, start_ranks
from speakerlab.training.precision import apply_backend_settings

PARTS = {"machine": (), "model": ("train", "infer"), "train": ("train",), "data": ()}
WHOLE = ("machine", "model", "data")


@dataclass(frozen=True)
class Bench:
    """This machine, as one rank, and the models to measure on it."""

    configs: Mapping[str, Config]  # by the name that the rows bear
    has_data: bool  # whether the first has data directories, or some are made up
    ranks: Ranks

    def rows(self, part: str, *, seconds: float) -> Iterator[Row]:
        """Of `machine`, `model`, `train` (of model, what trains), `data` or all of them.

        seconds: of each measurement, about.
        """
        for name in WHOLE if part == "all" else (part,):
            if name == "machine":
                yield from machine_rows(self.ranks.device, seconds=2 * seconds)
            elif name == "data":
                with self.data() as data:
                    yield from data_rows(data, next(iter(self.configs)), seconds=seconds)
            else:
                yield from self._models(PARTS[name], seconds=seconds)

    @contextmanager
    def data(self) -> Iterator[DataBench]:
        """The data's path of the first configuration."""
        config = next(iter(self.configs.values()))
        with tempfile.TemporaryDirectory() as folder:
            if not self.has_data:
                size = micro_batch_of(config, self.ranks.device)
                config = on_made_up_corpus(config, Path(folder), micro_batch=size)
            yield build_bench(config, self.ranks)

    def _models(self, works: tuple[str, ...], *, seconds: float) -> Iterator[Row]:
        device = self.ranks.device
        for name, config in self.configs.items():
            precisions = precisions_of(config, device)
            yield from model_rows(
                config, name, device=device, works=works, precisions=precisions, seconds=seconds
            )

    def headline(self) -> str:
        """What it is measured on."""
        device, threads = self.ranks.device, torch.get_num_threads()
        cpus = process.available_cpus()
        what = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return f"torch {torch.__version__}, {what}, {threads} threads, {cpus} CPUs"


def start_bench(configs: Mapping[str, Config], *, has_data: bool) -> Bench:
    """Settings as training has them, on the GPU if there is one."""
    first = next(iter(configs.values())).runtime
    conv_tf32 = first.tf32 == "auto"
    apply_backend_settings(deterministic=first.deterministic, conv_tf32=conv_tf32)
    ranks = start_ranks(timeout_minutes=first.timeout_minutes)
    if ranks.device.type == "cpu":
        process.keep_freed_memory()
    return Bench(configs, has_data, ranks)
