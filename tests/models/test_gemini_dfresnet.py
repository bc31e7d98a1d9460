"""Gemini DF-ResNet: how time and frequency are divided, the depths, and the choice of pooling.

Letters: B batch, T frames, F mel bins, C channels.
"""

import pytest
import torch
from torch import nn

from speakerlab.models.gemini_dfresnet import GeminiDFResNet


@torch.no_grad()
def test_time_is_halved_once_and_frequency_four_times():
    model = GeminiDFResNet(depth=60, m_channels=2).eval()
    shapes = []
    for layer in model.downsample_layers:
        layer.register_forward_hook(
            lambda _module, _input, output: shapes.append(tuple(output.shape[1:]))
        )
    model(torch.randn(1, 101, 80))
    assert shapes == [(2, 80, 101), (2, 40, 101), (4, 20, 51), (8, 10, 51), (16, 5, 51)]


@pytest.mark.parametrize("depth", [60, 114, 183, 237])
def test_depth_is_the_number_of_layers(depth):
    with torch.device("meta"):
        model = GeminiDFResNet(depth=depth, m_channels=1)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


@pytest.mark.parametrize(
    ("pooling", "min_frames"), [("tap", 1), ("tstp", 3), ("astp", 3), ("mqmhastp", 3)]
)
@torch.no_grad()
def test_any_pooling_and_its_shortest_input(pooling, min_frames):
    model = GeminiDFResNet(depth=60, m_channels=4, embed_dim=6, pooling=pooling).eval()
    assert model.min_frames == min_frames
    for frames in (min_frames, 50):
        emb_BD = model(torch.randn(2, frames, 80))
        assert emb_BD.shape == (2, 6) and emb_BD.isfinite().all()
