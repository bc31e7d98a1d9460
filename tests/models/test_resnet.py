"""ResNet: 1x1 convolutions do not stride."""

import torch
from torch import nn

from speakerlab.models.resnet import Bottleneck, ResNet


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
