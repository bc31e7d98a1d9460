"""ResNet: 1x1 convolutions do not stride."""

import torch
from torch import nn

from speakerlab.models.resnet import Bottleneck, ResNet


@torch.no_grad()
def test_no_1x1_convolution_strides():
    """The places are left out before it; the values are those of one that does."""
    model = ResNet(depth=50, m_channels=2)
    model.eval()
    for module in model.modules():
        if not isinstance(module, nn.Conv2d):
            continue
        if module.kernel_size == (1, 1):
            assert module.stride == (1, 1)

    block = model.layer2[0]
    assert isinstance(block, Bottleneck)
    x_BCFT = torch.randn(2, 8, 7, 9)

    # The published block: its 1x1 convolution of the shortcut has a stride of 2.
    _, conv, norm = block.shortcut
    weight = conv.get_parameter("weight")
    strided_BCFT = nn.functional.conv2d(x_BCFT, weight, stride=2)
    shortcut_BCFT = norm(strided_BCFT)
    y_BCFT = block.conv1(x_BCFT)
    y_BCFT = block.bn1(y_BCFT).relu()
    y_BCFT = block.conv2(y_BCFT)
    y_BCFT = block.bn2(y_BCFT).relu()
    y_BCFT = block.conv3(y_BCFT)
    y_BCFT = block.bn3(y_BCFT)
    expected_BCFT = (y_BCFT + shortcut_BCFT).relu()
    torch.testing.assert_close(block(x_BCFT), expected_BCFT)
