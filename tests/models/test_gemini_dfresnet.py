"""Gemini DF-ResNet: how time and frequency are divided, the depths, and the choice of pooling.

Letters: B batch, T frames, F mel bins, C channels.
"""

import torch

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
