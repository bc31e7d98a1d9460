"""A tiny corpus made in a moment: data directories of harmonic voices."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from voices import RATE, make_noise, make_wave

from speakerlab.checkpoints.published import publish
from speakerlab.config import build
from speakerlab.config.embedder import Embedder
from speakerlab.config.schema import Config, load_config
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir

# What tests compute is small: on a busy machine a second thread makes them four times slower.
torch.set_num_threads(1)


@pytest.fixture
def make_data_dir(tmp_path: Path) -> Callable[..., Path]:
    """make_data_dir("train", speakers=[0, 1], seconds=[1.0, 1.5]) -> a checked data directory.

    Utterance `spk1-0` is the first of speaker 1 and as long as the first of `seconds`. The wavs lie
    in `wav/` beside the directory; `trials` are written as `trials`.
    """

    def make(
        name: str = "train",
        *,
        speakers: Sequence[int] = (0, 1, 2, 3),
        seconds: Sequence[float] = (1.0, 1.25, 1.5),
        suffix: str = ".wav",
        trials: Sequence[tuple[str, str, bool]] | None = None,
        check: bool = True,
    ) -> Path:
        wavs, owners = {}, {}
        (tmp_path / "wav").mkdir(exist_ok=True)
        for speaker in speakers:
            for take, duration in enumerate(seconds):
                utterance = f"spk{speaker}-{take}"
                wavs[utterance] = tmp_path / "wav" / f"{utterance}{suffix}"
                audio.write(wavs[utterance], make_wave(speaker, take, duration), RATE)
                owners[utterance] = f"spk{speaker}"
        folder = tmp_path / name
        lists = None if trials is None else {"trials": trials}
        write_data_dir(folder, wavs=wavs, speakers=owners, trials=lists)
        if check:
            check_data_dirs([folder])
        return folder

    return make


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
            embedder.train()(make_noise(1.0, rows=4))
        return embedder.eval()

    return make


@pytest.fixture
def publish_to(make_config, make_embedder, tmp_path: Path):
    """publish_to("a", classes=["x"]) -> (folder, embedder, head) of a model of `tmp_path/a`."""

    def make(name: str, *overrides: str, classes=("a", "b", "c")):
        config, embedder = make_config(*overrides), make_embedder(*overrides)
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
