"""Contract tests of every registered head.

Letters: B batch, C classes, D embedding.
"""

import inspect
from itertools import product

import pytest
import torch
from outside import args_of, names_of
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.losses import HEADS

NAMES = names_of("head", HEADS)
WITH_MARGIN = sorted(name for name, head in HEADS.items() if head.takes_margin)
MARGINS = (0.0, 0.1, 0.2, 0.5, 1.4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EASIER_WITH_MARGIN = {"circle"}  # a larger margin lowers its loss
EMBED_DIM, NUM_CLASSES = 16, 9


def margins_of(name: str) -> tuple[float, ...]:
    return MARGINS if HEADS[name].takes_margin else (0.0,)


def make(name: str, num_classes: int = NUM_CLASSES, **args) -> nn.Module:
    torch.manual_seed(0)
    return HEADS[name](embed_dim=EMBED_DIM, num_classes=num_classes, **{**args_of(name), **args})


def make_batch(num_rows: int = 12, num_classes: int = NUM_CLASSES) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(num_rows, EMBED_DIM), torch.arange(num_rows) % num_classes


def first_centers(head: nn.Module) -> Tensor:
    """Return the first weight of each class, (C, D)."""
    weight = head.get_parameter("weight_CD").detach()
    return weight if weight.dim() == 2 else weight[:, 0]


def hard_rows(head: nn.Module) -> tuple[Tensor, Tensor]:
    """Return embeddings equal to their weight, opposite, another's, large, and zero."""
    weight_CD = first_centers(head)
    rows = [7.3 * weight_CD, -weight_CD, weight_CD.roll(1, 0), 1e3 * weight_CD, 0 * weight_CD]
    return torch.cat(rows), torch.arange(len(weight_CD)).repeat(len(rows))


def assert_finite_gradients(head: nn.Module, emb_BD: Tensor, label_B: Tensor, margin: float):
    head.zero_grad()
    emb_BD.requires_grad_()
    loss, logits_BC = head(emb_BD, label_B, margin)
    loss.backward()
    assert loss.shape == () and logits_BC.shape == (len(emb_BD), NUM_CLASSES)
    assert loss.dtype == logits_BC.dtype == torch.float32
    assert loss.isfinite() and logits_BC.isfinite().all()
    assert emb_BD.grad is not None and emb_BD.grad.isfinite().all()
    for parameter in head.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_in_the_worst_places(name, dtype):
    """Also at a large scale, and with tiny rows and weights."""
    heads = [make(name)]
    if dtype == torch.float32 and "scale" in inspect.signature(HEADS[name]).parameters:
        heads.append(make(name, scale=3000.0))
    if name == "sphereface2":
        heads.append(make(name, scale=3000.0, margin_type="A"))
    for head, margin in product(heads, margins_of(name)):
        rows_BD, label_B = hard_rows(head)
        assert_finite_gradients(head, rows_BD.to(dtype, copy=True), label_B, margin)
    head = heads[0]
    if dtype == torch.float16:
        return  # gradients of tiny rows leave its range
    with torch.no_grad():
        head.get_parameter("weight_CD")[0] = 0
        head.get_parameter("weight_CD")[1] *= 1e-5
    for margin in margins_of(name):
        assert_finite_gradients(head, (1e-5 * rows_BD).to(dtype), label_B, margin)


@pytest.mark.parametrize("name", WITH_MARGIN)
def test_a_row_of_zeros_has_no_direction(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    emb_BD[3] = 0
    emb_BD.requires_grad_()
    loss, logits_BC = head(emb_BD, label_B, 0.2)
    loss.backward()
    assert emb_BD.grad is not None
    assert (logits_BC[3] == 0).all() and (emb_BD.grad[3] == 0).all()
    assert emb_BD.grad[2].any()


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    loss, _ = head(emb_BD.requires_grad_(), label_B, 0.2 if HEADS[name].takes_margin else 0.0)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    assert emb_BD.grad is not None and emb_BD.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_logits_carry_no_margin(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    results = [head(emb_BD, label_B, margin)[1] for margin in margins_of(name)]
    assert all(torch.equal(results[0], logits_BC) for logits_BC in results)
    other_label = head(emb_BD, (label_B + 1) % NUM_CLASSES, margins_of(name)[-1])[1]
    assert torch.equal(results[0], other_label)
    on_their_weight = head(first_centers(head), torch.zeros(NUM_CLASSES, dtype=torch.int64))[1]
    assert on_their_weight.argmax(dim=1).tolist() == list(range(NUM_CLASSES))


@pytest.mark.parametrize("name", WITH_MARGIN)
def test_loss_follows_the_margin(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    losses = torch.stack([head(emb_BD, label_B, margin)[0] for margin in MARGINS])
    rise = losses.diff()
    assert (rise < 0).all() if name in EASIER_WITH_MARGIN else (rise > 0).all(), losses


@pytest.mark.parametrize("name", NAMES)
def test_head_is_fp32_under_autocast_and_takes_a_tensor_as_margin(name):
    head = make(name)
    emb_BD, label_B = make_batch()
    margin = margins_of(name)[-1]
    expected_loss, expected_BC = head(emb_BD, label_B, margin)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, logits_BC = head(emb_BD, label_B, margin)
    assert logits_BC.dtype == torch.float32
    assert torch.equal(logits_BC, expected_BC) and torch.equal(loss, expected_loss)
    torch.testing.assert_close(head(emb_BD, label_B, torch.tensor(margin))[0], expected_loss)


@pytest.mark.parametrize("name", NAMES)
def test_classes_are_on_the_first_axis_of_the_parameters(name):
    head, moved = make(name), make(name)
    order_C = torch.randperm(NUM_CLASSES, generator=torch.Generator().manual_seed(2))
    assert head.get_parameter("weight_CD").shape[::2][0] == NUM_CLASSES
    assert head.get_parameter("weight_CD").shape[-1] == EMBED_DIM
    assert not list(head.buffers())
    with torch.no_grad():
        for old, new in zip(head.parameters(), moved.parameters()):
            old.add_(torch.randn(old.shape))
            new.copy_(old[order_C] if old.dim() else old)
    emb_BD, label_B = make_batch()
    loss, logits_BC = head(emb_BD, label_B, margins_of(name)[-1])
    moved_loss, moved_BC = moved(emb_BD, order_C.argsort()[label_B], margins_of(name)[-1])
    torch.testing.assert_close(moved_BC, logits_BC[:, order_C])
    torch.testing.assert_close(moved_loss, loss)


@pytest.mark.parametrize("num_classes", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_few_classes_are_enough(name, num_classes):
    head = make(name, num_classes)
    emb_BD, label_B = make_batch(4, num_classes)
    loss, logits_BC = head(emb_BD.requires_grad_(), label_B, margins_of(name)[-1])
    loss.backward()
    assert loss.isfinite() and logits_BC.shape == (4, num_classes)
    assert emb_BD.grad is not None and emb_BD.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_rows_are_learned(name):
    head = make(name)
    emb_BD, label_B = make_batch(18)
    layer = nn.Linear(EMBED_DIM, EMBED_DIM)
    optimizer = torch.optim.Adam([*head.parameters(), *layer.parameters()], lr=0.02)
    margin = 0.25 if HEADS[name].takes_margin else 0.0
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss, _ = head(layer(emb_BD), label_B, margin)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    assert torch.equal(head(layer(emb_BD), label_B, margin)[1].argmax(dim=1), label_B)


def test_margin_zero_is_cross_entropy_of_the_logits():
    for name in ("am_softmax", "aam_softmax", "aam_softmax_subcenter_topk", "softmax"):
        head = make(name)
        emb_BD, label_B = make_batch()
        loss, logits_BC = head(emb_BD, label_B)
        assert loss.item() == F.cross_entropy(logits_BC, label_B).item()
