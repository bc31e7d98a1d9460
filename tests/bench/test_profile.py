"""The steps of real trainings, tiny ones: every part is in the table, and all add up."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from speakerlab.bench import profile
from speakerlab.bench.profile import profile_training
from speakerlab.bench.profile_table import EXPECTED, Profile, make_rows
from speakerlab.training.signals import Signals

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
    return [*TINY, f"data.dir={tmp_path}", "augment.room_prob=1.0", "augment.noise_prob=1.0"]


def numbers(lines):
    """Milliseconds and share, in percent, of each row of a table by name."""
    words = [line.split() for line in lines]
    rows = [w for w in words if any(word.endswith("%") for word in w[1:]) and w[0] != "without"]
    found = {}
    for row in rows:
        at = next(i for i, word in enumerate(row) if word.endswith("%"))
        found[" ".join(row[: at - 1])] = (float(row[at - 1]), float(row[at][:-1]))
    return found


def test_a_training_is_seen_part_by_part(make_config, settings, tmp_path):
    trace = tmp_path / "deep" / "trace.json"
    found = profile_training(make_config(*settings), exp_dir=None, num_steps=2, trace=trace)
    lines = found.lines()
    rows = numbers(lines)
    parts = ["data wait", "transfer", "front end", "forward", "backward", "reduce", "optimizer"]
    assert [row.name for row in found.rows if not row.depth] == [*parts, "host sync", "other"]
    inner = [row.name for row in found.rows if row.depth]
    assert inner[:6] == ["speed", "room", "noise", "fbank", "spec", "rest"]
    assert inner[7:10] == ["backbone", "head", "rest"]
    assert {"clip", "verdict", "update", "row of metrics", "wishes of ranks"} <= set(inner)
    assert rows["reduce"] == (0, 0)
    for name in ("data wait", "room", "noise", "fbank", "backbone", "head", "backward", "update"):
        assert rows[name][0] > 0, name
    assert rows["backward"][0] > rows["head"][0]
    assert rows["all"][1] == 100
    whole = sum(row.seconds for row in found.rows if not row.depth)
    assert whole == pytest.approx(found.plain_step_seconds, rel=0.05)
    # Between two steps there is next to nothing, so the parts are the steps.
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [event["dur"] for event in events if event.get("name") == "step"]
    assert len(steps) == 3
    assert found.traced_step_seconds == pytest.approx(sum(steps[1:]) / 2e6, rel=0.05)
    assert lines[0].startswith("campplus on cpu, fp32, global batch 4 = micro-batch 4 x 1 ranks")
    assert lines[-1] == f"{trace}: a trace for https://ui.perfetto.dev"


def test_nothing_of_it_is_left_behind(make_config, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    found = profile_training(make_config(*settings), exp_dir=None, num_steps=1, trace=None)
    assert not list((tmp_path / "temporary").iterdir())
    assert not torch.autograd._profiler_enabled() and not found.traces


def test_it_is_the_training_whose_steps_are_taken(make_config, settings, tmp_path):
    """The losses are those of the same training without a profiler."""

    def losses(exp):
        rows = map(json.loads, (exp / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows]

    config = make_config(*settings, "training.num_epochs=3")
    profile_training(config, exp_dir=tmp_path / "profiled", num_steps=1, trace=None)
    ranks = profile.start_ranks(timeout_minutes=1)
    assert ranks.world_size == 1
    exp = tmp_path / "plain"
    longer = profile.prepared(config, 1)
    parts = profile.build_training(exp, None, longer, ranks, Signals(lambda _number: None))
    trainer = parts.trainer
    trainer.validation = None
    trainer.start()
    trainer.open()
    for _ in range(profile.WARM_UP + 1 + 2):
        trainer.take_step()
    trainer.close()
    assert losses(tmp_path / "profiled") == losses(exp)
    assert len(losses(exp)) == profile.WARM_UP + 1 + 2


def test_a_begun_training_and_no_steps_are_refused(make_config, settings, tmp_path):
    note = tmp_path / "exp" / "checkpoints" / "step_00000002" / "note.json"
    note.parent.mkdir(parents=True)
    note.write_text("{}")
    config = make_config(*settings)
    with pytest.raises(ValueError, match="a training has begun here, got its checkpoints; give "):
        profile_training(config, exp_dir=tmp_path / "exp", num_steps=2, trace=None)
    with pytest.raises(ValueError, match="^profile: at least one step must be looked at, got 0;"):
        profile_training(config, exp_dir=None, num_steps=0, trace=None)


@pytest.mark.slow
def test_of_two_ranks_what_they_wait_for_is_seen(make_config, settings, tmp_path):
    from conftest import SMALL

    wide = SMALL[0].replace("embed_dim: 16", "embed_dim: 4096")  # so that there is to be reduced
    launch = ["-m", "speakerlab.bin.launch", "--standalone", "--nproc-per-node", "2"]
    script = ROOT / "tests" / "benching" / "profiled_ranks.py"
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path), wide, *settings],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "lines.txt").read_text().splitlines()
    rows = numbers(lines)
    assert rows["reduce"][0] > 0 and rows["backward"][0] > 0 and rows["all"][1] == 100
    assert "slowest rank" in lines[1]
    assert lines[-2:] == [
        f"{tmp_path}/{name}: a trace for https://ui.perfetto.dev"
        for name in ("trace.json", "trace.rank1.json")
    ]
    for name in ("trace.json", "trace.rank1.json"):
        assert "gloo:all_reduce" in (tmp_path / name).read_text()


def test_a_table_has_an_order_and_names_the_slowest_rank_and_what_waits():
    rows = make_rows(
        [
            (
                {
                    "step/other": 0.001,
                    "step/forward/head": 0.002,
                    "step/forward/backbone": 0.004,
                    "step/forward": 0.001,
                    "step/reduce": 0.002,
                },
                {"step/forward": 0.001},
            ),
            ({"step/reduce": 0.003, "step/forward/head": 0.001}, {}),
        ]
    )
    assert [(row.name, row.depth, row.seconds, row.most_seconds) for row in rows] == [
        ("forward", 0, pytest.approx(0.007), pytest.approx(0.007)),
        ("head", 1, 0.002, 0.002),
        ("backbone", 1, 0.004, 0.004),
        ("rest", 1, 0.001, 0.001),
        ("reduce", 0, 0.002, 0.003),
        ("other", 0, 0.001, 0.001),
    ]
    syncs = Counter({("cudaStreamSynchronize", "step/forward/head"): 4})
    lines = Profile(
        what="campplus",
        num_steps=2,
        rows=rows,
        plain_step_seconds=0.008,
        traced_step_seconds=0.01,
        crops=64,
        rank=0,
        world_size=2,
        on_gpu=True,
        syncs=syncs,
        blocking=Counter({"speakerlab/losses/sharded.py:132": 2}),
        traces=[],
    ).lines()
    assert lines[1].split() == ["ms", "a", "step", "share", "slowest", "rank", "GPU", "idle"]
    assert lines[2].split() == ["forward", "7.00", "70.0%", "7.00", "1.00"]
    assert lines[-5].split() == ["all", "10.00", "100.0%", "1.00"]
    assert lines[-4] == ("without the profiler: 8.0 ms a step, 8000.0 crops/s; under it 10.0 ms")
    assert lines[-2].split("(")[0] == "  2.00 cudaStreamSynchronize in step/forward/head "
    assert lines[-1] == "  1.00 at speakerlab/losses/sharded.py:132"


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["optimizer.name=sgd", "optimizer.name=adamw"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_steady_step_on_a_gpu_waits_for_nothing_but_the_step_before(
    make_config, settings, optimizer, precision
):
    """Rows of metrics, which are read at once, come less often than the steps that are seen.

    All is done to every crop: a new number of rows would have kernels chosen by trial, which waits.
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
    found = profile_training(config, exp_dir=None, num_steps=10, trace=None)
    # Where the debug mode sees an event waited for, it is the one of the verdict.
    assert not [line for line in found.blocking if "training/guard.py" not in line]
    assert found.syncs == {("cudaEventSynchronize", "step/host sync/verdict"): 10}
    assert found.syncs.keys() <= EXPECTED.keys()
