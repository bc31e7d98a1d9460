"""Which micro-batches really fit: tried, in a process of its own that may run out of memory.

In: `Trial`. Out: the largest size that ran. The process is `speakerlab.bin.probe`; it tells each
size that ran as a line, so that whatever ends it, what is known is known.
"""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speakerlab.config import build
from speakerlab.config.schema import Config, parse_config
from speakerlab.core import process
from speakerlab.core.batch import Batch
from speakerlab.training.precision import apply_backend_settings, resolve_precision
from speakerlab.training.rescue import is_out_of_memory

log = logging.getLogger(__name__)
MARGIN = 1.1  # a size has to run with so much more
STEPS = 3  # memory grows until momentum is there and kernels are chosen
TIMEOUT_SECONDS = 300.0  # then the largest that has run is taken


@dataclass(frozen=True)
class Trial:
    """What is tried, in plain values."""

    config: dict[str, Any]
    num_classes: int
    precision: str
    device: str
    bank_bytes: int  # what noise and rooms will take of the device
    sizes: list[int]  # micro-batches, in rising order


def largest_that_runs(trial: Trial, *, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
    """Try the sizes in a process of its own; 0 if none ran. Raises ValueError if it cannot try."""
    environment = {**os.environ, process.PARENT_VARIABLE: str(os.getpid())}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "speakerlab.bin.probe"],
            input=json.dumps(asdict(trial)),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_seconds,
            check=False,
        )
        lines, code, told = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        output: Any = late.stdout or b""
        lines, code, told = output.decode(), 0, ""
        log.info("runtime.micro_batch: the trial took over %g s and was stopped", timeout_seconds)
    if code > 0:  # below zero: a signal, which is how a host ends who takes too much
        last = (told.strip().splitlines() or ["nothing"])[-1]
        raise ValueError(
            f"runtime.micro_batch: the trial failed, got '{last}'; use auto, or a number"
        )
    return max((int(line) for line in lines.split()), default=0)


def sizes_that_run(trial: Trial, batch_of: Callable[[Config, int], Batch]) -> Iterator[int]:
    """Each size whose steps fit, until one does not. batch_of: a batch of so many rows."""
    config, device = parse_config(trial.config), torch.device(trial.device)
    apply_backend_settings(deterministic=config.runtime.deterministic)
    try:
        precision = resolve_precision(trial.precision, device)
        task = build.build_task(config, num_classes=trial.num_classes, precision=precision)
        task.to(device).train()
        banks = torch.zeros(trial.bank_bytes, dtype=torch.uint8, device=device)
        optimizer = build.build_optimizer(config, task.parameters(), lr=1e-4)
        for size in trial.sizes:
            for _ in range(STEPS):
                _step(task, optimizer, batch_of(config, math.ceil(size * MARGIN)))
            yield size
        del banks
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise


def _step(task: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One whole step, ended before the next begins: a GPU else tells of its memory later."""
    features: Callable[[Batch], Tensor] = task.features  # pyright: ignore[reportAssignmentType]
    task(features(batch), batch.label_B, 0.0).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if batch.label_B.device.type == "cuda":
        torch.cuda.synchronize(batch.label_B.device)
