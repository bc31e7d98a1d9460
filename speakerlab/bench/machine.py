"""What a machine can do at most. In: a device. Out: `Machine`, rates of its simplest operations.

Matrix products bound what is computed, copies bound what is moved, decoding bounds what is read.
Each is the best of several repetitions, with as many threads as torch has.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from speakerlab.bench.made_up import RATE, make_voice
from speakerlab.bench.timing import block_seconds
from speakerlab.data import audio
from speakerlab.training.precision import DTYPES

MATRIX = {"cpu": 2048, "cuda": 8192}  # rows and columns
COPIED_BYTES = 1 << 28  # far more than caches hold
RECORDING_SECONDS = 20.0


@dataclass(frozen=True)
class Machine:
    """Rates of a device and its host. Matrix products in fp32 do not use TF32."""

    device: str
    threads: int
    matmul_gflops: dict[str, float]  # by precision; 10^9 operations a second
    copy_gb_per_second: float  # read and written, 10^9 bytes
    decode_seconds_per_second: dict[str, float]  # wav, flac: seconds of 16-kHz audio, by one core


def measure_machine(device: torch.device, *, precisions: Sequence[str], seconds: float) -> Machine:
    """Measure for so many seconds in all. precisions: of fp32, bf16 and fp16."""
    share = seconds / (len(precisions) + 3)
    return Machine(
        device=str(device),
        threads=torch.get_num_threads(),
        matmul_gflops={name: matmul_gflops(device, name, seconds=share) for name in precisions},
        copy_gb_per_second=copy_gb_per_second(device, seconds=share),
        decode_seconds_per_second=decode_rates(seconds=share),
    )


def matmul_gflops(device: torch.device, precision: str, *, seconds: float) -> float:
    """10^9 operations a second of a product of square matrices."""
    size = MATRIX[device.type]
    a, b = torch.randn(2, size, size, device=device).to(DTYPES[precision])
    out = torch.empty_like(a)
    return 2e-9 * size**3 / best(lambda: torch.mm(a, b, out=out), device, seconds)


def copy_gb_per_second(device: torch.device, *, seconds: float) -> float:
    """10^9 bytes a second that a copy reads and writes."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2e-9 * COPIED_BYTES / best(lambda: target.copy_(source), device, seconds)


def decode_rates(*, seconds: float) -> dict[str, float]:
    """Seconds of audio that one core decodes in a second, from files in the system's cache."""
    wave_S = make_voice(np.random.default_rng(0), pitch_hz=120.0, seconds=RECORDING_SECONDS)
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("wav", "flac"):
            path = Path(folder) / f"voice.{kind}"
            audio.write(path, wave_S, RATE)
            took = best(lambda path=path: audio.read(path), torch.device("cpu"), seconds)
            rates[kind] = RECORDING_SECONDS / took
    return rates


def best(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of a call when nothing hinders it."""
    return min(block_seconds(work, device=device, seconds=seconds))
