"""Where the time of training steps went, from the events of torch's profiler.

In: a Chrome trace of steps that have `regions`. Out: seconds of each region, host synchronisations.

Each instant of the steps counts for one region, so that all regions together are their time:
1. While something is computed: on a GPU, for the region in which the host asked for it, whatever
   the busiest stream does before what others do beside it; on a CPU, for that the host is in.
2. Else, while a collective is under way, for `reduce`. What computing hides of it counts nowhere.
3. Else for the region that the host is in: on a GPU, the device has nothing to do.

Letters: S spans of time, P pieces of it between two neighbouring edges of any spans.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.core.regions import Span

STEP, BACKWARD, REDUCE, OTHER = "step", "step/backward", "step/reduce", "step/other"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")
COLLECTIVE = re.compile(r"nccl|^gloo:|^c10d::|^record_param_comms")
# Calls that return when the device has done what it was asked for; freeing memory is one of them.
SYNCHRONISES = re.compile(
    r"(cuda|cu|hip)((Device|Ctx|Stream|Event)Synchronize|Memcpy|Free|FreeHost|HostFree)(_v\d+)?"
)

Event = Mapping[str, Any]  # as in the trace: name, cat, tid, ts and dur in microseconds, args


@dataclass(frozen=True)
class Shares:
    """Of some steps."""

    seconds: dict[str, float]  # by region; what deeper ones have is left out
    idle_seconds: dict[str, float]  # the part of these in which a GPU had nothing to do
    syncs: Counter[tuple[str, str]]  # calls that wait for the device, by name and region
    traced_seconds: float  # under the profiler, all of them

    def of_a_step(self, num_steps: int) -> tuple[dict[str, float], dict[str, float]]:
        """(seconds, idle seconds) of the mean of so many steps."""
        of_all = (self.seconds, self.idle_seconds)
        seconds, idle = ({name: s / num_steps for name, s in each.items()} for each in of_all)
        return seconds, idle


def read_events(path: Path) -> list[Event]:
    """The events of a trace that have a duration; `path` may end with .gz."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def measure_shares(events: Iterable[Event], *, num_steps: int) -> Shares:
    """What the last `num_steps` steps of a trace were spent with."""
    events = list(events)
    regions = region_events(events)
    steps = [event for event in regions if event["name"] == STEP][-num_steps:]
    assert len(steps) == num_steps, f"the trace has {len(steps)} steps"
    begin: float = steps[0]["ts"]
    end = end_of(steps[-1])
    on_gpu = any(event.get("cat") in ON_DEVICE for event in events)
    work = device_work(events) if on_gpu else [e for e in events if e.get("cat") == "cpu_op"]
    computing = [event for event in work if not COLLECTIVE.search(event["name"])]
    collectives = [event for event in events if is_under_way(event, on_gpu)]
    timeline = Timeline(regions, [*computing, *collectives])
    asked_at = launch_times(events)
    computing_P, reducing_P = timeline.none(), timeline.none()
    host_P = timeline.host_P
    if on_gpu:
        asked = [asked_at.get(event["args"].get("correlation", -1), begin) for event in computing]
        timeline.paint(computing_P, computing, timeline.region_at(asked))
    else:
        timeline.paint(computing_P, computing, np.zeros(len(computing), int))
        computing_P = np.where(computing_P < 0, -1, host_P)
    timeline.paint(reducing_P, collectives, np.full(len(collectives), timeline.number[REDUCE]))
    if not on_gpu:  # all other collectives of the host are waited for in the region itself
        reducing_P[host_P != timeline.number.get(BACKWARD, -1)] = -1
    region_P = np.where(reducing_P < 0, host_P, reducing_P)
    region_P = np.where(computing_P < 0, region_P, computing_P)
    idle_P = (computing_P < 0) & (reducing_P < 0) & on_gpu
    inside_P = (timeline.edges[:-1] >= begin) & (timeline.edges[:-1] < end)
    return Shares(
        seconds=timeline.seconds(region_P, inside_P),
        idle_seconds=timeline.seconds(region_P, inside_P & idle_P),
        syncs=count_syncs(events, timeline, asked_at, begin, end),
        traced_seconds=(end - begin) * 1e-6,
    )


def events_of(spans: Iterable[Span]) -> list[Event]:
    """Regions that were timed without the profiler, as it has them in a trace."""
    shared = {"cat": "user_annotation", "tid": 0, "args": {}}
    return [
        {**shared, "name": name, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
        for name, begin, end in spans
    ]


def with_reduce_of(timed: Shares, traced: Shares) -> Shares:
    """Steps of a CPU as timed, and from a trace how long backward passes wait for other ranks."""
    seconds = dict(timed.seconds)
    waited = max(0.0, traced.seconds[REDUCE] - seconds[REDUCE])
    waited = min(waited, seconds.get(BACKWARD, 0.0))
    if waited:
        seconds[BACKWARD] -= waited
        seconds[REDUCE] += waited
    return replace(timed, seconds=seconds, traced_seconds=traced.traced_seconds)


class Timeline:
    """All edges of spans, and which region the host is in between each two of them."""

    def __init__(self, regions: Sequence[Event], others: Sequence[Event]) -> None:
        names = dict.fromkeys(event["name"] for event in regions if event["name"] != STEP)
        self.names = list(names | {OTHER: None, REDUCE: None})
        self.number = {name: index for index, name in enumerate(self.names)}
        self.number[STEP] = self.number[OTHER]
        every = [*regions, *others]
        edges = [event["ts"] for event in every] + [end_of(event) for event in every]
        self.edges = np.unique(np.array(edges))
        self.host_P = np.full(len(self.edges) - 1, self.number[OTHER])
        numbers = [self.number[event["name"]] for event in regions]
        self.paint(self.host_P, regions, np.array(numbers))

    def none(self) -> np.ndarray:
        """(P,) -1 everywhere."""
        return np.full(len(self.edges) - 1, -1)

    def paint(self, values_P: np.ndarray, spans: Sequence[Event], number_S: np.ndarray) -> None:
        """Set the values of the pieces in each span, in place; later spans count."""
        first_S = np.searchsorted(self.edges, [event["ts"] for event in spans])
        last_S = np.searchsorted(self.edges, [end_of(event) for event in spans])
        for first, last, number in zip(first_S, last_S, number_S):
            values_P[first:last] = number

    def region_at(self, times: Sequence[float]) -> np.ndarray:
        """Number of the region that the host is in at each time."""
        piece_S = np.searchsorted(self.edges, times, side="right") - 1
        return self.host_P[piece_S.clip(0, len(self.host_P) - 1)]

    def seconds(self, region_P: np.ndarray, counted_P: np.ndarray) -> dict[str, float]:
        """Of each region, in the pieces that are counted."""
        seconds_P = np.diff(self.edges) * counted_P * 1e-6
        total = np.bincount(region_P, seconds_P, minlength=len(self.names))
        return {name: float(value) for name, value in zip(self.names, total)}


def end_of(event: Event) -> float:
    return event["ts"] + event["dur"]


def region_events(events: Iterable[Event]) -> list[Event]:
    """Regions of the thread that takes the steps; what lies within another comes after it."""
    found = [
        event
        for event in events
        if event.get("cat") == "user_annotation"
        and (event["name"] == STEP or event["name"].startswith(f"{STEP}/"))
    ]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"], event["name"].count("/")))


def device_work(events: Iterable[Event]) -> list[Event]:
    """What runs on a GPU, that of the busiest stream last."""
    work = [event for event in events if event.get("cat") in ON_DEVICE]
    busy = Counter[Any]()
    for event in work:
        busy[event["tid"]] += event["dur"]
    return sorted(work, key=lambda event: busy[event["tid"]])


def is_under_way(event: Event, on_gpu: bool) -> bool:
    """Whether the event lasts as long as a collective: a kernel of nccl, or a thread of gloo."""
    kind = "kernel" if on_gpu else "user_annotation"
    return event.get("cat") == kind and bool(COLLECTIVE.search(event["name"]))


def launch_times(events: Iterable[Event]) -> dict[int, float]:
    """When the host asked for what runs on the device, by the number that both have."""
    calls = (event for event in events if event.get("cat") in CALLS)
    return {e["args"]["correlation"]: e["ts"] for e in calls if "correlation" in e["args"]}


def count_syncs(
    events: Iterable[Event],
    timeline: Timeline,
    asked_at: Mapping[int, float],
    begin: float,
    end: float,
) -> Counter[tuple[str, str]]:
    """Calls within the steps that wait for the device, and copies of memory that is not pinned."""
    found: list[tuple[str, float]] = []
    for event in events:
        name = event["name"]
        if event.get("cat") in CALLS and SYNCHRONISES.fullmatch(name):
            found.append((name, event["ts"]))
        elif event.get("cat") == "gpu_memcpy" and "Pageable" in name:
            found.append((name, asked_at.get(event["args"].get("correlation", -1), -1.0)))
    inside = [(name, at) for name, at in found if begin <= at < end]
    numbers = timeline.region_at([at for _, at in inside])
    return Counter((name, timeline.names[n]) for (name, _), n in zip(inside, numbers))
