"""A model in several threads, and in processes that get it pickled; forks: test_fork.py."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_on_disk import CALIBRATION, publish_small, publish_xvector
from voices import make_wave

import speakerlab

NUM_THREADS = 8
LENGTHS = (0.4, 0.9, 1.3, 1.7, 2.6)  # seconds; two windows of an x-vector


def make_waves() -> list[np.ndarray]:
    return [make_wave(number, 0, seconds) for number, seconds in enumerate(LENGTHS)]


def check_in_threads(model: Any, calls: list[Any]) -> None:
    """Each call returns in eight threads at once what it returns alone."""
    alone = [call() for call in calls]
    # Each thread begins with another call.
    orders: list[list[int]] = []
    for first in range(NUM_THREADS):
        orders.append([(first + number) % len(calls) for number in range(len(calls))])

    def run(order: list[int]) -> list[tuple[int, Any]]:
        return [(number, calls[number]()) for number in order]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for results in pool.map(run, orders):
            for number, result in results:
                for value, value_alone in zip(result, alone[number]):
                    assert np.array_equal(value, value_alone)


@pytest.mark.parametrize("overrides", [(), ("vad={}",)])
def test_eight_threads_get_what_one_gets(
    tmp_path, make_config, make_embedder, overrides
):
    exp = publish_small(
        tmp_path / "exp", make_config(*overrides), make_embedder(*overrides)
    )
    model = speakerlab.load(exp, device="cpu")
    waves = make_waves()
    calls: list[Any] = [
        lambda: model.embed_many(waves),
        lambda: model.embed_windows(waves[-1], window=0.5, step=0.25),
        # Frames are noted by a hook, which the passes of other threads see too.
        lambda: model.frames(waves[2]),
        lambda: (model.verify(waves[2], waves[3]).score,),
    ]
    calls += [lambda wave_S=wave_S: (model.embed(wave_S),) for wave_S in waves]
    check_in_threads(model, calls)


def embed_all(model: Any) -> np.ndarray:
    return model.embed_many(make_waves())


def check_copies(model: Any) -> None:
    """A pickled copy has the same embeddings, calibration and speakers."""
    of_model_ND = embed_all(model)
    model.enroll("ann", make_waves()[3])
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert np.array_equal(embed_all(copied), of_model_ND)
        assert copied.sha256 == model.sha256
        assert copied.calibration == model.calibration
        assert copied.identify(make_waves()[3]).name == "ann"


def check_spawned(model: Any) -> None:
    """A process that is started anew gets the model pickled."""
    of_model_ND = embed_all(model)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        of_process_ND = pool.submit(embed_all, model).result(timeout=120)
    # It may have another number of threads.
    assert np.allclose(of_process_ND, of_model_ND, rtol=1e-5, atol=1e-6)


def test_a_pickled_model_has_the_same_embeddings(tmp_path):
    exp = publish_xvector(tmp_path / "exp", CALIBRATION)
    check_copies(speakerlab.load(exp, device="cpu"))


@pytest.mark.slow
def test_a_spawned_process_has_the_same_embeddings(tmp_path):
    exp = publish_xvector(tmp_path / "exp")
    check_spawned(speakerlab.load(exp, device="cpu"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from speakerlab.inference.export import export_onnx

    folder = tmp_path_factory.mktemp("exported")
    exp = publish_xvector(folder / "exp", CALIBRATION)
    return export_onnx(exp, folder / "a.onnx")


@pytest.mark.slow
def test_an_exported_model_is_shared_too(exported, monkeypatch):
    # Also if the folder of the program changes.
    monkeypatch.chdir(exported.parent)
    model = speakerlab.load("a.onnx")
    monkeypatch.chdir("/")
    waves = make_waves()
    calls: list[Any] = [
        lambda: model.embed_many(waves),
        lambda: model.embed_windows(waves[-1], window=0.5, step=0.25),
    ]
    check_in_threads(model, calls)
    check_copies(model)
    check_spawned(model)
