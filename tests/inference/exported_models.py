"""Small models of each architecture, as the tests of exports for other programs need them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from models_on_disk import publish_small
from torch import nn
from voices import make_wave

from speakerlab.config.build import build_embedder
from speakerlab.config.schema import load_config
from speakerlab.data import audio

RATE = 16000
XVECTOR = (
    "{name: xvector, args: {embed_dim: 12, hidden_channels: 16, stats_channels: 24}}"
)
CAMPPLUS = (
    "{name: campplus, args: {embed_dim: 12, init_channels: 16, growth_rate: 8, bn_size:"
    " 2, blocks: [1, 2, 1], head_channels: 4}}"
)
ERES2NET = (
    "{name: eres2net, args: {embed_dim: 12, m_channels: 4, blocks: [1, 1, 1, 1]}}"
)
RESNET34 = "{name: resnet, args: {embed_dim: 12, depth: 34, m_channels: 4}}"

with_each_model = pytest.mark.parametrize(
    "model",
    [
        XVECTOR,
        pytest.param(CAMPPLUS, marks=pytest.mark.slow),
        pytest.param(ERES2NET, marks=pytest.mark.slow),
        pytest.param(RESNET34, marks=pytest.mark.slow),
    ],
)


def publish_model(
    folder: Path, model: str, *settings: str, layers: Sequence[Path]
) -> Path:
    """Write an experiment with random weights whose BatchNorm spreads voices apart."""
    config = load_config(layers, [f"model={model}", *settings])
    embedder = build_embedder(config)
    for module in embedder.modules():
        is_norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
        if is_norm:
            module.momentum = None  # the mean over all batches
    voices = [make_wave(speaker, 0, 1.0) for speaker in range(4)]
    wave_BS = torch.tensor(np.stack(voices)) / 32768
    with torch.no_grad():
        embedder.train()(wave_BS)
    return publish_small(folder / "exp", config, embedder.eval())


def write_waves(folder: Path, waves: Sequence[np.ndarray]) -> list[Path]:
    """Write recordings at 16 kHz; return their paths."""
    paths: list[Path] = []
    for number, wave_S in enumerate(waves):
        path = folder / f"{number}.wav"
        audio.write(path, wave_S, RATE)
        paths.append(path)
    return paths


def require_close(
    emb_D: np.ndarray, expected_D: np.ndarray, allowed: float = 1e-3
) -> None:
    """Compare by the largest error over the largest value.

    Random weights amplify the rounding of the features; trained ones do not.
    """
    error_D = np.abs(emb_D - expected_D)
    largest = np.abs(expected_D).max()
    assert error_D.max() < allowed * largest
