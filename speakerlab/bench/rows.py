"""What is measured, as rows of one table. In: what is to be measured. Out: `Row`s, one by one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from speakerlab.bench.convolutions import measure_convolutions
from speakerlab.bench.data import DataBench, measure_hops, measure_loader, measure_training
from speakerlab.bench.machine import matmul_gflops, measure_machine
from speakerlab.bench.steps import make_features, measure_step
from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.experiments.planning import asked_micro_batch

MICRO_BATCH = {"cpu": 8, "cuda": 64}  # where the configuration gives no number
TRIED_SECONDS = 0.3  # of each number format
WORTH_IT = 1.2  # so many times the rate of fp32, or a format is left out


@dataclass(frozen=True)
class Row:
    """A figure. `share`: of the rate that the model's convolutions alone have in that format."""

    name: str
    value: float
    unit: str
    gflops: float | None = None  # 10^9 operations a second, those of convolutions alone counted
    share: float | None = None
    peak_bytes: int | None = None
    note: str = ""

    def line(self) -> str:
        """A line of the table: what there is, in columns."""
        digits = max(0, 2 - math.floor(math.log10(self.value))) if self.value > 0 else 0
        parts = [
            f"{self.name:28}{self.value:12,.{digits}f} {self.unit:12}",
            "" if self.gflops is None else f"{self.gflops:9,.0f} GFLOP/s",
            "" if self.share is None else f"{self.share:6.0%} of its convolutions'",
            "" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:8,.0f} MiB",
            self.note,
        ]
        return " ".join(filter(None, parts)).rstrip()

    def to_json(self) -> dict[str, Any]:
        """As the benchmarks beside peers write theirs, with what else is known."""
        found = {"name": self.name, "ours": self.value, "peer": None, "ratio": None}
        found |= {"unit": self.unit, "gflops": self.gflops, "share": self.share}
        peak = self.peak_bytes
        found |= {"peak_mib": None if peak is None else peak / 2**20, "note": self.note or None}
        kept = ("name", "ours", "peer", "ratio", "unit")
        return {key: value for key, value in found.items() if key in kept or value is not None}


def precisions_of(config: Config, device: torch.device) -> Sequence[str]:
    """What the configuration asks for; for `auto`, bf16 too where its matrix product is quicker.

    A CPU without it emulates it; that shows in the rate and in nothing that torch tells.
    """
    if config.runtime.precision != "auto":
        return [config.runtime.precision]
    fp32, bf16 = (matmul_gflops(device, p, seconds=TRIED_SECONDS) for p in ("fp32", "bf16"))
    return ["fp32", "bf16"] if bf16 > WORTH_IT * fp32 else ["fp32"]


def machine_rows(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """The rates of `Machine`."""
    found = measure_machine(device, precisions=("fp32", "bf16"), seconds=seconds)
    for precision, gflops in found.matmul_gflops.items():
        yield Row(f"machine.matmul.{precision}", gflops, "GFLOP/s", note="no TF32")
    yield Row("machine.copy", found.copy_gb_per_second, "GB/s", note="read and written")
    for kind, rate in found.decode_seconds_per_second.items():
        yield Row(f"machine.decode.{kind}", rate, "s of audio/s", note="16 kHz, one core")


def model_rows(
    config: Config,
    name: str,
    *,
    device: torch.device,
    works: Sequence[str],
    precisions: Sequence[str],
    seconds: float,
) -> Iterator[Row]:
    """`train.NAME.PRECISION` and `infer...`, each beside its convolutions alone.

    works: of these two. Each takes about twice so many seconds. One rank, and a micro-batch that
    is the configuration's where it gives a number.
    """
    size = micro_batch_of(config, device)
    for work in works:
        for precision in precisions:
            step = measure_step(
                config,
                device=device,
                precision=precision,
                micro_batch=size,
                train=work == "train",
                seconds=seconds,
            )
            alone = measure_convolutions(
                build_backbone(config, train=work == "train").to(device),
                make_features(config, micro_batch=size, device=device),
                precision=precision,
                train=work == "train",
                seconds=seconds,
            )
            yield Row(
                f"{work}.{name}.{precision}",
                step.utt_per_second,
                "utt/s",
                gflops=alone.gflop / step.seconds,
                share=alone.seconds / step.seconds,
                peak_bytes=step.peak_bytes,
                note=f"batch {size}",
            )


def micro_batch_of(config: Config, device: torch.device) -> int:
    """The number of the configuration, or a usual one."""
    asked = asked_micro_batch(config)
    return asked if isinstance(asked, int) else MICRO_BATCH[device.type]


def build_backbone(config: Config, *, train: bool) -> nn.Module:
    """What trains, or what infers, which has biases in the place of BatchNorms."""
    embedder = build.build_embedder(config)
    return (embedder if train else embedder.eval().for_inference()).get_submodule("backbone")


def data_rows(bench: DataBench, name: str, *, seconds: float) -> Iterator[Row]:
    """Crops a second of the loader, of a training, and of each hop in one process."""
    workers = f"{bench.num_workers} workers, batches of {bench.micro_batch}"
    yield Row("data.loader", measure_loader(bench, seconds=seconds), "crops/s", note=workers)
    rate, waited = measure_training(bench, seconds=seconds)
    note = f"{waited:.1%} of it waiting for data"
    yield Row(f"data.training.{name}", rate, "crops/s", note=note)
    hops = measure_hops(bench, seconds=seconds)
    total = sum(hops.values())
    yield Row("data.one_process", 1 / total, "crops/s", note="hop after hop:")
    for hop, took in hops.items():
        note = f"{took / total:.1%} of a crop"
        yield Row(f"data.hop.{hop.replace(' ', '_')}", 1e6 * took, "us", note=note)
