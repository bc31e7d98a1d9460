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
ROWS, CLASSES, CENTERS, DIM = 12, 9, 3, 8
Loss = Callable[[Tensor, Tensor, float], Tensor]  # emb_BD, label_B, margin -> mean loss


def make_inputs() -> dict[str, Tensor]:
    """Draw embeddings near their class, at any angle, and beyond pi - margin.

    They are rounded to float32, so that the stored inputs are the exact ones.
    """
    rng = np.random.default_rng(20)
    weight_C1D = rng.standard_normal((CLASSES, 1, DIM))
    weight_CKD = weight_C1D + 0.2 * rng.standard_normal((CLASSES, CENTERS, DIM))
    label_B = np.arange(ROWS) % CLASSES
    along_B1 = np.repeat([3.0, 1.0, 0.0, -3.0], ROWS // 4)[:, None]
    emb_BD = along_B1 * weight_C1D[label_B, 0] + rng.standard_normal((ROWS, DIM)) / 2
    arrays = {"emb_BD": emb_BD, "weight_CKD": weight_CKD, "bias_C": rng.standard_normal(CLASSES)}
    inputs = {name: torch.from_numpy(a.astype(np.float32)).double() for name, a in arrays.items()}
    return {**inputs, "label_B": torch.from_numpy(label_B)}


def import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wespeaker_loss(head: nn.Module, weight: Tensor, bias: float | None = None) -> Loss:
    """Wrap a WeSpeaker projection; SphereFace2 returns a loss, the others logits."""
    head.double().load_state_dict(
        {"weight": weight} | ({} if bias is None else {"bias": torch.full((1, 1), bias)})
    )

    def loss(emb_BD: Tensor, label_B: Tensor, margin: float) -> Tensor:
        head.update(margin)  # pyright: ignore[reportCallIssue]
        output = head(emb_BD, label_B)
        return output[1] if isinstance(output, tuple) else F.cross_entropy(output, label_B)

    return loss


def three_d_speaker_loss(criterion: nn.Module, weight_CD: Tensor) -> Loss:
    """Wrap a 3D-Speaker criterion, which takes cosines."""

    def loss(emb_BD: Tensor, label_B: Tensor, margin: float) -> Tensor:
        criterion.update(margin)  # pyright: ignore[reportCallIssue]
        return criterion(F.linear(F.normalize(emb_BD), F.normalize(weight_CD)), label_B)

    return loss


def make_losses(
    projections: ModuleType, criteria: ModuleType, inputs: dict[str, Tensor]
) -> dict[str, Loss]:
    """Return head -> loss; heads that exist in both projects are listed twice."""
    many_ND, one_CD = inputs["weight_CKD"].flatten(0, 1), inputs["weight_CKD"][:, 0]
    bias_C = inputs["bias_C"]
    size = (DIM, CLASSES)
    subcenter = projections.ArcMarginProduct_intertopk_subcenter
    sphere = projections.SphereFace2
    entropy = criteria.EntropyLoss()
    return {
        "wespeaker.am": wespeaker_loss(projections.AddMarginProduct(*size), one_CD),
        "wespeaker.aam": wespeaker_loss(projections.ArcMarginProduct(*size), one_CD),
        "wespeaker.subcenter": wespeaker_loss(subcenter(*size), many_ND),
        "wespeaker.subcenter_lm": wespeaker_loss(subcenter(*size, do_lm=True), many_ND),
        "wespeaker.sphereface2_a": wespeaker_loss(sphere(*size, margin_type="A"), one_CD, 0.4),
        "wespeaker.sphereface2_c": wespeaker_loss(sphere(*size, margin_type="C"), one_CD, 0.4),
        "3dspeaker.am": three_d_speaker_loss(criteria.AddMarginLoss(), one_CD),
        "3dspeaker.aam": three_d_speaker_loss(criteria.ArcMarginLoss(), one_CD),
        "3dspeaker.aam_easy": three_d_speaker_loss(
            criteria.ArcMarginLoss(easy_margin=True), one_CD
        ),
        "3dspeaker.softmax": lambda emb_BD, label_B, margin: entropy(
            F.linear(emb_BD, one_CD, bias_C), label_B
        ),
    }


def figures_of(loss: Loss, emb_BD: Tensor, label_B: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of single rows (M, B) and the gradient of the mean loss (M, B, D)."""
    losses, grads = [], []
    for margin in MARGINS:
        leaf_BD = emb_BD.clone().requires_grad_()
        rows = [loss(leaf_BD[i : i + 1], label_B[i : i + 1], margin) for i in range(len(label_B))]
        mean = loss(leaf_BD, label_B, margin)
        torch.testing.assert_close(torch.stack(rows).mean(), mean)
        losses.append(torch.stack(rows).detach().numpy())
        grads.append(torch.autograd.grad(mean, leaf_BD)[0].numpy())
    return np.stack(losses), np.stack(grads)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wespeaker", type=Path, required=True, metavar="DIR")
    parser.add_argument("--3d-speaker", dest="three", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    projections = import_file(options.wespeaker / "wespeaker/models/projections.py")
    criteria = import_file(options.three / "speakerlab/loss/margin_loss.py")
    inputs = make_inputs()
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    for name, loss in make_losses(projections, criteria, inputs).items():
        losses_MB, grads_MBD = figures_of(loss, inputs["emb_BD"], inputs["label_B"])
        assert np.isfinite(losses_MB).all() and np.isfinite(grads_MBD).all(), name
        arrays |= {f"{name}.loss_MB": losses_MB, f"{name}.grad_MBD": grads_MBD}
    small: dict[str, Any] = {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in arrays.items()
    }
    target = Path(__file__).with_name("figures.npz")
    np.savez_compressed(target, margin_M=np.array(MARGINS), **small)


if __name__ == "__main__":
    main()
