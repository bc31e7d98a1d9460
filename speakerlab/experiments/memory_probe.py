"""Measure which micro-batches fit, in a separate process that may run out of memory."""

import logging
import math
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from speakerlab.config import build
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.experiments import setup
from speakerlab.training.precision import apply_backend_settings, resolve_precision
from speakerlab.training.rescue import is_out_of_memory

log = logging.getLogger(__name__)
MARGIN = 1.1  # a size must run with this many times its crops
STEPS = 3  # memory grows until momentum is there and kernels are chosen
TIMEOUT_SECONDS = 300.0  # then the largest size that has run is taken


def largest_that_runs(config: Config, sizes: Sequence[int], **how: Any) -> int:
    """Return the largest of ascending micro-batches whose steps fit in memory, 0 for none.

    how: arguments of `_probe`. Raises ValueError if the probe fails.
    """
    context = get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    probe = context.Process(target=_probe, args=(sender, config, sizes), kwargs=how, daemon=True)
    probe.start()
    sender.close()
    largest, deadline = 0, time.monotonic() + TIMEOUT_SECONDS
    try:
        while results.poll(max(deadline - time.monotonic(), 0)):
            found = results.recv()
            if isinstance(found, str):
                raise ValueError(f"runtime.micro_batch: the memory probe failed: {found}")
            largest = found
        log.info("runtime.micro_batch: the probe was stopped after %g s", TIMEOUT_SECONDS)
    except EOFError:  # it ended, or the host killed it for the memory it took
        pass
    finally:
        probe.kill()
        probe.join()
    return largest


def _probe(
    results: Connection,
    config: Config,
    sizes: Sequence[int],
    *,
    num_classes: int,
    precision: str,
    device: torch.device,
    bank_bytes: int,  # of noise and rooms
) -> None:
    """Send each size that runs, until one does not; send an error as text."""
    process.die_with_parent()
    process.leave_signals_to_parent()
    runtime = config.runtime
    apply_backend_settings(deterministic=runtime.deterministic, conv_tf32=runtime.tf32 == "auto")
    try:
        used = resolve_precision(precision, device)
        task = build.build_task(config, num_classes=num_classes, precision=used)
        task.to(device).train()
        setup.choose_kernels(config, task)
        banks = torch.zeros(bank_bytes, dtype=torch.uint8, device=device)
        optimizer = build.build_optimizer(config, task.parameters(), lr=1e-4)
        for size in sizes:
            rows = math.ceil(size * MARGIN) * task.crops_each
            label_B = torch.zeros(rows, dtype=torch.int64, device=device)
            for _ in range(STEPS):
                wave_BS = torch.randn(rows, build.crop_samples(config), device=device)
                task(wave_BS, label_B, 0.0).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if device.type == "cuda":  # a GPU otherwise reports its memory later
                    torch.cuda.synchronize(device)
            results.send(size)
        del banks
    except Exception as error:  # sent to the parent, which raises it
        if not is_out_of_memory(error):
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            results.send(f"{line}; use auto, or a number")
