"""Traces made by hand, in whole milliseconds: whose each millisecond of a step is."""

import gzip
import json
import time

import pytest

from speakerlab.bench.profile_trace import (
    events_of,
    measure_shares,
    read_events,
    with_reduce_of,
)
from speakerlab.core.regions import region as part
from speakerlab.core.regions import timed

MAIN, GLOO = 1, 2  # threads
COMPUTE, SIDE, NCCL = 7, 20, 24  # streams


def event(cat, tid, begin, end, name, **args):
    """One event of a Chrome trace; milliseconds in, microseconds there."""
    return {
        "ph": "X",
        "cat": cat,
        "tid": tid,
        "ts": 1e3 * begin,
        "dur": 1e3 * (end - begin),
        "name": name,
        "args": args,
    }


def region(begin, end, name):
    return event("user_annotation", MAIN, begin, end, name)


def op(begin, end, name="aten::mm", tid=MAIN):
    return event("cpu_op", tid, begin, end, name)


def kernel(number, asked, begin, end, *, stream=COMPUTE, name="gemm", cat="kernel"):
    """What runs on the device, and the call that asked for it."""
    return [
        event("cuda_runtime", MAIN, asked, asked + 0.25, "cudaLaunchKernel", correlation=number),
        event(cat, stream, begin, end, name, correlation=number, stream=stream),
    ]


def milliseconds(seconds):
    return {name: round(1e3 * value, 6) for name, value in seconds.items() if value}


def test_on_a_cpu_time_is_that_of_the_innermost_region():
    shares = measure_shares(
        [
            region(0, 5, "step"),  # of a step that is not asked for
            region(10, 30, "step"),
            region(11, 13, "step/data wait"),
            region(14, 24, "step/front end"),
            region(15, 18, "step/front end/room"),
            op(16, 17),
            event("user_annotation", MAIN, 25, 27, "Optimizer.step#SGD.step"),
            event("user_annotation", GLOO, 11, 13, "gloo:all_reduce"),  # hidden by a wait for data
            op(28, 29),
        ],
        num_steps=1,
    )
    assert milliseconds(shares.seconds) == {
        "step/data wait": 2,
        "step/front end": 7,
        "step/front end/room": 3,
        "step/other": 8,
    }
    assert not any(shares.idle_seconds.values()) and not shares.syncs


def test_on_a_cpu_reduce_is_what_computing_does_not_hide():
    shares = measure_shares(
        [
            region(0, 20, "step"),
            region(2, 18, "step/backward"),
            op(2, 12, "AddmmBackward0"),
            op(9, 10, "c10d::allreduce_"),
            event("user_annotation", GLOO, 9, 16, "gloo:all_reduce"),
            op(13, 14, "AccumulateGrad"),
            region(18, 20, "step/reduce"),
        ],
        num_steps=1,
    )
    assert milliseconds(shares.seconds) == {"step/backward": 13, "step/reduce": 5, "step/other": 2}


def test_regions_are_timed_without_a_profiler_and_reduce_is_that_of_its_trace():
    with part("step"):
        pass  # nobody looks
    with timed() as spans, part("step"), part("step/backward"):
        time.sleep(0.05)
    assert [span.name for span in spans] == ["step/backward", "step"]
    own = measure_shares(events_of(spans), num_steps=1)
    assert 0.05 <= own.seconds["step/backward"] < 1
    traced = measure_shares(
        [
            region(0, 100, "step"),
            region(0, 100, "step/backward"),
            event("user_annotation", GLOO, 90, 100, "gloo:all_reduce"),
            op(0, 95),
        ],
        num_steps=1,
    )
    both = with_reduce_of(own, traced)
    assert both.seconds["step/reduce"] == pytest.approx(0.005)
    assert sum(both.seconds.values()) == pytest.approx(sum(own.seconds.values()))
    assert both.traced_seconds == pytest.approx(0.1)


def test_on_a_gpu_time_is_that_of_the_region_that_asked_and_then_of_the_host():
    """The host runs ahead: the forward pass is computed while it is elsewhere."""
    shares = measure_shares(
        [
            region(0, 20, "step"),
            region(0, 2, "step/forward"),
            region(2, 8, "step/backward"),
            region(8, 10, "step/front end"),
            region(10, 14, "step/data wait"),
            *kernel(1, 1, 3, 6),
            *kernel(2, 4, 6, 9),  # by backward
            *kernel(3, 9, 8, 10, stream=SIDE),  # a millisecond of which is hidden
            *kernel(4, 5, 9, 12, stream=NCCL, name="ncclDevKernel_AllReduce_Sum_f32"),
            *kernel(5, 13, 15, 20),  # data came late
        ],
        num_steps=1,
    )
    assert milliseconds(shares.seconds) == {
        "step/forward": 2 + 3,  # the device waits for two, then computes for three
        "step/backward": 1 + 3,
        "step/front end": 1,
        "step/reduce": 2,
        "step/data wait": 2 + 5,
        "step/other": 1,
    }
    assert milliseconds(shares.idle_seconds) == {
        "step/forward": 2,
        "step/backward": 1,
        "step/data wait": 2,
        "step/other": 1,
    }


def test_shares_add_up_to_the_steps():
    events = [region(0, 7, "step"), region(9, 20, "step"), *kernel(1, 1, 6, 12)]
    assert sum(measure_shares(events, num_steps=2).seconds.values()) == pytest.approx(20e-3)


def test_calls_that_wait_for_the_device_are_counted_with_their_region():
    def call(at, name):
        return event("cuda_runtime", MAIN, at, at + 1, name, correlation=100 + at)

    shares = measure_shares(
        [
            call(1, "cudaDeviceSynchronize"),  # before the steps
            region(5, 20, "step"),
            region(6, 12, "step/forward"),
            call(7, "cudaStreamSynchronize"),
            call(9, "cudaStreamSynchronize"),
            call(11, "cudaMemcpyAsync"),
            call(13, "cudaFree"),
            call(15, "cudaEventQuery"),
            *kernel(1, 10, 11, 12, name="Memcpy HtoD (Pageable -> Device)", cat="gpu_memcpy"),
            *kernel(2, 10, 12, 13, name="Memcpy HtoD (Pinned -> Device)", cat="gpu_memcpy"),
        ],
        num_steps=1,
    )
    assert shares.syncs == {
        ("cudaStreamSynchronize", "step/forward"): 2,
        ("cudaFree", "step/other"): 1,
        ("Memcpy HtoD (Pageable -> Device)", "step/forward"): 1,
    }


def test_traces_may_be_compressed(tmp_path):
    text = json.dumps({"traceEvents": [region(0, 1, "step"), {"ph": "M", "name": "process_name"}]})
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.json", "b.json.gz"):
        assert [e["name"] for e in read_events(tmp_path / name)] == ["step"]
