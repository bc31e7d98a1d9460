"""What every registered model must do, and the pooling that they share.

Letters: B batch, T frames, F mel bins, C channels, D embedding.
"""

import inspect

import pytest
import torch
from torch import nn

from speakerlab.models import MODELS
from speakerlab.models.eres2net import ERes2Net
from speakerlab.models.pooling import mean_std

# Arguments that make a model small, so that a test takes milliseconds; one without is tested whole.
SMALL = {
    "campplus": {
        "embed_dim": 12,
        "init_channels": 16,
        "growth_rate": 8,
        "bn_size": 2,
        "blocks": (2, 3, 2),
        "head_channels": 4,
    },
    "eres2net": {"embed_dim": 12, "m_channels": 8, "blocks": (1, 2, 2, 1)},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

every_model = pytest.mark.parametrize("name", sorted(MODELS))


def small(name: str, **more: object) -> nn.Module:
    """A small model with statistics that are not the initial ones."""
    torch.manual_seed(0)
    model = MODELS[name](**SMALL.get(name, {}), **more)
    model(torch.randn(8, 120, model.feat_dim))
    return model.eval()


@every_model
def test_constructor_is_a_schema(name):
    """Keyword-only, with a default and a plain type each: configuration is checked against it."""
    for parameter in inspect.signature(MODELS[name]).parameters.values():
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.annotation in (int, float, bool, tuple[int, ...])
        assert parameter.default is not parameter.empty


@every_model
def test_shape_and_attributes(name):
    model = small(name)
    for frames in (50, 201, 298):
        emb_BD = model(torch.randn(3, frames, 80))
        assert emb_BD.shape == (3, model.embed_dim) and emb_BD.dtype == torch.float32


@every_model
def test_other_numbers_of_mel_bins(name):
    for feat_dim in (40, 83):
        model = small(name, feat_dim=feat_dim)
        assert model(torch.randn(2, 60, feat_dim)).shape == (2, model.embed_dim)


@every_model
def test_gradient_reaches_every_parameter(name):
    model = small(name).train()
    feats_BTF = torch.randn(4, 230, 80, requires_grad=True)
    # The sum of squares would not do: a last BatchNorm makes it a constant.
    (model(feats_BTF) * torch.randn(4, model.embed_dim)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), key
    assert feats_BTF.grad is not None and feats_BTF.grad.abs().sum((0, 2)).min() > 0


@every_model
@torch.no_grad()
def test_eval_is_deterministic_and_leaves_the_input_alone(name):
    model = small(name)
    feats_BTF = torch.randn(3, 150, 80)
    before = feats_BTF.clone()
    assert torch.equal(model(feats_BTF), model(feats_BTF))
    assert torch.equal(feats_BTF, before)


@every_model
@torch.no_grad()
def test_a_batch_of_one_is_the_row_of_a_batch(name):
    model = small(name)
    feats_BTF = torch.randn(5, 230, 80)
    emb_BD = model(feats_BTF)
    alone_BD = torch.cat([model(row.unsqueeze(0)) for row in feats_BTF])
    assert (alone_BD - emb_BD).abs().max() / emb_BD.abs().max() < 1e-5


@every_model
def test_too_short_is_refused_with_one_line(name):
    model = small(name)
    with pytest.raises(ValueError, match="too few frames") as caught:
        model(torch.randn(2, model.min_frames - 1, 80))
    assert "\n" not in str(caught.value)
    assert f"got {model.min_frames - 1}; give at least {model.min_frames}" in str(caught.value)


@every_model
def test_wrong_number_of_bins_is_refused_with_one_line(name):
    with pytest.raises(ValueError, match=r"got \(2, 100, 64\); give \(batch, frames, 80\)"):
        small(name)(torch.randn(2, 100, 64))


@every_model
@pytest.mark.parametrize("training", [False, True])
def test_finite_at_the_shortest_input(name, training):
    model = small(name).train(training)
    for feats_BTF in (torch.randn(4, model.min_frames, 80), torch.zeros(4, model.min_frames, 80)):
        model.zero_grad()
        feats_BTF.requires_grad_()
        emb_BD = model(feats_BTF)
        (emb_BD * torch.randn_like(emb_BD)).sum().backward()
        assert emb_BD.isfinite().all()
        assert feats_BTF.grad is not None and feats_BTF.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("name", "last_map"), [("campplus", "xvector.out_nonlinear"), ("eres2net", "fuse_mode1234")]
)
@torch.no_grad()
def test_the_shortest_input_is_the_one_that_leaves_two_frames_to_pool(name, last_map):
    model = small(name)
    shortest, pooled = model.min_frames, []
    model.get_submodule(last_map).register_forward_hook(
        lambda _module, _input, output: pooled.append(output.shape[-1])
    )
    model.min_frames = 1
    for frames in (shortest - 1, shortest):
        assert model(torch.randn(2, frames, 80)).isfinite().all()
    assert pooled == [1, 2]


@every_model
@torch.no_grad()
def test_bfloat16_autocast_gives_nearly_the_same(name):
    model = small(name)
    feats_BTF = torch.randn(4, 230, 80)
    emb_BD = model(feats_BTF)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough_BD = model(feats_BTF)
    assert (rough_BD.float() - emb_BD).abs().max() / emb_BD.abs().max() < 0.05


def test_eres2net_needs_four_stages():
    with pytest.raises(ValueError, match=r"got \(1, 2, 3\); give four"):
        ERes2Net(blocks=(1, 2, 3))


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_mean_std_by_hand(eps):
    x_BCT = torch.tensor([[[1.0, 2.0, 6.0], [0.0, 0.0, 0.0]]])
    stats = mean_std(x_BCT, eps=eps)[0].tolist()
    assert stats == pytest.approx([3.0, 0.0, 7**0.5, eps**0.5], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_one_frame_has_no_deviation(eps):
    x_BCT = torch.randn(2, 3, 1, requires_grad=True)
    stats = mean_std(x_BCT, eps=eps)
    stats.sum().backward()
    torch.testing.assert_close(stats[:, :3], x_BCT.squeeze(-1))
    torch.testing.assert_close(stats[:, 3:], torch.full((2, 3), eps**0.5))
    assert torch.equal(x_BCT.grad, torch.ones(2, 3, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("value", [0.0, 0.1, 1000.0])
def test_constant_input_has_a_finite_gradient(value, eps, dtype):
    x_BCT = torch.full((2, 3, 50), value, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean_std(x_BCT, eps=eps).sum().backward()
    assert x_BCT.grad is not None and x_BCT.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_are_pooled_in_fp32(dtype):
    """The variance, 1e6, is far outside fp16; the map may have any number of axes before time."""
    x_BCFT = torch.tensor([1000.0, -1000.0]).repeat(2, 3, 4, 50).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = mean_std(x_BCFT, eps=1e-8)
    assert stats.shape == (2, 24) and stats.dtype == torch.float32
    torch.testing.assert_close(stats[:, :12], torch.zeros(2, 12))
    torch.testing.assert_close(stats[:, 12:], torch.full((2, 12), 1000 * (100 / 99) ** 0.5))
