"""ReDimNet: precision of the norm, and the frequency weights.

Letters: B batch, T frames, C channels, F frequency bins, H hidden.
"""

import pytest
import torch

from speakerlab.models.redimnet import ChannelNorm, FrequencyWeights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_channel_norm_of_large_values_is_computed_in_fp32(dtype):
    # The mean over the channels is 0, the deviation 1000.
    two_channels = torch.tensor([1000.0, -1000.0])
    x_BCT = two_channels.view(1, 2, 1).repeat(1, 4, 5)
    x_BCT = x_BCT.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y_BCT = ChannelNorm(8)(x_BCT)
    assert y_BCT.dtype == dtype
    torch.testing.assert_close(y_BCT, x_BCT / 1000)


@torch.no_grad()
def test_frequency_weights_scale_whole_bins():
    weights = FrequencyWeights(3, hidden=4)
    x_BCFT = torch.rand(2, 5, 3, 7) + 1
    ratio_BCFT = weights(x_BCFT) / x_BCFT
    mean_BF = x_BCFT.mean(3).mean(1)
    hidden_BH = weights.squeeze(mean_BF).relu()
    expected_BF = weights.exitation(hidden_BH).sigmoid()
    expected_BCFT = expected_BF[:, None, :, None].expand(2, 5, 3, 7)
    torch.testing.assert_close(ratio_BCFT, expected_BCFT)
