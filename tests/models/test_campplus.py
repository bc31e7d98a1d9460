"""CAM++: the mask per segment, and recomputation in the backward pass.

Letters: B batch, T frames, C channels, S segments.
"""

import copy

import pytest
import torch
from refusals import refuses
from torch import Tensor
from torch.nn import functional as F

from speakerlab.models import cpu
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
    means = [s.mean(-1, keepdim=True).expand_as(s) for s in x_BCT.split(100, dim=-1)]
    return x_BCT.mean(-1, keepdim=True) + torch.cat(means, dim=-1)


def masked_per_frame(layer: ContextAwareMasking, x_BCT: Tensor) -> Tensor:
    hidden_BCT = F.relu(layer.linear1(context_per_frame(x_BCT)))
    return layer.linear_local(x_BCT) * torch.sigmoid(layer.linear2(hidden_BCT))


@pytest.mark.parametrize("frames", [1, 2, 99, 100, 101, 149, 200, 250, 1000])
def test_mask_per_segment_is_the_mask_per_frame_to_rounding(frames):
    torch.manual_seed(frames)
    layer = ContextAwareMasking(32, 8, kernel_size=3, dilation=2)
    x_BCT = torch.randn(3, 32, frames).relu().requires_grad_()
    ours, expected = layer(x_BCT, segments_of(x_BCT, 100)), masked_per_frame(layer, x_BCT)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(expected)
    (our_grad,) = torch.autograd.grad((ours * weight).sum(), x_BCT)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), x_BCT)
    torch.testing.assert_close(our_grad, expected_grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mask_of_large_values_is_computed_in_fp32(dtype):
    x_BCT = torch.full((1, 2, 150), 1000.0, dtype=dtype)  # sums of 1e5 are outside fp16
    layer, found = ContextAwareMasking(2, 4, kernel_size=1, dilation=1), []
    layer.linear1.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.autocast("cpu", dtype=dtype):
        assert layer(x_BCT, segments_of(x_BCT, 100)).dtype == dtype
    assert found[0].dtype == torch.float32
    assert (found[0][0, :, :2] - 2000).abs().max() < 0.01


@pytest.mark.parametrize("plain", [False, True])
def test_recomputation_changes_nothing(plain, monkeypatch):
    """Same embeddings, gradients and BatchNorm statistics, to the bit, with and without it."""
    monkeypatch.setattr(cpu, "is_enabled", not plain)
    torch.manual_seed(0)
    whole = CAMPPlus(**TINY).train()
    frugal = copy.deepcopy(whole)
    for module in frugal.modules():
        if hasattr(module, "memory_efficient"):
            module.memory_efficient = True
    feats_BTF = torch.randn(4, 130, 80)
    for _ in range(2):
        embeddings = [model(feats_BTF) for model in (whole, frugal)]
        assert torch.equal(*embeddings)
        for emb_BD in embeddings:
            emb_BD.pow(3).sum().backward()
    for (name, ours), theirs in zip(frugal.named_parameters(), whole.parameters()):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad), name
    for (name, ours), theirs in zip(frugal.named_buffers(), whole.buffers()):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("plain", [False, True])
def test_recomputation_is_an_argument_and_keeps_less(plain, monkeypatch):
    monkeypatch.setattr(cpu, "is_enabled", not plain)

    def saved_bytes(memory_efficient: bool) -> int:
        torch.manual_seed(0)
        model = CAMPPlus(**{**TINY, "blocks": (4, 4, 4)}, memory_efficient=memory_efficient)
        storages = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage  # kept alive, so that no address comes twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(4, 130, 80))
        return sum(storage.nbytes() for storage in storages.values())

    assert saved_bytes(True) < 0.95 * saved_bytes(False)


def test_blocks_need_a_kernel_and_a_dilation_each():
    with refuses("CAMPPlus", "(4, 4)"):
        CAMPPlus(blocks=(4, 4))
