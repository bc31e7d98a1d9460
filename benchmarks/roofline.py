"""What this machine can do at most: the limits beside which the other figures stand.

    python benchmarks/roofline.py --json FILE

In: a device. Out: a line and a row for each limit, {"name", "ours", "peer", "ratio", "unit"},
without a peer: matrix products by number format, copies in memory, and seconds of audio that one
core decodes in a second. The models' own convolutions are timed beside the models (models.py), each
row of which has its `share`. `speakerlab bench` measures the same.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rows import report, write_rows
from sides import ROOT, Measured

sys.path.insert(0, str(ROOT))
from speakerlab.bench.machine import Machine, measure_machine


def rows(machine: Machine) -> Iterator[tuple[str, float, str]]:
    """(name, value, unit) of each limit."""
    for precision, rate in machine.matmul_gflops.items():
        yield f"machine.matmul.{precision}", rate, "GFLOP/s"
    yield "machine.copy", machine.copy_gb_per_second, "GB/s"
    for kind, rate in machine.decode_seconds_per_second.items():
        yield f"machine.decode.{kind}", rate, "s of audio/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="default: what torch takes")
    parser.add_argument("--seconds", type=float, default=20.0, help="in all")
    parser.add_argument("--peer", type=Path, nargs="*", help="has no such thing: left alone")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    machine = measure_machine(
        torch.device(options.device), precisions=["fp32", "bf16"], seconds=options.seconds
    )
    found: list[dict[str, Any]] = [
        report(name, Measured(value, None, None, None), unit=unit)
        for name, value, unit in rows(machine)
    ]
    write_rows(options.json, found)


if __name__ == "__main__":
    main()
