"""Profile training steps with torch's profiler: by part of the step and by operator.

The training is built and run as in `speakerlab train`, without validation and checkpoints. After
some steps of warm-up, some steps are timed, and the same number is profiled. The profiler slows
down small operators: the tables are from the profiled steps, the rate is from the timed steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from speakerlab.bench.stopwatch import seconds_of
from speakerlab.bench.training import open_training
from speakerlab.config.schema import Config
from speakerlab.core.counting import count_of
from speakerlab.experiments.hardware import start_rank
from speakerlab.experiments.train import Training
from speakerlab.training.checkpoint import was_begun
from speakerlab.training.distributed import Ranks

WARM_UP = 5  # steps: threads and workers start, kernels are chosen, memory is allocated
NUM_OPERATORS = 20
STEP = "step"
# Calls of the GPU's runtime that wait for the device.
WAITS = ("Synchronize", "cudaMemcpy", "hipMemcpy", "cudaFree", "hipFree")


class Profile(NamedTuple):
    """Time of a training's steps, by part."""

    lines: list[str]  # tables and rates as text; empty on ranks other than the first
    regions: Sequence[Mapping[str, float]]  # of each rank: part -> seconds per step
    waits: dict[str, float]  # runtime call that waits for the GPU -> number per step


def profile_training(
    config: Config,
    *,
    exp_dir: Path | None,
    num_steps: int,
    trace: Path | None,
) -> Profile:
    """Train for `num_steps` timed steps and return the time by part of a step.

    Under torchrun, all ranks must call it. exp_dir: folder of the training (None: a temporary
    folder). trace: path of the Chrome trace; ranks other than the first add their number to its
    name. Raises ValueError for an experiment with checkpoints.
    """
    if exp_dir is not None and was_begun(exp_dir):
        raise ValueError(f"{exp_dir}: already holds a training; choose another --exp")
    ranks = start_rank(config)
    with open_training(config, ranks, exp_dir=exp_dir) as training:
        plain_seconds, profiler = _run_steps(training, ranks, num_steps)
        averages = profiler.key_averages()
        # A step is as slow as the slowest rank, so the tables compare all ranks.
        regions = ranks.gather_objects(region_seconds(averages, num_steps))
        waits = waits_per_step(averages, num_steps)
        lines = [
            f"{config.model.name} on {ranks.device},"
            f" {training.trainer.task.precision.name}, {training.trainer.plan};"
            f" {count_of(num_steps, 'step')}",
        ]
        lines += region_lines(regions)
        lines.append("")
        lines.append(operator_table(averages, on_gpu=ranks.device.type == "cuda"))
        rate = training.trainer.plan.global_batch / plain_seconds
        lines.append(
            f"without the profiler: {1e3 * plain_seconds:.1f} ms a step,"
            f" {rate:.1f} crops/s"
        )
        for call, count in waits.items():
            lines.append(f"waits for the GPU: {call}, {count:.2f} a step")
        if trace is not None:
            lines += _write_traces(profiler, trace, ranks)
        return Profile(lines if ranks.is_first else [], regions, waits)


def _run_steps(
    training: Training, ranks: Ranks, num_steps: int
) -> tuple[float, profile]:
    """Warm up, time steps, profile steps; return the seconds of a timed step, and the profile."""
    trainer = training.trainer
    device = ranks.device

    def step() -> None:
        with record_function(STEP):
            trainer.take_step()

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    trainer.open()
    with closing(trainer):
        for _ in range(WARM_UP):
            step()
        plain_seconds = seconds_of(step, device, calls=num_steps)
        with profile(activities=activities, acc_events=True) as profiler:
            seconds_of(step, device, calls=num_steps)
    return plain_seconds, profiler


def _write_traces(profiler: profile, trace: Path, ranks: Ranks) -> list[str]:
    """Write the trace of this rank; return a line for that of each rank."""
    paths = trace_paths(trace, world_size=ranks.world_size)
    path = paths[ranks.rank]
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return [f"{path}: a trace for https://ui.perfetto.dev" for path in paths]


def waits_per_step(averages: Any, num_steps: int) -> dict[str, float]:
    """Return call of the GPU's runtime that waits for the device -> number per step."""
    waits: dict[str, float] = {}
    for event in averages:
        name = event.key
        is_runtime_call = name.startswith(("cuda", "hip"))
        may_wait = any(part in name for part in WAITS)
        if is_runtime_call and may_wait and "Async" not in name:
            waits[name] = event.count / num_steps
    return waits


def trace_paths(trace: Path, *, world_size: int) -> list[Path]:
    """Return the file of each rank: a.json, a.rank1.json, ..."""
    stem, dot, suffix = trace.name.partition(".")
    paths = [trace]
    for rank in range(1, world_size):
        paths.append(trace.with_name(f"{stem}.rank{rank}{dot}{suffix}"))
    return paths


def region_lines(regions: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Yield a header, and a line for each part of a step of the first rank."""
    first_rank = regions[0]
    has_others = len(regions) > 1
    headings = ["ms a step", "share"]
    if has_others:
        headings.append("slowest rank")
    yield _table_line("", headings)

    for name, seconds in first_rank.items():
        cells = [f"{1e3 * seconds:.2f}", f"{seconds / first_rank[STEP]:.1%}"]
        if has_others:
            slowest_seconds = max(rank.get(name, 0.0) for rank in regions)
            cells.append(f"{1e3 * slowest_seconds:.2f}")
        yield _table_line(name.removeprefix(f"{STEP}/"), cells)


def _table_line(name: str, cells: Sequence[str]) -> str:
    line = f"{name:30}"
    for cell in cells:
        line += f"{cell:>13}"
    return line


def region_seconds(averages: Any, num_steps: int) -> dict[str, float]:
    """Return the seconds per step of `step`, its parts in order of first start, and `step/other`.

    On a GPU, the time of a part is the longer of its times on the device and on the host.
    """
    seconds_of_part: dict[str, float] = {}
    for event in averages:
        part = event.key
        if part.partition("/")[0] == STEP:
            micros = max(event.cpu_time_total, event.device_time_total)
            seconds = 1e-6 * micros / num_steps
            earlier_seconds = seconds_of_part.get(part, 0.0)
            seconds_of_part[part] = max(earlier_seconds, seconds)

    # Parts may be nested: only the outermost parts add up to the step.
    step_seconds = seconds_of_part.pop(STEP)
    accounted = 0.0
    for part, seconds in seconds_of_part.items():
        parent = part.rpartition("/")[0]
        if parent not in seconds_of_part:
            accounted += seconds
    other_seconds = max(0.0, step_seconds - accounted)
    return {STEP: step_seconds, **seconds_of_part, f"{STEP}/other": other_seconds}


def operator_table(averages: Any, *, on_gpu: bool) -> str:
    """Return torch's table of the operators with the most time of their own."""
    # Exclude parts of the step, which contain operators, and runtime calls inside operators.
    not_operators = ("step", "cuda", "ProfilerStep")
    events: list[Any] = []
    for event in averages:
        if not event.key.startswith(not_operators):
            events.append(event)
    # torch's list type for events, which formats tables.
    make_list = type(averages)
    operators = make_list(events, use_device="cuda" if on_gpu else None)
    return operators.table(
        sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
        row_limit=NUM_OPERATORS,
        max_name_column_width=40,
    )
