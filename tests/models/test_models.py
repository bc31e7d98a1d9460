"""What every registered model must do, and the pooling that they share.

Each test runs over the models, small (their `SMALL` arguments in members.py), and in `make
test-all` over every published member as it is.

Letters: B batch, T frames, F mel bins, C channels, D embedding.
"""

import inspect
from typing import Literal, get_origin

import pytest
import torch
from members import MEMBERS, POOLED, SMALL
from torch import nn

from speakerlab.models import MODELS
from speakerlab.models.eres2net import ERes2Net
from speakerlab.models.pooling import mean_std

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

every_model = pytest.mark.parametrize("name", sorted(MODELS))


def over_members(*, slow: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """(name, arguments, frames to test with) of models.

    They are every model, small (the named are slow), and every published member (all are slow).
    """
    params = [
        pytest.param(name, SMALL[name], 230, id=name, marks=[pytest.mark.slow] * (name in slow))
        for name in sorted(MODELS)
    ]
    for name, member in MEMBERS.items():
        full = (member.model, member.args, 70)
        params.append(pytest.param(*full, id=f"published {name}", marks=pytest.mark.slow))
    return pytest.mark.parametrize(("name", "args", "frames"), params)


every_member = over_members()


def build(name: str, args: dict[str, object]) -> nn.Module:
    """A model in eval mode, with running statistics that are not the initial ones."""
    torch.manual_seed(0)
    model = MODELS[name](**args)
    with torch.no_grad():
        model(torch.randn(4, 60, model.feat_dim))
    return model.eval()


def small(name: str, **more: object) -> nn.Module:
    return build(name, {**SMALL[name], **more})


def noise(model: nn.Module, batch: int, frames: int) -> torch.Tensor:
    """feats_BTF."""
    return torch.randn(batch, frames, model.feat_dim)


@every_model
def test_constructor_is_a_schema(name):
    """Keyword-only, with a default and a plain type each: configuration is checked against it."""
    for parameter in inspect.signature(MODELS[name]).parameters.values():
        assert parameter.kind is parameter.KEYWORD_ONLY
        plain = parameter.annotation in (int, float, bool, str, tuple[int, ...])
        assert plain or get_origin(parameter.annotation) is Literal
        assert parameter.default is not parameter.empty


@every_member
@torch.no_grad()
def test_shape_and_attributes(name, args, frames):
    model = build(name, args)
    for num_frames in (50, frames + 1):
        emb_BD = model(noise(model, 2, num_frames))
        assert emb_BD.shape == (2, model.embed_dim) and emb_BD.dtype == torch.float32
    assert model.embed_dim == args.get("embed_dim", model.embed_dim)
    assert model.feat_dim == args.get("feat_dim", 80)


@every_model
@torch.no_grad()
def test_other_numbers_of_mel_bins(name):
    for feat_dim in (40, 83):
        try:
            model = small(name, feat_dim=feat_dim)
        except ValueError as error:  # a published size may fix them: said in one line
            assert f"got {feat_dim}" in str(error) and "\n" not in str(error)
        else:
            assert model(noise(model, 2, 60)).shape == (2, model.embed_dim)


@every_member
def test_gradient_reaches_every_parameter(name, args, frames):
    model = build(name, args).train()
    feats_BTF = noise(model, 4, frames).requires_grad_()
    # The sum of squares would not do: a last BatchNorm makes it a constant.
    (model(feats_BTF) * torch.randn(4, model.embed_dim)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), key
    assert feats_BTF.grad is not None and feats_BTF.grad.abs().sum((0, 2)).min() > 0


@every_member
@torch.no_grad()
def test_eval_is_deterministic_and_leaves_the_input_alone(name, args, frames):
    model = build(name, args)
    feats_BTF = noise(model, 2, frames)
    before = feats_BTF.clone()
    assert torch.equal(model(feats_BTF), model(feats_BTF))
    assert torch.equal(feats_BTF, before)


@every_member
@torch.no_grad()
def test_a_batch_of_one_is_the_row_of_a_batch(name, args, frames):
    model = build(name, args)
    feats_BTF = noise(model, 3, frames)
    emb_BD = model(feats_BTF)
    alone_BD = torch.cat([model(row.unsqueeze(0)) for row in feats_BTF])
    assert (alone_BD - emb_BD).abs().max() / emb_BD.abs().max() < 1e-5


@every_member
def test_unusable_input_is_refused_with_one_line(name, args, frames):
    model = build(name, args)
    shortest, bins = model.min_frames, model.feat_dim
    for feats_BTF, text in (
        (noise(model, 2, shortest - 1), f"too few frames to pool, got {shortest - 1}; give at le"),
        (
            torch.randn(2, frames, bins - 1),
            f"got (2, {frames}, {bins - 1}); give (batch, frames, {bins})",
        ),
        (torch.randn(frames, bins), f"got ({frames}, {bins}); give (batch, frames, {bins})"),
    ):
        with pytest.raises(ValueError) as caught:
            model(feats_BTF)
        assert text in str(caught.value) and "\n" not in str(caught.value)


@every_member
@pytest.mark.parametrize("training", [False, True])
def test_finite_at_the_shortest_input(name, args, frames, training):
    """Of noise; with silence among it, as a batch in training may have; of silence alone.

    A batch of nothing but silence is left out of training: it has no variance to be normalised
    by, and each BatchNorm of a deep network then multiplies the gradient by 300.
    """
    model = build(name, args).train(training)
    shortest, half = noise(model, 4, model.min_frames), torch.tensor([0.0, 1.0, 0.0, 1.0])
    silences = (1.0, half.view(4, 1, 1)) if training else (1.0, half.view(4, 1, 1), 0.0)
    for feats_BTF in (shortest * silence for silence in silences):
        model.zero_grad()
        feats_BTF.requires_grad_()
        emb_BD = model(feats_BTF)
        (emb_BD * torch.randn_like(emb_BD)).sum().backward()
        assert emb_BD.isfinite().all()
        assert feats_BTF.grad is not None and feats_BTF.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@every_model
@torch.no_grad()
def test_the_shortest_input_is_the_one_that_leaves_two_frames_to_pool(name):
    """And one frame is finite, too. What is reflected at the edges needs more than pooling does."""
    model = small(name)
    shortest, pooled = model.min_frames, []
    if name == "ecapa_tdnn":
        model.min_frames = 1
        with pytest.raises(RuntimeError, match="Padding size should be less"):
            model(noise(model, 2, shortest - 1))
        return
    model.get_submodule(POOLED[name]).register_forward_hook(
        lambda _module, _input, output: pooled.append(output.shape[-1])
    )
    model.min_frames = 1
    for frames in (shortest - 1, shortest):
        assert model(noise(model, 2, frames)).isfinite().all()
    assert pooled == [1, 2]


@over_members(slow=("redimnet",))  # of attention over all pairs of frames
@torch.no_grad()
def test_sixty_seconds(name, args, frames):
    """Of the same second again and again, which must give about what five of it give."""
    model = build(name, args)
    second_BTF = noise(model, 1, 100)
    long_BD, short_BD = (model(second_BTF.repeat(1, times, 1)) for times in (60, 5))
    assert (long_BD - short_BD).abs().max() / short_BD.abs().max() < 0.2


@every_member
@torch.no_grad()
def test_bfloat16_autocast_gives_nearly_the_same(name, args, frames):
    model = build(name, args)
    feats_BTF = noise(model, 2, frames)
    emb_BD = model(feats_BTF)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough_BD = model(feats_BTF)
    assert (rough_BD.float() - emb_BD).abs().max() / emb_BD.abs().max() < 0.05


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"blocks": (1, 2, 3)}, r"counted per stage, got \(1, 2, 3\); give four"),
        ({"m_channels": 1, "base_width": 32}, r"got 1 \* 32 / 64; give more of either"),
        ({"scale": 0}, "no group is convolved, got scale 0; give at least 1"),
        ({"pooling": "TSTP"}, "got 'TSTP'; did you mean 'tstp'"),
    ],
)
def test_eres2net_that_cannot_be_is_refused(args, text):
    with pytest.raises(ValueError, match=text):
        ERes2Net(**args)


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
