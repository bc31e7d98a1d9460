"""A profile as people read it. In: seconds of each region on each rank. Out: rows, lines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speakerlab.bench.profile_trace import STEP

# The parts of a step in the order of the table; what bears another name comes before the last.
ORDER = ("data wait", "transfer", "front end", "forward", "backward", "reduce", "optimizer")
LAST = ("host sync", "other")
REST = "rest"  # of a part whose other time is in parts of its own
# Synchronisations that are meant, by call and region.
EXPECTED = {
    ("cudaEventSynchronize", "step/host sync/verdict"): "that of the step before, long computed",
    ("cudaStreamSynchronize", "step/host sync/row of metrics"): "a row each log_every_steps",
    ("cudaEventSynchronize", "step/host sync/row of metrics"): "a row each log_every_steps",
}


@dataclass(frozen=True)
class Row:
    """One part of a step, or (depth 1) a part of a part."""

    name: str
    depth: int
    seconds: float  # a step, on rank 0; a part includes its own parts
    most_seconds: float  # on the rank where it is longest
    idle_seconds: float  # the part in which a GPU had nothing to do, on rank 0


@dataclass(frozen=True)
class Profile:
    """Where the time of a training's steps goes; the seconds of the rows of depth 0 add up."""

    what: str  # model, device, precision, batch
    num_steps: int
    rows: list[Row]
    plain_step_seconds: float  # without the profiler
    traced_step_seconds: float  # under it
    crops: int  # a step, of all ranks
    rank: int
    world_size: int
    on_gpu: bool
    syncs: Counter[tuple[str, str]]  # of rank 0, in all steps: (call, region)
    blocking: Counter[str]  # lines of code that torch's sync-debug mode named, likewise
    traces: list[Path]

    @property
    def step_seconds(self) -> float:
        """That the table tells of: under the profiler on a GPU, without it on a CPU."""
        return sum(row.seconds for row in self.rows if row.depth == 0)

    def lines(self) -> list[str]:
        """The table, a line a part; then what else was found. None on ranks but the first."""
        if self.rank:
            return []
        plain, traced = self.plain_step_seconds, self.traced_step_seconds
        found = [
            f"{self.what}; {self.num_steps} steps",
            *self._table(),
            f"without the profiler: {1e3 * plain:.1f} ms a step, {self.crops / plain:.1f} crops/s; "
            f"under it {1e3 * traced:.1f} ms",
        ]
        if self.on_gpu:
            found += self._sync_lines()
        return [*found, *(f"{path}: a trace for https://ui.perfetto.dev" for path in self.traces)]

    def _table(self) -> list[str]:
        heads = ["ms a step", "share"]
        heads += ["slowest rank"] * (self.world_size > 1) + ["GPU idle"] * self.on_gpu
        idle = sum(row.idle_seconds for row in self.rows if not row.depth)
        whole = Row("all", 0, self.step_seconds, 0.0, idle)
        lines = [f"{'':22}" + "".join(f"{head:>13}" for head in heads)]
        for row in [*self.rows, whole]:
            cells = [f"{1e3 * row.seconds:.2f}", f"{row.seconds / self.step_seconds:.1%}"]
            if self.world_size > 1:
                cells.append("" if row is whole else f"{1e3 * row.most_seconds:.2f}")
            if self.on_gpu:
                cells.append(f"{1e3 * row.idle_seconds:.2f}")
            name = "  " * row.depth + row.name
            lines.append(f"{name:22}" + "".join(f"{cell:>13}" for cell in cells))
        return lines

    def _sync_lines(self) -> list[str]:
        """What the host waited for the device with, a step."""
        lines = []
        for (call, region), count in self.syncs.most_common():
            why = EXPECTED.get((call, region), "unexpected: the device runs dry")
            lines.append(f"  {count / self.num_steps:.2f} {call} in {region} ({why})")
        for place, count in self.blocking.most_common():
            lines.append(f"  {count / self.num_steps:.2f} at {place}")
        return [f"host synchronisations a step: {'' if lines else 'none'}", *lines]


Spent = tuple[Mapping[str, float], Mapping[str, float]]  # seconds, idle seconds by region


def make_rows(ranks: Sequence[Spent]) -> list[Row]:
    """Rows of what each rank spent in a step, rank 0's first; parts of parts in its order."""
    regions = dict.fromkeys(region for seconds, _ in ranks for region in seconds)
    tops: dict[str, list[str]] = {}
    for region in sorted(regions, key=_place):
        tops.setdefault(_parts(region)[0], []).append(region)
    rows: list[Row] = []
    for top, below in tops.items():
        rows.append(_row(top, 0, ranks, below))
        if len(below) > 1:
            rows += [_row(_parts(region)[1], 1, ranks, [region]) for region in below]
    return rows


def _row(name: str, depth: int, ranks: Sequence[Spent], regions: Sequence[str]) -> Row:
    each = [sum(seconds.get(region, 0.0) for region in regions) for seconds, _ in ranks]
    idle = sum(ranks[0][1].get(region, 0.0) for region in regions)
    return Row(name, depth, each[0], max(each), idle)


def _parts(region: str) -> tuple[str, str]:
    """`step/forward/head` -> forward, head; what has no name in a part is the rest of it."""
    top, _, inner = region.removeprefix(f"{STEP}/").partition("/")
    return top, inner or REST


def _place(region: str) -> tuple[int, bool]:
    """What regions are sorted by, which leaves the parts of a part as they come."""
    top, inner = _parts(region)
    order = [*ORDER, *([] if top in LAST or top in ORDER else [top]), *LAST]
    return order.index(top), inner == REST
