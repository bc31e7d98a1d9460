"""The limits of a machine: rates of its simplest operations, with torch's threads.

Matrix products bound computing, copies bound moving data, decoding bounds reading. Each is the best
of several repetitions.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from speakerlab.bench import synthetic
from speakerlab.bench.stopwatch import Row, block_seconds
from speakerlab.data import audio
from speakerlab.training.precision import DTYPES

MATRIX = {"cpu": 2048, "cuda": 8192}  # rows and columns
COPIED_BYTES = 1 << 28  # far more than caches hold
CPU = torch.device("cpu")


def machine_rows(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """Measure for so many seconds in all."""
    share = seconds / 5
    size = MATRIX[device.type]
    for precision in ("fp32", "bf16"):
        a, b = torch.randn(2, size, size, device=device).to(DTYPES[precision])
        out = torch.empty_like(a)
        took = best(partial(torch.mm, a, b, out=out), device, share)
        rate = 2e-9 * size**3 / took
        yield Row(name=f"machine.matmul.{precision}", ours=rate, unit="GFLOP/s", note="no TF32")
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    rate = 2e-9 * COPIED_BYTES / best(lambda: target.copy_(source), device, share)
    yield Row(name="machine.copy", ours=rate, unit="GB/s", note="read and written")
    with tempfile.TemporaryDirectory() as folder:
        _, wave_S = next(synthetic.voices())
        for kind in ("wav", "flac"):
            path = Path(folder, f"voice.{kind}")
            audio.write(path, wave_S, synthetic.RATE)
            rate = synthetic.SECONDS / best(lambda path=path: audio.read(path), CPU, share)
            note = "16 kHz, one core"
            yield Row(name=f"machine.decode.{kind}", ours=rate, unit="s of audio/s", note=note)


def best(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest block of calls."""
    return min(block_seconds(work, device=device, seconds=seconds))
