"""Benchmark this machine, models on it, and the data path; write crops to listen to."""

import json
import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speakerlab.bin.command import parser
from speakerlab.core.system import limit_spinning

if TYPE_CHECKING:  # these import torch, which is slow: only for valid options
    import torch

    from speakerlab.bench.stopwatch import Row
    from speakerlab.config.schema import Config
    from speakerlab.training.distributed import Ranks

PARTS = ("all", "machine", "model", "train", "data")
MODELS = ["campplus", "eres2net"]
LISTEN_CROPS = 10


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    # As in all commands, also for other callers than the command line.
    limit_spinning()
    if not args.profile:
        print_rows(args)
        return
    from speakerlab.bench.profile import profile_training

    (config,) = read_configs(args).values()
    profile = profile_training(
        config,
        exp_dir=args.exp,
        num_steps=args.steps,
        trace=args.trace,
    )
    # Only the first rank returns lines.
    for line in profile.lines:
        print(line)


def print_rows(args: Namespace) -> None:
    """Print the measurements; first write crops to listen to, if requested."""
    from speakerlab.bench.data import write_crops
    from speakerlab.bench.training import in_micro_batches, open_training
    from speakerlab.core.atomic import write_text
    from speakerlab.experiments.hardware import start_rank

    start = time.monotonic()
    read = read_configs(args)
    first_config = next(iter(read.values()))
    ranks = start_rank(first_config)
    configs: dict[str, Config] = {}
    for name, config in read.items():
        configs[name] = in_micro_batches(config, ranks)
    # Otherwise each opened training logs its settings between the rows.
    logging.getLogger().setLevel(logging.WARNING)
    if args.listen is not None:
        has_data = args.config is not None
        config = next(iter(configs.values()))
        with open_training(config, ranks, has_data=has_data) as training:
            write_crops(training, args.listen, count=LISTEN_CROPS)
        print(
            f"{args.listen}: {LISTEN_CROPS} crops, their augmentation is in crops.tsv"
        )
    if not args.seconds:
        return

    rows: list[dict[str, Any]] = []
    print(headline(ranks.device), flush=True)
    for row in measure(args, configs, ranks):
        print(row.line(), flush=True)
        rows.append(asdict(row))
    print(f"{time.monotonic() - start:.0f} s in all")
    if args.json is not None:
        text = json.dumps(rows, indent=1)
        write_text(args.json, f"{text}\n")


def measure(
    args: Namespace, configs: "Mapping[str, Config]", ranks: "Ranks"
) -> "Iterator[Row]":
    """Yield the rows of the machine, of each model, and of the data path of the first model."""
    from speakerlab.bench.data import data_rows
    from speakerlab.bench.machine import machine_rows
    from speakerlab.bench.training import inference_row, open_training, train_row

    seconds = args.seconds
    # A model without configuration is measured on synthetic recordings.
    has_data = args.config is not None
    if args.what in ("all", "machine"):
        yield from machine_rows(ranks.device, seconds=2 * seconds)
    if args.what in ("all", "model", "train"):
        for name, config in configs.items():
            with open_training(config, ranks, has_data=has_data) as training:
                yield train_row(training, name, seconds=seconds)
                if args.what != "train":
                    yield inference_row(training, name, seconds=seconds)
    if args.what in ("all", "data"):
        first_config = next(iter(configs.values()))
        with open_training(first_config, ranks, has_data=has_data) as training:
            yield from data_rows(training, seconds=seconds)


def headline(device: "torch.device") -> str:
    """Return the versions, device and threads of the measurements."""
    import torch

    from speakerlab.core import system

    name = str(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    cpus = system.available_cpus()
    return f"torch {torch.__version__}, {name}, {threads} threads, {cpus} CPUs"


def read_configs(args: Namespace) -> "dict[str, Config]":
    """Return model name -> configuration, from `--config` or from each `--model`."""
    from speakerlab.config.schema import load_config

    if args.config is not None:
        config = load_config(args.config, args.set)
        return {config.model.name: config}
    configs: dict[str, Config] = {}
    for name in args.model:
        configs[name] = load_config([Path(name)], args.set)
    return configs


def parse(arguments: Sequence[str]) -> Namespace:
    options = parser("bench", __doc__)
    options.epilog = (
        "Comparison with other toolkits: make bench, in a clone (docs/hardware.md)."
    )
    parts = (
        "all (default): machine, model, data; model: training, inference; train:"
        " training only"
    )
    # Optional: with `?`, a missing argument takes the default.
    options.add("what", parts, nargs="?", choices=PARTS, default="all")
    configuration = options.add_mutually_exclusive_group()
    models = f"conf/NAME.yaml, with synthetic data (default: {' '.join(MODELS)})"
    options.add("--model NAME", models, group=configuration, nargs="+", default=MODELS)
    config = "configuration files; need data directories: --set data.dir=DIR"
    options.add("--config YAML", config, group=configuration, nargs="+")
    options.add_settings(
        "as in train, e.g. runtime.micro_batch=32 runtime.precision=bf16"
    )
    seconds = "approximate time per measurement; 0: measure nothing"
    options.add("--seconds SECONDS", seconds, least=0.0, default=2.0)
    options.add("--listen DIR", "write ten augmented crops as wav")
    options.add("--json FILE", "write the results")
    options.add("--profile", "profile training steps (needs `train` and --config)")
    options.add("--steps N", "steps to profile", least=1, default=10)
    options.add("--trace FILE", "write a Chrome trace of the profile")
    options.add(
        "--exp DIR", "new folder for the profiled training (default: a temporary one)"
    )
    args = options.parse_args(arguments)
    can_profile = args.what == "train" and args.config is not None
    if args.profile and not can_profile:
        options.error("--profile: needs `train` and --config")
    return args
