"""Profile training steps with torch's profiler: by part of the step and by operator.

A training is built and its steps are taken as `speakerlab train` does; validation and checkpoints
are left out. Some steps warm up, some are timed, as many are profiled. The profiler makes small
operators slower: the tables are of the profiled steps, the rate below them is without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from speakerlab.bench.stopwatch import seconds_of
from speakerlab.bench.training import open_training
from speakerlab.config.schema import Config
from speakerlab.experiments.setup import start_rank
from speakerlab.experiments.train import Training
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.distributed import Ranks

WARM_UP = 5  # steps: threads and workers start, kernels are chosen, memory is taken
NUM_OPERATORS = 20
STEP = "step"
# Calls of the GPU's runtime that wait for the device.
WAITS = ("Synchronize", "cudaMemcpy", "hipMemcpy", "cudaFree", "hipFree")


class Profile(NamedTuple):
    """Where the time of a training's steps goes."""

    lines: list[str]  # tables and rates as text; none on ranks but the first
    regions: Sequence[Mapping[str, float]]  # of each rank: part of the step -> seconds a step
    waits: dict[str, float]  # runtime calls that wait for the GPU, a step


def profile_training(
    config: Config, *, exp_dir: Path | None, num_steps: int, trace: Path | None
) -> Profile:
    """Train for so many steps and return where the time of a steady one goes.

    One process, or each rank under torchrun: all must call it. exp_dir: where the training writes;
    None: a temporary folder. trace: where the Chrome trace is written; ranks other than the first
    add their number to its name. Raises ValueError for an experiment with checkpoints.
    """
    if exp_dir is not None and was_begun(exp_dir):
        raise ValueError(f"{exp_dir}: already holds a training; choose another --exp")
    ranks = start_rank(config)
    with open_training(config, ranks, exp_dir=exp_dir) as training:
        return _profile(training, ranks, num_steps, trace)


def _profile(training: Training, ranks: Ranks, num_steps: int, trace: Path | None) -> Profile:
    """Take the steps."""
    trainer, device = training.trainer, ranks.device

    def step() -> None:
        with record_function(STEP):
            trainer.take_step()

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    trainer.open()
    with closing(trainer):
        for _ in range(WARM_UP):
            step()
        plain_seconds = seconds_of(step, device, calls=num_steps)
        with profile(activities=activities, acc_events=True) as profiler:
            seconds_of(step, device, calls=num_steps)
    averages, crops = profiler.key_averages(), trainer.plan.global_batch
    regions = ranks.every(region_seconds(averages, num_steps))
    waits = {
        event.key: event.count / num_steps
        for event in averages
        if event.key.startswith(("cuda", "hip")) and any(word in event.key for word in WAITS)
        if "Async" not in event.key
    }
    facts, name = training.facts, training.config.model.name
    what = f"{name} on {facts['device']}, {facts['precision']}, {trainer.plan}"
    rates = f"{1e3 * plain_seconds:.1f} ms a step, {crops / plain_seconds:.1f} crops/s"
    lines = [f"{what}; {num_steps} steps", *region_lines(regions), ""]
    lines += [operator_table(averages, on_gpu=device.type == "cuda")]
    lines += [f"without the profiler: {rates}"]
    lines += [f"waits for the GPU: {call}, {count:.2f} a step" for call, count in waits.items()]
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        stem, dot, suffix = trace.name.partition(".")
        names = [f"{stem}.rank{rank}{dot}{suffix}" for rank in range(1, ranks.world_size)]
        paths = [trace, *map(trace.with_name, names)]
        profiler.export_chrome_trace(str(paths[ranks.rank]))
        lines += [f"{path}: a trace for https://ui.perfetto.dev" for path in paths]
    return Profile(lines if ranks.is_first else [], regions, waits)


def region_lines(regions: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield a line for each part of a step, and a head."""
    slowest = ["slowest rank"] * (len(regions) > 1)
    yield f"{'':30}" + "".join(f"{head:>13}" for head in ("ms a step", "share", *slowest))
    for name, seconds in regions[0].items():
        cells = [f"{1e3 * seconds:.2f}", f"{seconds / regions[0][STEP]:.1%}"]
        cells += [f"{1e3 * max(rank.get(name, 0.0) for rank in regions):.2f}" for _ in slowest]
        yield f"{name.removeprefix(f'{STEP}/'):30}" + "".join(f"{cell:>13}" for cell in cells)


def region_seconds(averages: Any, num_steps: int) -> dict[str, float]:
    """Return the seconds a step of `step` and its parts, as they first begin, and `step/other`.

    On a GPU a part counts its time on the device where that is longer than the host's.
    """
    found: dict[str, float] = {}
    for event in averages:
        if event.key.partition("/")[0] == STEP:
            micros = max(event.cpu_time_total, event.device_time_total)
            found[event.key] = max(found.get(event.key, 0.0), 1e-6 * micros / num_steps)
    whole = found.pop(STEP)
    tops = [name for name in found if name.rpartition("/")[0] not in found]
    rest = max(0.0, whole - sum(found[name] for name in tops))
    return {STEP: whole, **found, f"{STEP}/other": rest}


def operator_table(averages: Any, *, on_gpu: bool) -> str:
    """Return torch's table of the operators that take the most time themselves."""
    operators = type(averages)(
        [e for e in averages if not e.key.startswith(("step", "cuda", "ProfilerStep"))],
        use_device="cuda" if on_gpu else None,
    )
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return operators.table(sort_by=sort_by, row_limit=NUM_OPERATORS, max_name_column_width=40)
