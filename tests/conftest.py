"""Fixtures for all tests: a corpus, a configuration and models that are made in a moment."""

import os
from collections.abc import Callable
from pathlib import Path

# What tests compute is small: on a busy machine a second thread makes them four times slower.
# NumPy's library reads this when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from voices import make_noise, write_voices

from speakerlab.checkpoints.published import publish
from speakerlab.config import build
from speakerlab.config.schema import Config, load_config
from speakerlab.embedder import Embedder

torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs_gpu = item.get_closest_marker("gpu")
    if needs_gpu and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def make_data_dir(tmp_path: Path) -> Callable[..., Path]:
    """make_data_dir("train", speakers=[0, 1], seconds=[1.0, 1.5]) -> a checked data directory."""
    return lambda name="train", **options: write_voices(tmp_path / name, **options)


SMALL = [
    "model={name: campplus, args: {embed_dim: 16, head_channels: 4, init_channels: 16, "
    "growth_rate: 4, blocks: [1, 1, 1]}}"
]


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """make_config("seed=1", ...) -> the defaults with a CAM++ of 16 dimensions and few layers."""

    def make(*overrides: str) -> Config:
        return load_config([], [*SMALL, *overrides])

    return make


@pytest.fixture
def make_embedder(make_config) -> Callable[..., Embedder]:
    """make_embedder("seed=1", ...) -> an embedder in eval mode whose BatchNorms have seen data."""

    def make(*overrides: str) -> Embedder:
        embedder = build.build_embedder(make_config(*overrides))
        with torch.no_grad():
            # moves the statistics of BatchNorm from their initial values
            embedder.train()(make_noise(1.0, rows=4))
        return embedder.eval()

    return make


@pytest.fixture
def publish_to(make_config, make_embedder, tmp_path: Path):
    """publish_to("a", classes=["x"]) -> (folder, embedder, head) of a model of `tmp_path/a`."""

    def make(name: str, *overrides: str, classes=("a", "b", "c")):
        config = make_config(*overrides)
        embedder = make_embedder(*overrides)
        head = build.build_head(config, embed_dim=16, num_classes=len(classes))
        publish(
            tmp_path / name,
            embedder=embedder,
            head=head.state_dict(),
            config=config,
            speakers=classes,
            facts={"steps": 7},
        )
        return tmp_path / name, embedder, head

    return make
