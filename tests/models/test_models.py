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


def over_members(*, slow: tuple[str, ...] = ("redimnet",)) -> pytest.MarkDecorator:
    """(name, arguments, frames to test with) of models.

    They are every model, small (the named are slow; redimnet2 has the blocks of redimnet), and
    every published member (all are slow).
    """
    params = []
    if KIND == "model":
        params.append(pytest.param(NAME, ARGS, 230, id="outside"))
    else:
        for name in sorted(MODELS):
            marks = []
            if name in slow:
                marks.append(pytest.mark.slow)
            small_model = pytest.param(
                name,
                SMALL[name],
                230,
                id=name,
                marks=marks,
            )
            params.append(small_model)

    for name, member in MEMBERS.items():
        published_model = pytest.param(
            member.model,
            member.args,
            70,
            id=f"published {name}",
            marks=pytest.mark.slow,
        )
        params.append(published_model)
    return pytest.mark.parametrize(("name", "args", "frames"), params)


every_member = over_members()


def small(name: str, **options: object) -> nn.Module:
    args = {**SMALL.get(name, ARGS), **options}
    return build(name, args)


def noise(model: nn.Module, batch: int, frames: int) -> torch.Tensor:
    """feats_BTF."""
    return torch.randn(batch, frames, model.feat_dim)


def is_tuple_of_int(kind):
    if get_origin(kind) is not tuple:
        return False
    return set(get_args(kind)) <= {int, ...}


@every_model
def test_constructor_is_a_schema(name):
    """Keyword-only, with a default and a plain type each: configuration is checked against it."""
    signature = inspect.signature(MODELS[name])
    for parameter in signature.parameters.values():
        assert parameter.kind is parameter.KEYWORD_ONLY
        kind = parameter.annotation
        is_plain = kind in (int, float, bool, str)
        is_choice = get_origin(kind) is Literal
        assert is_plain or is_choice or is_tuple_of_int(kind)
        assert parameter.default is not parameter.empty


@every_member
@torch.no_grad()
def test_shape_and_attributes(name, args, frames):
    model = build(name, args)
    for num_frames in (50, frames + 1):
        emb_BD = model(noise(model, 2, num_frames))
        assert emb_BD.shape == (2, model.embed_dim)
        assert emb_BD.dtype == torch.float32
    assert model.embed_dim == args.get("embed_dim", model.embed_dim)
    assert model.feat_dim == args.get("feat_dim", 80)


@every_model
@torch.no_grad()
def test_other_numbers_of_mel_bins(name):
    for feat_dim in (40, 83):
        try:
            model = small(name, feat_dim=feat_dim)
        except ValueError as error:
            # A published size may fix the number: said in one line.
            assert str(feat_dim) in str(error)
            assert "\n" not in str(error)
        else:
            emb_BD = model(noise(model, 2, 60))
            assert emb_BD.shape == (2, model.embed_dim)


def relative_error(emb_BD: torch.Tensor, expected_BD: torch.Tensor) -> torch.Tensor:
    """The largest difference over the largest value."""
    difference = (emb_BD - expected_BD).abs()
    largest = expected_BD.abs().max()
    return difference.max() / largest


@every_member
def test_gradient_reaches_every_parameter(name, args, frames):
    model = build(name, args).train()
    feats_BTF = noise(model, 4, frames).requires_grad_()
    emb_BD = model(feats_BTF)
    # The sum of squares would not do: a last BatchNorm makes it a constant.
    weight_BD = torch.randn(4, model.embed_dim)
    (emb_BD * weight_BD).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key

    # ReDimNet2 rounds the number of frames down to a multiple of 4.
    used = frames
    if isinstance(model, ReDimNet2):
        used -= frames % 4
    assert feats_BTF.grad is not None
    grad_T = feats_BTF.grad.abs().sum((0, 2))
    assert grad_T[:used].min() > 0


@every_member
@torch.no_grad()
def test_eval_is_deterministic_and_leaves_the_input_alone(name, args, frames):
    model = build(name, args)
    feats_BTF = noise(model, 2, frames)
    before = feats_BTF.clone()
    emb_BD = model(feats_BTF)
    again_BD = model(feats_BTF)
    assert torch.equal(emb_BD, again_BD)
    assert torch.equal(feats_BTF, before)


@every_member
@torch.no_grad()
def test_a_batch_of_one_is_the_row_of_a_batch(name, args, frames):
    model = build(name, args)
    feats_BTF = noise(model, 3, frames)
    together_BD = model(feats_BTF)
    rows = [model(feats_TF.unsqueeze(0)) for feats_TF in feats_BTF]
    alone_BD = torch.cat(rows)
    assert relative_error(alone_BD, together_BD) < 1e-5


@every_member
def test_unusable_input_is_refused_with_one_line(name, args, frames):
    model = build(name, args)
    shortest = model.min_frames
    bins = model.feat_dim
    too_short_BTF = noise(model, 2, shortest - 1)
    too_few_bins_BTF = torch.randn(2, frames, bins - 1)
    without_batch_TF = torch.randn(frames, bins)
    for feats_BTF, value in (
        (too_short_BTF, f"{shortest - 1} frames"),
        (too_few_bins_BTF, (2, frames, bins - 1)),
        (without_batch_TF, (frames, bins)),
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
    shortest_BTF = noise(model, 4, model.min_frames)
    every_other_row = torch.tensor([0.0, 1.0, 0.0, 1.0])
    every_other_row = every_other_row.view(4, 1, 1)
    gains = [1.0, every_other_row]
    if not training:
        gains.append(0.0)
    for gain in gains:
        feats_BTF = shortest_BTF * gain
        model.zero_grad()
        feats_BTF.requires_grad_()
        emb_BD = model(feats_BTF)
        weight_BD = torch.randn_like(emb_BD)
        (emb_BD * weight_BD).sum().backward()
        assert emb_BD.isfinite().all()
        assert feats_BTF.grad is not None
        assert feats_BTF.grad.isfinite().all()
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(MODELS))
@torch.no_grad()
def test_the_shortest_input_leaves_the_frames_that_pooling_needs(name):
    """One frame less is finite, too. Reflection at the edges needs more than pooling does."""
    model = small(name)
    shortest = model.min_frames
    if name == "ecapa_tdnn":
        model.min_frames = 1
        too_short_BTF = noise(model, 2, shortest - 1)
        with pytest.raises(RuntimeError, match="Padding size should be less"):
            model(too_short_BTF)
        return

    pooled = []

    def note_frames(_module, _input, output):
        frames_axis = 1 if name == "mhfa" else -1
        pooled.append(output.shape[frames_axis])

    last_layer = model.get_submodule(POOLED[name])
    last_layer.register_forward_hook(note_frames)
    if name == "redimnet2":
        # Its number of frames is rounded down to a multiple of the shortest.
        emb_BD = model(noise(model, 2, shortest + 3))
        assert emb_BD.isfinite().all()
        assert pooled == [shortest]
        return

    model.min_frames = 1
    one_less = max(shortest - 1, 1)
    for frames in (one_less, shortest):
        emb_BD = model(noise(model, 2, frames))
        assert emb_BD.isfinite().all()
    pool = getattr(model, "pool", None)
    fewest = getattr(pool, "min_frames", min(2, shortest))
    hint = "the last dimension of the output of POOLED must be the frames"
    assert pooled[0] == max(fewest - 1, 1), hint
    assert pooled[-1] == fewest, hint


class Operations(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.names.add(name)
        return func(*args, **kwargs or {})


@every_model
def test_a_gpu_has_deterministic_kernels(name):
    """None of the operations that `torch.use_deterministic_algorithms` refuses on a GPU."""
    model = small(name).train()
    feats_BTF = noise(model, 2, 40)
    with Operations() as recorded, plain_code():
        model(feats_BTF).sum().backward()
    assert {"convolution_backward", "mm"} & recorded.names

    refused = r"(reflection|replication)_pad.*_backward|_?(adaptive|fractional)_.*pool.*_backward"
    refused += "|(avg|max)_pool3d.*_backward|upsample.*|grid_sampler.*|median|kthvalue|cumsum|put_?"
    for operation in recorded.names:
        assert not re.fullmatch(refused, operation), operation


def test_reflection_has_the_gradient_of_torch():
    """Also where the edges overlap."""
    for frames in (4, 5, 9):
        x_BCT = torch.randn(2, 3, frames, dtype=torch.float64)
        x_BCT.requires_grad_()
        ours_BCT = Reflection(3)(x_BCT)
        theirs_BCT = F.pad(x_BCT, (3, 3), mode="reflect")
        grad_BCT = torch.randn_like(ours_BCT)
        (our_grad,) = torch.autograd.grad(ours_BCT, x_BCT, grad_BCT)
        (their_grad,) = torch.autograd.grad(theirs_BCT, x_BCT, grad_BCT)
        torch.testing.assert_close(our_grad, their_grad, rtol=1e-14, atol=0)


@over_members(slow=("redimnet", "redimnet2"))  # of attention over all pairs of frames
@torch.no_grad()
def test_sixty_seconds(name, args, frames):
    """Of the same second again and again, which must give about what twenty of it give."""
    model = build(name, args)
    second_BTF = noise(model, 1, 100)
    minute_BTF = second_BTF.repeat(1, 60, 1)
    twenty_seconds_BTF = second_BTF.repeat(1, 20, 1)
    long_BD = model(minute_BTF)
    short_BD = model(twenty_seconds_BTF)
    assert relative_error(long_BD, short_BD) < 0.2


@every_member
@torch.no_grad()
def test_bfloat16_autocast_gives_nearly_the_same(name, args, frames):
    model = build(name, args)
    feats_BTF = noise(model, 2, frames)
    emb_BD = model(feats_BTF)
    with torch.autocast("cpu", torch.bfloat16):
        rough_BD = model(feats_BTF)
    assert relative_error(rough_BD.float(), emb_BD) < 0.05


@pytest.mark.parametrize("pooling", ["tstp", "astp"])
@pytest.mark.parametrize("name", ["resnet", "res2net", "gemini_dfresnet", "xvector"])
@torch.no_grad()
def test_the_shortest_input_can_be_pooled(name, pooling):
    model = small(name, pooling=pooling)
    shortest_BTF = noise(model, 2, model.min_frames)
    emb_BD = model(shortest_BTF)
    assert emb_BD.isfinite().all()


# Model, arguments, subject of the message, values in it.
REFUSED = [
    (
        "eres2net",
        {"m_channels": 1, "base_width": 32},
        "ERes2Net",
        ["m_channels 1 * base_width 32"],
    ),
    ("eres2netv2", {"scale": 0}, "ERes2NetV2", ["scale 0 at least 1"]),
    ("res2net", {"scale": 1}, "Res2Net", ["scale 1 at least 2"]),
    (
        "ecapa_tdnn_wespeaker",
        {"global_context": True, "pooling": "tstp"},
        "pooling",
        ["tstp", "astp"],
    ),
    (
        "redimnet2",
        {"size": "b2", "feat_dim": 80},
        "ReDimNet2",
        [80, "of 12"],
    ),
    (
        "redimnet2",
        {"size": "b6", "feat_dim": 0},
        "ReDimNet2",
        [0, "of 8"],
    ),
]
# A published size of ReDimNet takes multiples of some number of mel bins.
for size, multiple in (("b0", 4), ("b1", 24), ("b2", 8), ("b6", 12)):
    for feat_dim in (multiple + multiple // 2, 0):
        args = {"size": size, "feat_dim": feat_dim}
        values = [feat_dim, f"of {multiple}"]
        REFUSED.append(("redimnet", args, "ReDimNet", values))
for name in ("ecapa_tdnn", "ecapa_tdnn_wespeaker"):
    for channels, scale in ((20, 8), (16, 1), (16, 0)):
        args = {"channels": channels, "scale": scale}
        REFUSED.append((name, args, "ECAPA-TDNN", [channels, scale]))


@pytest.mark.parametrize(("name", "args", "subject", "values"), REFUSED)
def test_impossible_arguments_are_refused(name, args, subject, values):
    with torch.device("meta"), refuses(subject, *values):
        MODELS[name](**args)
