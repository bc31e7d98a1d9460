"""ResNet: its depths, and what its pooling decides."""

import pytest
import torch
from torch import nn

from speakerlab.models.resnet import STAGES, Bottleneck, ResNet


@pytest.mark.parametrize("depth", STAGES)
def test_depth_counts_the_layers(depth):
    """The stem, the convolutions of the blocks but for shortcuts, and the embedding layer."""
    with torch.device("meta"):
        model = ResNet(depth=depth)
    convs = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and "shortcut" not in name
    ]
    assert len(convs) + 1 == depth


@pytest.mark.parametrize(
    ("pooling", "shortest", "stats"),
    [("tap", 1, 1), ("tsdp", 9, 1), ("tstp", 9, 2), ("astp", 9, 2), ("mqmhastp", 9, 4)],
)
def test_pooling_decides_the_shortest_input_and_the_width(pooling, shortest, stats):
    model = ResNet(depth=18, m_channels=2, embed_dim=5, pooling=pooling, feat_dim=41).eval()
    assert model.min_frames == shortest
    assert model.seg_1.in_features == stats * 8 * 2 * 6  # 41 bins: 21, 11, 6
    assert model(torch.randn(2, shortest, 41)).isfinite().all()


@torch.no_grad()
def test_no_1x1_convolution_strides():
    """The places are left out before it; the values are those of one that does."""
    model = ResNet(depth=50, m_channels=2).eval()
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(conv.stride == (1, 1) for conv in convs if conv.kernel_size == (1, 1))
    block, x_BCFT = model.layer2[0], torch.randn(2, 8, 7, 9)
    assert isinstance(block, Bottleneck)
    _, conv, norm = block.shortcut
    strided = nn.functional.conv2d(x_BCFT, conv.get_parameter("weight"), stride=2)
    y_BCFT = block.bn1(block.conv1(x_BCFT)).relu()
    y_BCFT = block.bn3(block.conv3(block.bn2(block.conv2(y_BCFT)).relu()))
    torch.testing.assert_close(block(x_BCFT), (y_BCFT + norm(strided)).relu())
