"""Try micro-batches on this device; started by a training with `runtime.micro_batch: probe`."""

import json
import sys
from collections.abc import Sequence

import torch

from speakerlab.bin.command import run
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.core.batch import Batch
from speakerlab.experiments import setup as setup_training
from speakerlab.experiments.memory_probe import Trial, sizes_that_run


def main(_words: Sequence[str]) -> None:
    """`python -m speakerlab.bin.probe`: a `Trial` as JSON in, a line for each size that ran out."""
    process.die_with_launcher()
    trial = Trial(**json.load(sys.stdin))

    def batch_of(config: Config, num_rows: int) -> Batch:
        return setup_training.throw_away_batch(config, torch.device(trial.device), num_rows)

    for size in sizes_that_run(trial, batch_of):
        print(size, flush=True)


if __name__ == "__main__":
    run(main, sys.argv[1:])
