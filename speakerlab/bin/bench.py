"""Benchmark this machine, models on it, and the data path; write crops to listen to."""

import json
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from speakerlab.bin.command import parser

if TYPE_CHECKING:  # these import torch: only once the options are valid
    import torch

    from speakerlab.bench.stopwatch import Row
    from speakerlab.config.schema import Config
    from speakerlab.training.distributed import Ranks

PARTS = ("all", "machine", "model", "train", "data")
MODELS = ["campplus", "eres2net"]
LISTEN_CROPS = 10


def main(words: Sequence[str]) -> None:
    args = parse(words)
    if "OMP_WAIT_POLICY" not in os.environ:  # as in the recipes; read when torch is imported
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    if not args.profile:
        print_rows(args)
        return
    from speakerlab.bench.profile import profile_training

    (config,) = read_configs(args).values()
    found = profile_training(config, exp_dir=args.exp, num_steps=args.steps, trace=args.trace)
    for line in found.lines:  # none on ranks but the first
        print(line)


def print_rows(args: Namespace) -> None:
    """Measure and print; write crops to listen to first, if asked."""
    from speakerlab.bench.data import write_crops
    from speakerlab.bench.training import in_micro_batches, open_training
    from speakerlab.core.atomic import write_text
    from speakerlab.experiments.setup import start_rank

    start, rows, configs = time.monotonic(), [], read_configs(args)
    ranks = start_rank(next(iter(configs.values())))
    configs = {name: in_micro_batches(config, ranks) for name, config in configs.items()}
    logging.getLogger().setLevel(logging.WARNING)  # not what each training would do
    if args.listen is not None:
        config = next(iter(configs.values()))
        with open_training(config, ranks, has_data=args.config is not None) as training:
            write_crops(training, args.listen, count=LISTEN_CROPS)
        print(f"{args.listen}: {LISTEN_CROPS} crops, their augmentation is in crops.tsv")
    if not args.seconds:
        return
    print(headline(ranks.device), flush=True)
    for row in measure(args, configs, ranks):
        print(row.line(), flush=True)
        rows.append(asdict(row))
    print(f"{time.monotonic() - start:.0f} s in all")
    if args.json is not None:
        write_text(args.json, json.dumps(rows, indent=1) + "\n")


def measure(args: Namespace, configs: "Mapping[str, Config]", ranks: "Ranks") -> "Iterator[Row]":
    """Yield the rows of the machine, of each model, and of the data path of the first model."""
    from speakerlab.bench.data import data_rows
    from speakerlab.bench.machine import machine_rows
    from speakerlab.bench.training import inference_row, open_training, train_row

    seconds, has_data = args.seconds, args.config is not None
    if args.what in ("all", "machine"):
        yield from machine_rows(ranks.device, seconds=2 * seconds)
    if args.what in ("all", "model", "train"):
        for name, config in configs.items():
            with open_training(config, ranks, has_data=has_data) as training:
                yield train_row(training, name, seconds=seconds)
                if args.what != "train":
                    yield inference_row(training, name, seconds=seconds)
    if args.what in ("all", "data"):
        with open_training(next(iter(configs.values())), ranks, has_data=has_data) as training:
            yield from data_rows(training, seconds=seconds)


def headline(device: "torch.device") -> str:
    """Return the versions, device and threads of the measurements."""
    import torch

    from speakerlab.core import process

    what = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    cpus, threads = process.available_cpus(), torch.get_num_threads()
    return f"torch {torch.__version__}, {what}, {threads} threads, {cpus} CPUs"


def read_configs(args: Namespace) -> "dict[str, Config]":
    """Return configurations by the name of the model: of `--config`, or of each `--model`."""
    from speakerlab.config.schema import load_config

    if args.config is not None:
        config = load_config(args.config, args.set)
        return {config.model.name: config}
    return {name: load_config([Path(name)], args.set) for name in args.model}


def parse(words: Sequence[str]) -> Namespace:
    options = parser("bench", __doc__)
    options.epilog = "Comparison with other toolkits: make bench, in a clone (docs/hardware.md)."
    parts = "all (default): machine, model, data; model: training, inference; train: training only"
    options.add("what", parts, nargs="?", choices=PARTS, default="all")
    what = options.add_mutually_exclusive_group()
    models = f"conf/NAME.yaml, with synthetic data (default: {' '.join(MODELS)})"
    options.add("--model NAME", models, group=what, nargs="+", default=MODELS)
    config = "configuration files; need data directories: --set data.dir=DIR"
    options.add("--config YAML", config, group=what, nargs="+")
    options.add_settings("as in train, e.g. runtime.micro_batch=32 runtime.precision=bf16")
    seconds = "approximate time per measurement; 0: measure nothing"
    options.add("--seconds SECONDS", seconds, least=0.0, default=2.0)
    options.add("--listen DIR", "write ten augmented crops as wav")
    options.add("--json FILE", "write the results")
    options.add("--profile", "profile training steps (needs `train` and --config)")
    options.add("--steps N", "steps to profile", least=1, default=10)
    options.add("--trace FILE", "write a Chrome trace of the profile")
    options.add("--exp DIR", "new folder for the profiled training (default: a temporary one)")
    args = options.parse_args(words)
    if args.profile and (args.what != "train" or args.config is None):
        options.error("--profile: needs `train` and --config")
    return args
