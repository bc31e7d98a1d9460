"""What every registered model must do.

Each test runs over the models, small (their `SMALL` arguments in members.py), and in `make
test-all` over every published member as it is.

Letters: B batch, T frames, F mel bins, C channels, D embedding.
"""

import inspect
import re
from typing import Literal, get_args, get_origin

import pytest
import torch
from members import MEMBERS, POOLED, SMALL
from outside import ARGS, KIND, NAME, names_of
from refusals import refuses
from test_folding import build
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from speakerlab.models import MODELS
from speakerlab.models.cpu import plain_code
from speakerlab.models.ecapa_tdnn import Reflection
from speakerlab.models.redimnet2 import ReDimNet2

every_model = pytest.mark.parametrize("name", names_of("model", MODELS))


def over_members(*, slow: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """(name, arguments, frames to test with) of models.

    They are every model, small (the named are slow), and every published member (all are slow).
    """
    params = [
        pytest.param(name, SMALL[name], 230, id=name, marks=[pytest.mark.slow] * (name in slow))
        for name in sorted(MODELS)
    ]
    if KIND == "model":
        params = [pytest.param(NAME, ARGS, 230, id="outside")]
    for name, member in MEMBERS.items():
        full = (member.model, member.args, 70)
        params.append(pytest.param(*full, id=f"published {name}", marks=pytest.mark.slow))
    return pytest.mark.parametrize(("name", "args", "frames"), params)


every_member = over_members()


def small(name: str, **more: object) -> nn.Module:
    return build(name, {**SMALL.get(name, ARGS), **more})


def noise(model: nn.Module, batch: int, frames: int) -> torch.Tensor:
    """feats_BTF."""
    return torch.randn(batch, frames, model.feat_dim)


def is_tuple_of_int(kind):
    return get_origin(kind) is tuple and {*get_args(kind)} <= {int, ...}


@every_model
def test_constructor_is_a_schema(name):
    """Keyword-only, with a default and a plain type each: configuration is checked against it."""
    for parameter in inspect.signature(MODELS[name]).parameters.values():
        assert parameter.kind is parameter.KEYWORD_ONLY
        kind = parameter.annotation
        is_choice = get_origin(kind) is Literal
        assert kind in (int, float, bool, str) or is_choice or is_tuple_of_int(kind)
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
            assert str(feat_dim) in str(error) and "\n" not in str(error)
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
    used = frames - frames % 4 if isinstance(model, ReDimNet2) else frames
    assert feats_BTF.grad is not None and feats_BTF.grad.abs().sum((0, 2))[:used].min() > 0


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
    for feats_BTF, value in (
        (noise(model, 2, shortest - 1), f"{shortest - 1} frames"),
        (torch.randn(2, frames, bins - 1), (2, frames, bins - 1)),
        (torch.randn(frames, bins), (frames, bins)),
    ):
        with refuses(type(model).__name__, value):
            model(feats_BTF)


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


@pytest.mark.parametrize("name", sorted(MODELS))
@torch.no_grad()
def test_the_shortest_input_leaves_the_frames_that_pooling_needs(name):
    """One frame less is finite, too. Reflection at the edges needs more than pooling does."""
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
    if name == "redimnet2":  # its number of frames is rounded down to a multiple of these
        model.min_frames = shortest
        assert model(noise(model, 2, shortest + 3)).isfinite().all()
        assert pooled == [shortest]
        return
    for frames in (max(shortest - 1, 1), shortest):
        assert model(noise(model, 2, frames)).isfinite().all()
    fewest = getattr(getattr(model, "pool", None), "min_frames", min(2, shortest))
    frames_last = "the last dimension of the output of POOLED must be the frames"
    assert (pooled[0], pooled[-1]) == (max(fewest - 1, 1), fewest), frames_last


class Operations(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **kwargs or {})


@every_model
def test_a_gpu_has_deterministic_kernels(name):
    """None of the operations that `torch.use_deterministic_algorithms` refuses on a GPU."""
    model = small(name).train()
    with Operations() as found, plain_code():
        model(noise(model, 2, 40)).sum().backward()
    assert {"convolution_backward", "mm"} & found.names
    refused = r"(reflection|replication)_pad.*_backward|_?(adaptive|fractional)_.*pool.*_backward"
    refused += "|(avg|max)_pool3d.*_backward|upsample.*|grid_sampler.*|median|kthvalue|cumsum|put_?"
    assert [one for one in found.names if re.fullmatch(refused, one)] == []


def test_reflection_has_the_gradient_of_torch():
    """Also where the edges overlap."""
    for frames in (4, 5, 9):
        x_BCT = torch.randn(2, 3, frames, dtype=torch.float64, requires_grad=True)
        grad_BCT = torch.randn(2, 3, frames + 6, dtype=torch.float64)
        (own,) = torch.autograd.grad(Reflection(3)(x_BCT), x_BCT, grad_BCT)
        (theirs,) = torch.autograd.grad(F.pad(x_BCT, (3, 3), mode="reflect"), x_BCT, grad_BCT)
        torch.testing.assert_close(own, theirs, rtol=1e-14, atol=0)


@over_members(slow=("redimnet", "redimnet2"))  # of attention over all pairs of frames
@torch.no_grad()
def test_sixty_seconds(name, args, frames):
    """Of the same second again and again, which must give about what twenty of it give."""
    model = build(name, args)
    second_BTF = noise(model, 1, 100)
    long_BD, short_BD = (model(second_BTF.repeat(1, times, 1)) for times in (60, 20))
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


@pytest.mark.parametrize("pooling", ["tstp", "astp"])
@pytest.mark.parametrize("name", ["resnet", "res2net", "gemini_dfresnet", "xvector"])
@torch.no_grad()
def test_the_shortest_input_can_be_pooled(name, pooling):
    model = small(name, pooling=pooling)
    assert model(noise(model, 2, model.min_frames)).isfinite().all()


REFUSED = [
    ("eres2net", {"m_channels": 1, "base_width": 32}, "ERes2Net", "m_channels 1 * base_width 32"),
    ("eres2netv2", {"scale": 0}, "ERes2NetV2", "scale 0 at least 1"),
    ("res2net", {"scale": 1}, "Res2Net", "scale 1 at least 2"),
    (
        "ecapa_tdnn_wespeaker",
        {"global_context": True, "pooling": "tstp"},
        *("pooling", "tstp", "astp"),
    ),
    *(
        ("redimnet", {"size": size, "feat_dim": feat_dim}, "ReDimNet", feat_dim, f"of {multiple}")
        for size, multiple in (("b0", 4), ("b1", 24), ("b2", 8), ("b6", 12))
        for feat_dim in (multiple + multiple // 2, 0)
    ),
    ("redimnet2", {"size": "b2", "feat_dim": 80}, "ReDimNet2", 80, "of 12"),
    ("redimnet2", {"size": "b6", "feat_dim": 0}, "ReDimNet2", 0, "of 8"),
    *(
        (name, {"channels": channels, "scale": scale}, "ECAPA-TDNN", channels, scale)
        for name in ("ecapa_tdnn", "ecapa_tdnn_wespeaker")
        for channels, scale in ((20, 8), (16, 1), (16, 0))
    ),
]


@pytest.mark.parametrize(("name", "args", "subject", "values"), [(*r[:3], r[3:]) for r in REFUSED])
def test_impossible_arguments_are_refused(name, args, subject, values):
    with torch.device("meta"), refuses(subject, *values):
        MODELS[name](**args)
