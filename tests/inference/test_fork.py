"""Models that are loaded before a process forks, as servers and `multiprocessing` do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models_on_disk import publish_small, publish_xvector
from refusals import refuses
from voices import RATE, make_wave

import speakerlab
from speakerlab.bin import export
from speakerlab.data import audio
from speakerlab.inference.torch_model import TorchModel

# With more threads than one, the parent has threads that its forks lack.
FORK = """
import multiprocessing, os, sys, threading
import numpy as np
import speakerlab
model = speakerlab.load(sys.argv[1], device=sys.argv[2])
file = sys.argv[3]
of_parent = model.embed(file)

def embed(number):
    return model.embed(file)

def embed_many():
    emb_ND = model.embed_many([file, file])
    assert np.allclose(emb_ND[0], of_parent, atol=1e-5), "another embedding"
    return emb_ND

child = os.fork()
if child == 0:
    # Also in a thread that begins after the fork, as those of a server.
    thread = threading.Thread(target=embed_many)
    embed_many()
    thread.start()
    thread.join()
    sys.stdout.flush()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status

with multiprocessing.get_context("fork").Pool(2) as pool:
    for emb_D in pool.map(embed, range(4)):
        assert np.allclose(emb_D, of_parent, atol=1e-5)
assert np.array_equal(model.embed(file), of_parent)
print("done")
"""


# The program itself uses torch, and only its child loads a model.
LATE = """
import os, sys
import torch
torch.set_num_threads(2)
square = torch.randn(600, 600)
square @ square
child = os.fork()
if child == 0:
    import speakerlab
    speakerlab.load(sys.argv[1], device=sys.argv[2]).embed(sys.argv[3])
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
print("done")
"""


def run_fork(
    model: Path, device: str, program: str = FORK, *, timeout: float = 60
) -> None:
    file = model.with_name("a.wav")
    audio.write(file, make_wave(0, 0, 3.0), RATE)
    finished = subprocess.run(
        [sys.executable, "-c", program, str(model), device, str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert finished.stdout == "done\n", finished.stderr


def test_a_model_embeds_after_a_fork(tmp_path):
    run_fork(publish_xvector(tmp_path / "exp"), "cpu")


def test_a_child_of_a_program_that_used_torch_loads_a_model(tmp_path):
    run_fork(publish_xvector(tmp_path / "exp"), "cpu", LATE)


@pytest.mark.slow
def test_an_exported_model_embeds_after_a_fork(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    exp = publish_xvector(tmp_path / "exp")
    export.main([str(exp), "--out", str(tmp_path / "a.onnx")])
    run_fork(tmp_path / "a.onnx", "auto")


# A pass holds locks that a forked process would find locked for ever.
DURING_A_PASS = """
import os, threading, time
from speakerlab.inference.passes import PASSES

events = []
has_begun = threading.Event()

def make_passes():
    with PASSES.running():
        has_begun.set()
        time.sleep(0.5)
        events.append("the first pass ends")
    with PASSES.running():
        events.append("the second pass")

thread = threading.Thread(target=make_passes)
thread.start()
has_begun.wait()
child = os.fork()
if child == 0:
    # The child has no pass in progress, and may make some and fork.
    with PASSES.running():
        pass
    if os.fork() == 0:
        os._exit(0)
    os._exit(7 if events == ["the first pass ends"] else 1)
thread.join()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert events == ["the first pass ends", "the second pass"], events
print("done")
"""


def test_a_fork_waits_for_the_passes_of_other_threads():
    command = [sys.executable, "-c", DURING_A_PASS]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.stdout == "done\n", finished.stderr


# Four threads embed while the program forks; without `PASSES`, one in some hundred hangs.
FORKS = """
import os, sys, threading
import numpy as np
import speakerlab
model = speakerlab.load(sys.argv[1], device=sys.argv[2])
wave_S = np.random.default_rng(0).normal(size=40000) / 10
of_parent = model.embed(wave_S)
is_done = threading.Event()

def embed_on(number):
    while not is_done.is_set():
        number = (number * 7 + 3) % 4001
        model.embed(wave_S[: 8000 + 8 * number])

threads = [threading.Thread(target=embed_on, args=[number]) for number in range(4)]
for thread in threads:
    thread.start()
for _ in range(100):
    child = os.fork()
    if child == 0:
        is_equal = np.allclose(model.embed(wave_S), of_parent, rtol=1e-4, atol=1e-5)
        os._exit(7 if is_equal else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
is_done.set()
for thread in threads:
    thread.join()
print("done")
"""


@pytest.mark.slow
def test_a_program_forks_while_its_threads_embed(tmp_path, make_config, make_embedder):
    exp = publish_small(tmp_path / "exp", make_config(), make_embedder())
    run_fork(exp, "cpu", FORKS, timeout=280)


def test_a_model_on_a_gpu_is_refused_after_a_fork(tmp_path, monkeypatch):
    """Without a GPU: only the name of the device is another, and no process is forked."""
    exp = publish_xvector(tmp_path / "exp")
    model = speakerlab.load(exp, device="cpu")
    runtime = model.runtime
    assert isinstance(runtime, TorchModel)
    monkeypatch.setattr(runtime, "device", torch.device("cuda"))
    monkeypatch.setattr(os, "getpid", lambda: 0)
    with refuses(str(exp), "load the model after the fork"):
        model.embed(make_wave(0, 0, 2.0))
