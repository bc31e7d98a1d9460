"""Measure which micro-batches fit, in a separate process that may run out of memory.

That process is `speakerlab.bin.probe`. It prints a line for each size that ran, so that the result
is known even if it is killed.
"""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from speakerlab.config import build
from speakerlab.config.schema import parse_config
from speakerlab.core import process
from speakerlab.training.precision import apply_backend_settings, resolve_precision
from speakerlab.training.rescue import is_out_of_memory

log = logging.getLogger(__name__)
MARGIN = 1.1  # a size must run with this many times its crops
STEPS = 3  # memory grows until momentum is there and kernels are chosen
TIMEOUT_SECONDS = 300.0  # then the largest size that has run is taken


@dataclass(frozen=True)
class MemoryProbe:
    """What is measured, in plain values."""

    config: dict[str, Any]
    num_classes: int
    precision: str
    device: str
    bank_bytes: int  # that noise and rooms will take on the device
    sizes: list[int]  # micro-batches, ascending

    def run(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
        """Return the largest size that runs, 0 for none; raise ValueError if the probe fails."""
        environment = {**os.environ, process.PARENT_VARIABLE: str(os.getpid())}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "speakerlab.bin.probe"],
                input=json.dumps(asdict(self)),
                capture_output=True,
                text=True,
                env=environment,
                timeout=timeout_seconds,
                check=False,
            )
            output, code, errors = done.stdout, done.returncode, done.stderr
        except subprocess.TimeoutExpired as late:
            partial: Any = late.stdout or b""
            output, code, errors = partial.decode(), 0, ""
            log.info("runtime.micro_batch: the probe was stopped after %g s", timeout_seconds)
        if code > 0:  # negative: a signal, which a host sends to a process that takes too much
            last = (errors.strip().splitlines() or ["nothing"])[-1]
            raise ValueError(
                f"runtime.micro_batch: the memory probe failed: {last}; use auto, or a number"
            )
        return max((int(line) for line in output.split()), default=0)

    def sizes_that_run(self) -> Iterator[int]:
        """Yield each size whose steps fit, until one does not."""
        config, device = parse_config(self.config), torch.device(self.device)
        apply_backend_settings(deterministic=config.runtime.deterministic)
        try:
            precision = resolve_precision(self.precision, device)
            task = build.build_task(config, num_classes=self.num_classes, precision=precision)
            task.to(device).train()
            banks = torch.zeros(self.bank_bytes, dtype=torch.uint8, device=device)
            optimizer = build.build_optimizer(config, task.parameters(), lr=1e-4)
            for size in self.sizes:
                rows = math.ceil(size * MARGIN)
                label_B = torch.zeros(rows, dtype=torch.int64, device=device)
                for _ in range(STEPS):
                    wave_BS = torch.randn(rows, build.crop_samples(config), device=device)
                    task(wave_BS, label_B, 0.0).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    if device.type == "cuda":  # a GPU otherwise reports its memory later
                        torch.cuda.synchronize(device)
                yield size
            del banks
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
