"""Limits of a machine: rates of its simplest operations, with torch's threads.

Matrix products are the upper bound of computing, copies of moving data, decoding of reading. Each
rate is the best of several repetitions.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from speakerlab.bench import synthetic
from speakerlab.bench.stopwatch import BLOCKS, Row, block_seconds, seconds_of
from speakerlab.data import audio
from speakerlab.training.precision import DTYPES

SMALLEST_MATRIX = 128  # rows and columns
LARGEST_MATRIX = {"cpu": 2048, "cuda": 8192}
CALLS = 2 + BLOCKS  # minimum number of calls of a measured product
COPIED_BYTES = 1 << 28  # far larger than caches
CPU = torch.device("cpu")
Work = Callable[[], object]  # one repetition


def machine_rows(device: torch.device, *, seconds: float) -> Iterator[Row]:
    """Yield the rates of this machine; the measurements take `seconds` in total."""
    share = seconds / 5
    for precision in ("fp32", "bf16"):
        size, multiply = largest_product(DTYPES[precision], device, share)
        product_seconds = best(multiply, device, share)
        # A product of two square matrices has size^3 multiplications and size^3 additions.
        yield Row(
            name=f"machine.matmul.{precision}",
            ours=2e-9 * size**3 / product_seconds,
            unit="GFLOP/s",
            note=f"{size} rows, no TF32",
        )

    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copy_seconds = best(lambda: target.copy_(source), device, share)
    # Each byte is read and written.
    yield Row(
        name="machine.copy",
        ours=2e-9 * COPIED_BYTES / copy_seconds,
        unit="GB/s",
        note="read and written",
    )

    with tempfile.TemporaryDirectory() as folder:
        _, wave_S = next(synthetic.voices())
        for ending in audio.ENDINGS:
            kind = ending.removeprefix(".")
            path = Path(folder, f"voice.{kind}")
            audio.write(path, wave_S, synthetic.RATE)
            # One core, like a data worker.
            decode = partial(audio.read, path)
            decode_seconds = best(decode, CPU, share)
            yield Row(
                name=f"machine.decode.{kind}",
                ours=synthetic.SECONDS / decode_seconds,
                unit="s of audio/s",
                note="16 kHz, one core",
            )


def largest_product(
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> tuple[int, Work]:
    """Return the largest size of square matrices that can be multiplied in time, and the call.

    Small matrices do not reach the rate of large ones. However, a processor without bf16
    instructions may need a minute for a product that takes 0.05 s on others.
    """

    def product(size: int) -> Work:
        left, right = torch.randn(2, size, size, device=device).to(dtype)
        # Write into an existing tensor, so that no allocation is timed.
        result = torch.empty_like(left)
        return partial(torch.mm, left, right, out=result)

    size = SMALLEST_MATRIX
    multiply = product(size)
    seconds_of(multiply, device)  # the first call warms up
    while size < LARGEST_MATRIX[device.type]:
        # Doubling the size multiplies the work by eight.
        seconds_of_next = 8 * seconds_of(multiply, device)
        if CALLS * seconds_of_next > seconds:
            break
        size *= 2
        multiply = product(size)
    return size, multiply


def best(work: Work, device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest block of calls."""
    # Other processes can only make a block slower.
    blocks = block_seconds(work, device=device, seconds=seconds)
    return min(blocks)
