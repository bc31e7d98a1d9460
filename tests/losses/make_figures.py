"""Write figures.npz, the reference losses of WeSpeaker and 3D-Speaker.

    python tests/losses/make_figures.py --wespeaker DIR --3d-speaker DIR

In: checkouts of both projects (Apache-2.0); runs their `wespeaker/models/projections.py` and
`speakerlab/loss/margin_loss.py`. Imports nothing of this project, because 3D-Speaker's package has
the same name. Out, next to this file: `emb_BD`, `weight_CKD`, `bias_C`, `label_B`, `margin_M`; for
each head `<head>.loss_MB` (per row) and `<head>.grad_MBD` (of the mean), computed in float64.

Letters: B rows, C classes, K centers, D embedding, M margins.
"""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MARGINS = (0.0, 0.1, 0.2, 0.5)
ROWS = 12
CLASSES = 9
CENTERS = 3
DIM = 8
# (emb_BD, label_B, margin) -> mean loss.
Loss = Callable[[Tensor, Tensor, float], Tensor]


def make_inputs() -> dict[str, Tensor]:
    """Draw embeddings near their class, at any angle, and beyond pi - margin.

    They are rounded to float32, so that the stored inputs are the exact ones.
    """
    rng = np.random.default_rng(20)
    center_C1D = rng.standard_normal((CLASSES, 1, DIM))
    spread_CKD = rng.standard_normal((CLASSES, CENTERS, DIM))
    label_B = np.arange(ROWS) % CLASSES
    # Factors of the center: very near to it, near, at any angle, and nearly opposite.
    along_B = np.repeat([3.0, 1.0, 0.0, -3.0], ROWS // 4)
    center_BD = center_C1D[label_B, 0]
    noise_BD = rng.standard_normal((ROWS, DIM)) / 2
    arrays = {
        "emb_BD": along_B[:, None] * center_BD + noise_BD,
        "weight_CKD": center_C1D + 0.2 * spread_CKD,
        "bias_C": rng.standard_normal(CLASSES),
    }
    inputs = {}
    for name, array in arrays.items():
        rounded = array.astype(np.float32)
        inputs[name] = torch.from_numpy(rounded).double()
    inputs["label_B"] = torch.from_numpy(label_B)
    return inputs


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wespeaker_loss(
    head: nn.Module,
    weight: Tensor,
    bias: float | None = None,
) -> Loss:
    """Wrap a WeSpeaker projection; SphereFace2 returns a loss, the others logits."""
    state = {"weight": weight}
    if bias is not None:
        state["bias"] = torch.full((1, 1), bias)
    head.double().load_state_dict(state)

    def loss(emb_BD: Tensor, label_B: Tensor, margin: float) -> Tensor:
        head.update(margin)  # pyright: ignore[reportCallIssue]
        output = head(emb_BD, label_B)
        if isinstance(output, tuple):
            return output[1]
        return F.cross_entropy(output, label_B)

    return loss


def three_d_speaker_loss(criterion: nn.Module, weight_CD: Tensor) -> Loss:
    """Wrap a 3D-Speaker criterion, which takes cosines."""

    def loss(emb_BD: Tensor, label_B: Tensor, margin: float) -> Tensor:
        criterion.update(margin)  # pyright: ignore[reportCallIssue]
        unit_emb_BD = F.normalize(emb_BD)
        unit_weight_CD = F.normalize(weight_CD)
        cosine_BC = F.linear(unit_emb_BD, unit_weight_CD)
        return criterion(cosine_BC, label_B)

    return loss


def make_losses(
    projections: ModuleType,
    criteria: ModuleType,
    inputs: dict[str, Tensor],
) -> dict[str, Loss]:
    """Return head -> loss; heads that exist in both projects are listed twice."""
    weight_ND = inputs["weight_CKD"].flatten(0, 1)
    weight_CD = inputs["weight_CKD"][:, 0]
    bias_C = inputs["bias_C"]
    size = (DIM, CLASSES)

    am = projections.AddMarginProduct(*size)
    aam = projections.ArcMarginProduct(*size)
    subcenter = projections.ArcMarginProduct_intertopk_subcenter(*size)
    subcenter_lm = projections.ArcMarginProduct_intertopk_subcenter(*size, do_lm=True)
    sphere_a = projections.SphereFace2(*size, margin_type="A")
    sphere_c = projections.SphereFace2(*size, margin_type="C")
    easy = criteria.ArcMarginLoss(easy_margin=True)
    entropy = criteria.EntropyLoss()

    def softmax(emb_BD: Tensor, label_B: Tensor, margin: float) -> Tensor:
        logits_BC = F.linear(emb_BD, weight_CD, bias_C)
        return entropy(logits_BC, label_B)

    return {
        "wespeaker.am": wespeaker_loss(am, weight_CD),
        "wespeaker.aam": wespeaker_loss(aam, weight_CD),
        "wespeaker.subcenter": wespeaker_loss(subcenter, weight_ND),
        "wespeaker.subcenter_lm": wespeaker_loss(subcenter_lm, weight_ND),
        "wespeaker.sphereface2_a": wespeaker_loss(sphere_a, weight_CD, 0.4),
        "wespeaker.sphereface2_c": wespeaker_loss(sphere_c, weight_CD, 0.4),
        "3dspeaker.am": three_d_speaker_loss(criteria.AddMarginLoss(), weight_CD),
        "3dspeaker.aam": three_d_speaker_loss(criteria.ArcMarginLoss(), weight_CD),
        "3dspeaker.aam_easy": three_d_speaker_loss(easy, weight_CD),
        "3dspeaker.softmax": softmax,
    }


def figures_of(
    loss: Loss,
    emb_BD: Tensor,
    label_B: Tensor,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of single rows (M, B) and the gradient of the mean loss (M, B, D)."""
    losses = []
    grads = []
    for margin in MARGINS:
        leaf_BD = emb_BD.clone().requires_grad_()
        rows = []
        for row in range(len(label_B)):
            row_BD = leaf_BD[row : row + 1]
            row_label_B = label_B[row : row + 1]
            rows.append(loss(row_BD, row_label_B, margin))
        loss_B = torch.stack(rows)
        mean = loss(leaf_BD, label_B, margin)
        torch.testing.assert_close(loss_B.mean(), mean)
        (grad_BD,) = torch.autograd.grad(mean, leaf_BD)
        losses.append(loss_B.detach().numpy())
        grads.append(grad_BD.numpy())
    return np.stack(losses), np.stack(grads)


def main() -> None:
    first_line = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first_line)
    parser.add_argument(
        "--wespeaker",
        type=Path,
        required=True,
        metavar="DIR",
    )
    parser.add_argument(
        "--3d-speaker",
        dest="three",
        type=Path,
        required=True,
        metavar="DIR",
    )
    options = parser.parse_args()
    projections = import_file(options.wespeaker / "wespeaker/models/projections.py")
    criteria = import_file(options.three / "speakerlab/loss/margin_loss.py")
    inputs = make_inputs()
    emb_BD = inputs["emb_BD"]
    label_B = inputs["label_B"]
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    losses = make_losses(projections, criteria, inputs)
    for name, loss in losses.items():
        losses_MB, grads_MBD = figures_of(loss, emb_BD, label_B)
        assert np.isfinite(losses_MB).all(), name
        assert np.isfinite(grads_MBD).all(), name
        arrays[f"{name}.loss_MB"] = losses_MB
        arrays[f"{name}.grad_MBD"] = grads_MBD

    # float32 halves the file; labels stay integers.
    small: dict[str, Any] = {"margin_M": np.array(MARGINS)}
    for name, array in arrays.items():
        is_float = array.dtype == np.float64
        small[name] = array.astype(np.float32) if is_float else array
    target = Path(__file__).with_name("figures.npz")
    np.savez_compressed(target, **small)


if __name__ == "__main__":
    main()
