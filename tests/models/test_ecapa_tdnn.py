"""ECAPA-TDNN: its edges, its groups, and what its attention sees.

Letters: B batch, T frames, C channels.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speakerlab.models import ecapa_tdnn, ecapa_tdnn_wespeaker
from speakerlab.models.ecapa_tdnn import ECAPATDNN, AttentiveStatistics
from speakerlab.models.ecapa_tdnn_wespeaker import ECAPATDNNWeSpeaker

both = pytest.mark.parametrize("model", [ECAPATDNN, ECAPATDNNWeSpeaker])


@torch.no_grad()
def test_five_frames_are_what_reflection_needs():
    model = ECAPATDNN(channels=16).eval()
    assert model.min_frames == 5
    assert model(torch.randn(2, 5, 80)).isfinite().all()
    model.min_frames = 4
    with pytest.raises(RuntimeError, match="Padding size"):
        model(torch.randn(2, 4, 80))


@torch.no_grad()
def test_edges_are_reflected_here_and_zero_there():
    """A kernel that adds both neighbours, at the first and the last of 1 2 3 4 5."""
    x_BCT = torch.arange(1.0, 6.0).reshape(1, 1, 5)
    here = ecapa_tdnn.TimeDelay(1, 1, kernel=3).conv[0]
    there = ecapa_tdnn_wespeaker.Res2Split(2, dilation=1, scale=2).convs[0]
    sums = []
    for conv in (here, there):
        assert isinstance(conv, nn.Conv1d) and conv.bias is not None
        conv.weight.copy_(torch.tensor([[[1.0, 0.0, 1.0]]]))
        conv.bias.zero_()
        sums.append(conv(x_BCT)[0, 0].tolist())
    assert sums == [[4, 4, 6, 8, 8], [2, 4, 6, 8, 4]]


@pytest.mark.parametrize(("module", "untouched"), [(ecapa_tdnn, 0), (ecapa_tdnn_wespeaker, 3)])
@torch.no_grad()
def test_which_group_passes_by(module, untouched):
    """And that each of the others takes in the one before it."""
    split = module.Res2Split(8, dilation=2, scale=4).eval()
    x_BCT = torch.randn(1, 8, 9)
    y_BCT = split(x_BCT)
    same = [torch.equal(x, y) for x, y in zip(x_BCT.chunk(4, 1), y_BCT.chunk(4, 1))]
    assert same == [group == untouched for group in range(4)]
    start = 1 if untouched == 0 else 0
    x_BCT[:, 2 * start] += 1  # the first group that is convolved reaches all of the three
    moved = [not torch.equal(a, b) for a, b in zip(y_BCT.chunk(4, 1), split(x_BCT).chunk(4, 1))]
    assert moved == [group != untouched for group in range(4)]


@torch.no_grad()
def test_attention_sees_mean_and_biased_deviation_of_the_utterance():
    """The same as when both stand beside every frame."""
    torch.manual_seed(0)
    pool = AttentiveStatistics(6, attention_channels=4, global_context=True).double().eval()
    x_BCT = torch.randn(3, 6, 11).double()
    context = [x_BCT.mean(-1, keepdim=True), x_BCT.std(-1, correction=0, keepdim=True)]
    seen_BCT = torch.cat([x_BCT, *(part.expand_as(x_BCT) for part in context)], dim=1)
    scores_BCT = pool.conv(pool.tdnn(seen_BCT).tanh())
    weight_BCT = F.softmax(scores_BCT, dim=-1)
    mean_BC = (weight_BCT * x_BCT).sum(-1)
    std_BC = ((weight_BCT * x_BCT**2).sum(-1) - mean_BC**2).sqrt()
    torch.testing.assert_close(pool(x_BCT), torch.cat([mean_BC, std_BC], dim=1))


def test_embedding_has_a_norm_where_asked():
    names = [
        set(ECAPATDNNWeSpeaker(channels=16, stats_channels=8, emb_bn=emb_bn).state_dict())
        for emb_bn in (False, True)
    ]
    assert {name.partition(".")[0] for name in names[1] - names[0]} == {"bn2"}
    assert names[0] < names[1]
