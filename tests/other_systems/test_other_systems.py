"""Inference on macOS and Windows, pretended on Linux: what Python lacks there is hidden.

What this cannot show: libraries in C, file systems, consoles and GPUs of those systems.
"""

import json
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
from make_world import make_world
from refusals import refuses
from used_there import NOT_IMPORTED, find_problems

import speakerlab
from speakerlab.checkpoints.hub import local

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Libraries in C, and what they import lazily: they choose their files by the system.
IMPORTS = """numpy scipy.linalg scipy.signal scipy.special scipy.stats torch torch.utils.data
soundfile soxr safetensors.torch pydantic yaml tqdm tensorboard"""
# With data workers, which each import torch.
SYSTEMS = [pytest.param("darwin", marks=pytest.mark.slow), "win32"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    world = tmp_path_factory.mktemp("world")
    make_world(world)
    return world


@pytest.fixture(scope="module", params=SYSTEMS)
def used(request, world, tmp_path_factory) -> dict:
    """Return what used_there.py reports from a system."""
    folder = tmp_path_factory.mktemp(request.param)
    finished = subprocess.run(
        [sys.executable, HERE / "used_there.py", world],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
            "PRETENDED_SYSTEM": request.param,
            "PRETENDED_IMPORTS": " ".join(IMPORTS.split()),
        },
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    # Such as a leaked semaphore, of which Python warns where processes are not forked.
    assert "Warning" not in finished.stderr, finished.stderr
    return {**json.loads(finished.stdout), "folder": folder}


def test_every_module_is_imported(used):
    assert used["system"] != "linux"
    assert used["start method"] == "spawn"
    names = [line.partition(":")[0] for line in used["not imported"]]
    assert names == NOT_IMPORTED[used["system"]]


def test_embeddings_and_scores_are_those_of_linux(used, world):
    wavs = sorted((world / "wav").iterdir())
    model = speakerlab.load(world / "exp")
    np.testing.assert_allclose(used["embedding"], model.embed(wavs[0]), atol=1e-6)
    score = model.verify(wavs[0], wavs[1]).score
    assert used["api score"] == pytest.approx(score, abs=1e-6)
    assert f"score: {score:.6f}" in used["verify"]
    assert used["ids"] == "spk0-0\nspk0-1\n"


def test_a_data_directory_is_checked_packed_extracted_and_scored(used, world):
    for name in ("check", "pack", "extract"):
        assert "Error" not in used[name], used[name]
    wavs = [world / f"wav/{name}.wav" for name in used["extracted ids"]]
    assert len(wavs) == 6
    embedded = speakerlab.load(world / "exp").embed_many(wavs)
    np.testing.assert_allclose(used["extracted"], embedded, atol=1e-6)
    assert "cosine" in used["score"], used["score"]
    (row,) = json.loads((used["folder"] / "exp/results.json").read_text())
    assert row["num_target"] == 3
    assert row["num_nontarget"] == 12


def test_spawned_workers_read_what_forked_ones_do(used):
    if used["system"] != "darwin":
        pytest.skip("Linux cannot spawn data workers as Windows does")
    np.testing.assert_allclose(used["with workers"], used["extracted"], atol=1e-6)


def test_what_needs_linux_says_so_in_a_line(used):
    for name in ("train", "two processes"):
        (line,) = used[name].splitlines()
        assert "Linux only" in line
    assert "training: runs on Linux only" in used["doctor"]


def test_a_lock_excludes_others_until_it_is_closed(used):
    # POSIX locks do not exclude the process that holds them.
    is_windows = used["system"] == "win32"
    assert used["locks"] == [True, not is_windows, True]


def test_a_wrong_result_is_a_problem(used, world):
    assert find_problems(used, world) == []
    wrong = {**used, "embedding": [0.0] * 16, "pack": "ValueError: a"}
    problems = find_problems(wrong, world)
    assert [line.partition(":")[0] for line in problems] == ["pack", "embedding"]


@pytest.mark.parametrize("name", ["hub:no-such-model", "hf:owner-only"])
def test_a_path_of_windows_may_be_the_name_of_a_model(name):
    """Commands read --model as a path, whose slashes Windows turns around."""
    with pytest.raises(ValueError, match=name):
        local(PureWindowsPath(name))  # pyright: ignore[reportArgumentType]


def test_a_drive_is_not_the_name_of_a_model():
    with refuses(r"C:\models\exp", error=FileNotFoundError):
        speakerlab.load(r"C:\models\exp")


@pytest.mark.parametrize(
    "path", [r"C:\my data #1", r"D:/data: old", r"\\server\share # 2", "/data # 3"]
)
def test_a_path_in_a_setting_is_taken_literally(path, make_config):
    config = make_config(f"data.dir={path}")
    assert str(config.data.dir) == path
