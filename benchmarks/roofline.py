"""The limits of this machine: matrix products, copies in memory, decoding of audio.

    python benchmarks/roofline.py --json FILE

No peer has such a benchmark. `speakerlab bench machine` prints the same rows. The time of a model's
convolutions alone is the `share` of its rows (models.py).
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict

import torch
from rows import Row
from sides import run_case, say, wants

PEERS = ()
QUICK = ("--seconds=5",)


def compare(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of this machine."""
    from speakerlab.bench.machine import machine_rows

    if options.threads:
        torch.set_num_threads(options.threads)
    for row in machine_rows(torch.device(options.device), seconds=options.seconds):
        say(row.line())
        if wants(options, row.name):
            yield Row(**asdict(row))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, help="in all")


if __name__ == "__main__":
    run_case(__doc__, compare, add_options, peers=PEERS)
