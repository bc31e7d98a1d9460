"""Measure which micro-batches fit; started by a training with `runtime.micro_batch: probe`."""

import json
import sys
from collections.abc import Sequence

from speakerlab.bin.command import run
from speakerlab.core import process
from speakerlab.experiments.memory_probe import MemoryProbe


def main(_words: Sequence[str]) -> None:
    """`python -m speakerlab.bin.probe`: a `MemoryProbe` as JSON in; a line per size that ran."""
    process.die_with_launcher()
    for size in MemoryProbe(**json.load(sys.stdin)).sizes_that_run():
        print(size, flush=True)


if __name__ == "__main__":
    run(main, sys.argv[1:])
