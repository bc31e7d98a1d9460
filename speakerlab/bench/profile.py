"""Where a training step's time goes. In: the `Config` of a training. Out: a table and a trace.

It is a training that is looked at: built, and its steps taken, as `speakerlab train` does. Some
steps warm up, some are timed, and as many more are taken under torch's profiler. It makes
small operators slower, so on a CPU the table is that of the steps that are timed.
"""

import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from speakerlab.bench.profile_table import Profile, make_rows
from speakerlab.bench.profile_trace import (
    Shares,
    events_of,
    measure_shares,
    read_events,
    with_reduce_of,
)
from speakerlab.bench.timing import synchronise
from speakerlab.config.schema import Config
from speakerlab.core import process
from speakerlab.core.regions import Span, timed
from speakerlab.experiments.train import Training, build_training
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.distributed import Ranks, start_ranks
from speakerlab.training.precision import apply_backend_settings
from speakerlab.training.signals import Signals

WARM_UP = 5  # steps: threads and workers start, kernels are chosen, memory is taken
NEVER = 1 << 40  # steps
FOLDER = Path(__file__).parents[2]  # files of the package are told from here


def profile_training(
    config: Config, *, exp_dir: Path | None, num_steps: int, trace: Path | None
) -> Profile:
    """Train for so many steps, and tell where the time of a steady one goes.

    One process, or each rank under torchrun: all must call it; each has the whole profile. What a
    training does now and then (validation, checkpoints) is left out. exp_dir: where the training
    writes, in a folder that is removed if it is None. trace: where the Chrome trace is written;
    ranks other than the first add their number to its name.
    Raises ValueError for no steps, and for an experiment that was begun, which stays what it is.
    """
    if num_steps < 1:
        raise ValueError(f"profile: at least one step must be looked at, got {num_steps}; give 10")
    if exp_dir is not None and was_begun(exp_dir):
        raise ValueError(
            f"{exp_dir}: a training has begun here, got its checkpoints; give another folder"
        )
    conv_tf32 = config.runtime.tf32 == "auto"
    apply_backend_settings(deterministic=config.runtime.deterministic, conv_tf32=conv_tf32)
    ranks = start_ranks(timeout_minutes=config.runtime.timeout_minutes)
    folder = exp_dir or Path(ranks.on_first(lambda: tempfile.mkdtemp(prefix="speakerlab-")))
    signals = Signals(lambda number: process.leave(process.stopped(number)))
    try:
        parts = build_training(folder, None, prepared(config, num_steps), ranks, signals)
        watch = Watch(num_steps, ranks.device)
        take_steps(parts, watch)
    finally:
        if exp_dir is None and ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
    return _profile(config.model.name, parts, watch, ranks, trace)


def prepared(config: Config, num_steps: int) -> Config:
    """The same training, long enough, and with none of its steps different from the others."""
    training = config.training
    changed = {
        "num_epochs": max(training.num_epochs, WARM_UP + 3 * num_steps + 2),  # of a step at least
        "checkpoint_every_steps": NEVER,
        "freeze_epochs": 0.0,
    }
    return config.model_copy(update={"training": training.model_copy(update=changed)})


def take_steps(parts: Training, watch: "Watch") -> None:
    """Take the steps of all phases of the watch."""
    trainer = parts.trainer
    trainer.validation = None
    trainer.start()
    trainer.open()
    try:
        for _ in watch.phases:
            with record_function("step"):
                trainer.take_step()
    finally:
        trainer.close()


class Watch:
    """Times and traces the steps of a training; take one for each of its `phases`."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self.num_steps, self.device = num_steps, device
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self.profiler = profile(activities=activities)
        self.step_seconds = 0.0
        self.spans: list[Span] = []  # regions of the steps that are timed
        self.blocking = Counter[str]()  # by line of code
        self.phases = self._phases()

    def _phases(self) -> Iterator[str]:
        for _ in range(WARM_UP):
            yield "warm up"
        synchronise(self.device)
        began = time.perf_counter()
        with timed() as self.spans:
            for _ in range(self.num_steps):
                yield "time"
            synchronise(self.device)
        self.step_seconds = (time.perf_counter() - began) / self.num_steps
        if self.device.type == "cuda":
            with blocking_lines(self.blocking):
                for _ in range(self.num_steps):
                    yield "count"
        with running(self.profiler):
            for _ in range(1 + self.num_steps):  # in the first the profiler itself begins
                yield "trace"
            synchronise(self.device)


@contextmanager
def running(profiler: profile) -> Iterator[None]:
    """The profiler, for so long, without torch's warning on cycles of which there is one here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profiler.start()
    try:
        yield
    finally:
        profiler.stop()


@contextmanager
def blocking_lines(found: Counter[str]) -> Iterator[None]:
    """Count, by line of code, what torch's sync-debug mode warns of: calls that wait for a GPU.

    What is waited for by name (an event, the whole device) is not among them.
    """
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in told:
        if "synchroniz" in str(warning.message):
            path = Path(warning.filename)
            inside = path.relative_to(FOLDER) if path.is_relative_to(FOLDER) else path
            found[f"{inside}:{warning.lineno}"] += 1


def rank_trace(trace: Path, rank: int) -> Path:
    """`trace.json` of rank 0; `trace.rank1.json` of the next."""
    stem, dot, suffix = trace.name.partition(".")
    return trace.with_name(f"{stem}.rank{rank}{dot}{suffix}") if rank else trace


def _shares(watch: Watch, trace: Path) -> Shares:
    """Write the trace, and read it."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    watch.profiler.export_chrome_trace(str(trace))
    traced = measure_shares(read_events(trace), num_steps=watch.num_steps)
    if watch.device.type == "cuda":  # only the trace tells when it computes
        return traced
    own = measure_shares(events_of(watch.spans), num_steps=watch.num_steps)
    return with_reduce_of(own, traced)


def _profile(
    model: str, parts: Training, watch: Watch, ranks: Ranks, trace: Path | None
) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        path = rank_trace(trace or Path(folder, "trace.json"), ranks.rank)
        own = _shares(watch, path)
    shares = ranks.every(own)
    facts, plan, count = parts.facts, parts.trainer.plan, watch.num_steps
    return Profile(
        what=f"{model} on {facts['device']}, {facts['precision']}, {plan}",
        num_steps=count,
        rows=make_rows([each.of_a_step(count) for each in shares]),
        plain_step_seconds=watch.step_seconds,
        traced_step_seconds=own.traced_seconds / count,
        crops=plan.global_batch,
        rank=ranks.rank,
        world_size=ranks.world_size,
        on_gpu=ranks.device.type == "cuda",
        syncs=own.syncs,
        blocking=watch.blocking,
        traces=[rank_trace(trace, rank) for rank in range(ranks.world_size)] if trace else [],
    )
