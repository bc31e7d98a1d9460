"""CAM++: the mask per segment.

Letters: B batch, T frames, C channels, S segments.
"""

import pytest
import torch
from refusals import refuses
from torch import Tensor
from torch.nn import functional as F

from speakerlab.models.campplus import CAMPPlus, ContextAwareMasking, segments_of

TINY = {
    "embed_dim": 12,
    "init_channels": 16,
    "growth_rate": 8,
    "blocks": (2, 2, 2),
    "head_channels": 4,
    "head_blocks": (1, 1),
}


def context_per_frame(x_BCT: Tensor) -> Tensor:
    """Mean of all frames plus mean of the frame's segment, for every frame."""
    means = []
    for segment_BCT in x_BCT.split(100, dim=-1):
        mean_BC1 = segment_BCT.mean(-1, keepdim=True)
        means.append(mean_BC1.expand_as(segment_BCT))
    mean_of_all_BC1 = x_BCT.mean(-1, keepdim=True)
    return mean_of_all_BC1 + torch.cat(means, dim=-1)


def masked_per_frame(layer: ContextAwareMasking, x_BCT: Tensor) -> Tensor:
    context_BCT = context_per_frame(x_BCT)
    hidden_BCT = F.relu(layer.linear1(context_BCT))
    mask_BCT = torch.sigmoid(layer.linear2(hidden_BCT))
    return layer.linear_local(x_BCT) * mask_BCT


@pytest.mark.parametrize("frames", [1, 2, 99, 100, 101, 149, 200, 250, 1000])
def test_mask_per_segment_is_the_mask_per_frame_to_rounding(frames):
    torch.manual_seed(frames)
    layer = ContextAwareMasking(32, 8, kernel_size=3, dilation=2)
    x_BCT = torch.randn(3, 32, frames).relu().requires_grad_()
    ours = layer(x_BCT, segments_of(x_BCT, 100))
    expected = masked_per_frame(layer, x_BCT)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)

    weight = torch.randn_like(expected)
    our_loss = (ours * weight).sum()
    expected_loss = (expected * weight).sum()
    (our_grad,) = torch.autograd.grad(our_loss, x_BCT)
    (expected_grad,) = torch.autograd.grad(expected_loss, x_BCT)
    torch.testing.assert_close(our_grad, expected_grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mask_of_large_values_is_computed_in_fp32(dtype):
    # The sums over the frames, 1e5, are outside fp16.
    x_BCT = torch.full((1, 2, 150), 1000.0, dtype=dtype)
    layer = ContextAwareMasking(2, 4, kernel_size=1, dilation=1)
    contexts = []

    def note_context(_module, inputs):
        (context_BCS,) = inputs
        contexts.append(context_BCS)

    layer.linear1.register_forward_pre_hook(note_context)
    with torch.autocast("cpu", dtype):
        output = layer(x_BCT, segments_of(x_BCT, 100))
    assert output.dtype == dtype
    context_BCS = contexts[0]
    assert context_BCS.dtype == torch.float32
    # The mean of all frames and the segment's mean are 1000 each.
    error = context_BCS[0, :, :2] - 2000
    assert error.abs().max() < 0.01


def test_blocks_need_a_kernel_and_a_dilation_each():
    with refuses("CAMPPlus", "(4, 4)"):
        CAMPPlus(blocks=(4, 4))
