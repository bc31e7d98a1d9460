"""Contract tests of every registered head.

Letters: B batch, C classes, D embedding.
"""

import inspect

import pytest
import torch
from outside import args_of, names_of
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.losses import HEADS

NAMES = names_of("head", HEADS)
WITH_MARGIN = [name for name in sorted(HEADS) if HEADS[name].takes_margin]
MARGINS = (0.0, 0.1, 0.2, 0.5, 1.4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EASIER_WITH_MARGIN = {"circle"}  # a larger margin lowers its loss
EMBED_DIM = 16
NUM_CLASSES = 9


def margins_of(name: str) -> tuple[float, ...]:
    if not HEADS[name].takes_margin:
        return (0.0,)
    return MARGINS


def make(name: str, num_classes: int = NUM_CLASSES, **args) -> nn.Module:
    torch.manual_seed(0)
    args = {**args_of(name), **args}
    return HEADS[name](
        embed_dim=EMBED_DIM,
        num_classes=num_classes,
        **args,
    )


def make_batch(
    num_rows: int = 12, num_classes: int = NUM_CLASSES
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    emb_BD = torch.randn(num_rows, EMBED_DIM)
    label_B = torch.arange(num_rows) % num_classes
    return emb_BD, label_B


def first_centers(head: nn.Module) -> Tensor:
    """Return the first weight of each class, (C, D)."""
    weight = head.get_parameter("weight_CD").detach()
    has_subcenters = weight.dim() == 3
    return weight[:, 0] if has_subcenters else weight


def hard_rows(head: nn.Module) -> tuple[Tensor, Tensor]:
    """Return embeddings equal to their weight, opposite, another's, large, and zero."""
    weight_CD = first_centers(head)
    rows = [
        7.3 * weight_CD,
        -weight_CD,
        weight_CD.roll(1, 0),
        1e3 * weight_CD,
        0 * weight_CD,
    ]
    emb_BD = torch.cat(rows)
    label_C = torch.arange(len(weight_CD))
    return emb_BD, label_C.repeat(len(rows))


def assert_finite_gradients(
    head: nn.Module,
    emb_BD: Tensor,
    label_B: Tensor,
    margin: float,
):
    head.zero_grad()
    emb_BD.requires_grad_()
    loss, logits_BC = head(emb_BD, label_B, margin)
    loss.backward()
    assert loss.shape == ()
    assert logits_BC.shape == (len(emb_BD), NUM_CLASSES)
    assert loss.dtype == torch.float32
    assert logits_BC.dtype == torch.float32
    assert loss.isfinite()
    assert logits_BC.isfinite().all()
    assert emb_BD.grad is not None
    assert emb_BD.grad.isfinite().all()
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_in_the_worst_places(name, dtype):
    """Also at a large scale, and with tiny rows and weights."""
    signature = inspect.signature(HEADS[name])
    heads = [make(name)]
    if dtype == torch.float32 and "scale" in signature.parameters:
        heads.append(make(name, scale=3000.0))
    if name == "sphereface2":
        heads.append(make(name, scale=3000.0, margin_type="A"))
    for head in heads:
        for margin in margins_of(name):
            rows_BD, label_B = hard_rows(head)
            emb_BD = rows_BD.to(dtype, copy=True)
            assert_finite_gradients(head, emb_BD, label_B, margin)

    # The gradients of tiny rows leave the range of fp16.
    if dtype == torch.float16:
        return
    head = heads[0]
    weight_CD = head.get_parameter("weight_CD")
    with torch.no_grad():
        weight_CD[0] = 0
        weight_CD[1] *= 1e-5
    for margin in margins_of(name):
        tiny_BD = (1e-5 * rows_BD).to(dtype)
        assert_finite_gradients(head, tiny_BD, label_B, margin)


@pytest.mark.parametrize("name", WITH_MARGIN)
def test_a_row_of_zeros_has_no_direction(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    emb_BD[3] = 0
    emb_BD.requires_grad_()
    loss, logits_BC = head(emb_BD, label_B, 0.2)
    loss.backward()
    assert emb_BD.grad is not None
    assert (logits_BC[3] == 0).all()
    assert not emb_BD.grad[3].any()
    assert emb_BD.grad[2].any()


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    emb_BD.requires_grad_()
    margin = 0.2 if HEADS[name].takes_margin else 0.0
    loss, _ = head(emb_BD, label_B, margin)
    loss.backward()
    for parameter in head.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()
    assert emb_BD.grad is not None
    assert emb_BD.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_logits_carry_no_margin(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    margins = margins_of(name)
    _, expected_BC = head(emb_BD, label_B, margins[0])
    for margin in margins[1:]:
        _, logits_BC = head(emb_BD, label_B, margin)
        assert torch.equal(logits_BC, expected_BC)

    # Nor do they depend on the labels.
    other_label_B = (label_B + 1) % NUM_CLASSES
    _, logits_BC = head(emb_BD, other_label_B, margins[-1])
    assert torch.equal(logits_BC, expected_BC)

    # An embedding equal to the weight of a class is of that class.
    center_CD = first_centers(head)
    any_label_C = torch.zeros(NUM_CLASSES, dtype=torch.int64)
    _, logits_CC = head(center_CD, any_label_C)
    nearest_C = logits_CC.argmax(dim=1)
    assert nearest_C.tolist() == list(range(NUM_CLASSES))


@pytest.mark.parametrize("name", WITH_MARGIN)
def test_loss_follows_the_margin(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    losses = [head(emb_BD, label_B, margin)[0] for margin in MARGINS]
    rise = torch.stack(losses).diff()
    if name in EASIER_WITH_MARGIN:
        rise = -rise
    assert (rise > 0).all(), losses


@pytest.mark.parametrize("name", NAMES)
def test_head_is_fp32_under_autocast_and_takes_a_tensor_as_margin(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    margin = margins_of(name)[-1]
    expected_loss, expected_BC = head(emb_BD, label_B, margin)
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits_BC = head(emb_BD, label_B, margin)
    assert logits_BC.dtype == torch.float32
    assert torch.equal(logits_BC, expected_BC)
    assert torch.equal(loss, expected_loss)
    tensor_margin = torch.tensor(margin)
    loss, _ = head(emb_BD, label_B, tensor_margin)
    torch.testing.assert_close(loss, expected_loss)


@pytest.mark.parametrize("name", NAMES)
def test_classes_are_on_the_first_axis_of_the_parameters(name):
    head = make(name)
    moved = make(name)
    weight = head.get_parameter("weight_CD")
    assert weight.shape[0] == NUM_CLASSES
    assert weight.shape[-1] == EMBED_DIM
    assert not list(head.buffers())

    # The same head with its classes in another order.
    generator = torch.Generator().manual_seed(2)
    order_C = torch.randperm(NUM_CLASSES, generator=generator)
    with torch.no_grad():
        for old, new in zip(head.parameters(), moved.parameters()):
            old.add_(torch.randn(old.shape))
            new.copy_(old[order_C] if old.dim() else old)
    emb_BD, label_B = make_batch()
    moved_label_B = order_C.argsort()[label_B]
    margin = margins_of(name)[-1]
    loss, logits_BC = head(emb_BD, label_B, margin)
    moved_loss, moved_BC = moved(emb_BD, moved_label_B, margin)
    expected_BC = logits_BC[:, order_C]
    torch.testing.assert_close(moved_BC, expected_BC)
    torch.testing.assert_close(moved_loss, loss)


@pytest.mark.parametrize("num_classes", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_few_classes_are_enough(name, num_classes):
    head = make(name, num_classes)
    emb_BD, label_B = make_batch(4, num_classes)
    emb_BD.requires_grad_()
    largest_margin = margins_of(name)[-1]
    loss, logits_BC = head(emb_BD, label_B, largest_margin)
    loss.backward()
    assert loss.isfinite()
    assert logits_BC.shape == (4, num_classes)
    assert emb_BD.grad is not None
    assert emb_BD.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_rows_are_learned(name):
    head = make(name)
    emb_BD, label_B = make_batch(18)
    layer = nn.Linear(EMBED_DIM, EMBED_DIM)
    parameters = [*head.parameters(), *layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    margin = 0.25 if HEADS[name].takes_margin else 0.0
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss, _ = head(layer(emb_BD), label_B, margin)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    _, logits_BC = head(layer(emb_BD), label_B, margin)
    decided_B = logits_BC.argmax(dim=1)
    assert torch.equal(decided_B, label_B)


def test_margin_zero_is_cross_entropy_of_the_logits():
    for name in ("am_softmax", "aam_softmax", "aam_softmax_subcenter_topk", "softmax"):
        head = make(name)
        emb_BD, label_B = make_batch()
        loss, logits_BC = head(emb_BD, label_B)
        expected = F.cross_entropy(logits_BC, label_B)
        assert loss.item() == expected.item()
