"""The steps of real trainings, tiny ones: every part is in the table, and all add up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refuses

from speakerlab.bench.profile import profile_training, region_seconds

ROOT = Path(__file__).parents[2]
TINY = [
    "data.crop_seconds=0.6",
    "data.valid_speakers=0",
    "training.global_batch=4",
    "training.num_epochs=1",
    "runtime.log_every_steps=1",
    "runtime.num_workers=0",
    "runtime.precision=fp32",
]


@pytest.fixture
def settings(make_data_dir, tmp_path):
    """Settings of a training on twelve recordings, three steps an epoch, with noise and rooms."""
    make_data_dir("train")
    make_data_dir("noise", speakers=[8, 9], seconds=[1.0])
    make_data_dir("rirs", speakers=[6, 7], seconds=[0.5])
    return [
        *TINY,
        f"data.dir={tmp_path}",
        "augment.room_prob=1.0",
        "augment.noise_prob=1.0",
    ]


@pytest.mark.slow
def test_a_training_is_profiled_part_by_part(
    make_config, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    trace = tmp_path / "deep" / "trace.json"
    config = make_config(*settings)
    profile = profile_training(config, exp_dir=None, num_steps=2, trace=trace)
    assert not list((tmp_path / "temporary").glob("speakerlab-*"))

    (seconds,) = profile.regions
    assert list(seconds)[0] == "step"
    assert list(seconds)[-1] == "step/other"
    parts = ("data wait", "front end/room", "front end/noise", "forward")
    for part in (*parts, "forward/head"):
        assert seconds[f"step/{part}"] > 0, part
    assert seconds["step/backward"] > seconds["step/forward/head"]
    assert {"step/optimizer/clip", "step/optimizer/update"} <= seconds.keys()

    lines = profile.lines
    assert lines[0].startswith("campplus on cpu, fp32, global batch 4")
    assert lines[1].split() == ["ms", "a", "step", "share"]
    table = "\n".join(lines)
    assert "aten::convolution" in table
    assert "Self CPU time total" in table

    assert lines[-1] == f"{trace}: a trace for https://ui.perfetto.dev"
    events = json.loads(trace.read_text())["traceEvents"]
    assert len([event for event in events if event.get("name") == "step"]) == 2


def test_a_begun_training_is_refused(make_config, settings, tmp_path):
    note = tmp_path / "exp" / "checkpoints" / "step_00000002" / "note.json"
    note.parent.mkdir(parents=True)
    note.write_text("{}")
    config = make_config(*settings)
    with refuses(str(tmp_path / "exp")):
        profile_training(config, exp_dir=tmp_path / "exp", num_steps=2, trace=None)


@pytest.mark.slow
def test_two_ranks_each_have_a_column_and_a_trace(settings, tmp_path):
    """As docs/training.md has it, with torchrun."""
    launch = ["-m", "speakerlab", "launch", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "speakerlab", "bench", "train", "--profile", "--steps", "2"]
    arguments += ["--trace", str(tmp_path / "trace.json"), "--config", "campplus_tiny"]
    done = subprocess.run(
        [sys.executable, *launch, *arguments, "--set", *settings],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "slowest rank" in lines[1]
    (step_line,) = [line for line in lines if line.startswith("step ")]
    _, milliseconds, _, milliseconds_of_slowest = step_line.split()
    assert float(milliseconds_of_slowest) >= float(milliseconds)
    for line, name in zip(lines[-2:], ("trace.json", "trace.rank1.json")):
        assert line == f"{tmp_path / name}: a trace for https://ui.perfetto.dev"
        assert "gloo:all_reduce" in (tmp_path / name).read_text()


def test_parts_are_summed():
    def event(key, *, cpu, device=0.0):
        """An average of torch's profiler; times in microseconds."""
        return SimpleNamespace(key=key, cpu_time_total=cpu, device_time_total=device)

    averages = [
        event("step", cpu=10e6),
        event("aten::mm", cpu=5e6),
        event("step/host sync/row", cpu=2e6),
        event("step/forward", cpu=1.5e6),
        event("step/forward/head", cpu=1e6),
        # The device is slower than the host.
        event("step/backward", cpu=1e6, device=6e6),
    ]
    assert region_seconds(averages, num_steps=2) == {
        "step": 5.0,
        "step/host sync/row": 1.0,
        "step/forward": 0.75,
        "step/forward/head": 0.5,
        "step/backward": 3.0,
        "step/other": 0.25,
    }


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["optimizer.name=sgd", "optimizer.name=adamw"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_steady_step_on_a_gpu_waits_once(make_config, settings, optimizer, precision):
    """For the verdict on the step before; rows of metrics come less often than the steps.

    Every crop is augmented: a new number of rows would have kernels chosen by trial, which waits.
    """
    config = make_config(
        *settings,
        optimizer,
        "augment.speeds=[1.0]",
        "augment.telephone_prob=1.0",
        "augment.codec_prob=1.0",
        "runtime.log_every_steps=1000",
        f"runtime.precision={precision}",
    )
    profile = profile_training(config, exp_dir=None, num_steps=10, trace=None)
    # The profiler itself waits at both ends.
    profile.waits.pop("cudaDeviceSynchronize", None)
    assert profile.waits == {"cudaEventSynchronize": 1.0}
