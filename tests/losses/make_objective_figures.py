"""Write objective_figures.npz, the reference self-supervised losses of WeSpeaker and 3D-Speaker.

    python tests/losses/make_objective_figures.py --wespeaker DIR --3d-speaker DIR

In: checkouts of both projects (Apache-2.0); runs their loss modules and RDINO's head in float64, in
a process group of one. Imports nothing of this project, because 3D-Speaker's package has the same
name. Out, next to this file: inputs, losses and gradients by name.

Letters: V views of the student, L of the teacher, B utterances, D embedding, K outputs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from make_figures import import_file
from torch import Tensor
from torch.nn import functional as F

VIEWS, LONG, ROWS, DIM, OUTPUTS = 4, 2, 6, 5, 7
EPOCHS = (0, 3, 9)
RANDOM = np.random.default_rng(22)
Figures = dict[str, Tensor]


def draw(*shape: int) -> Tensor:
    return torch.from_numpy(RANDOM.standard_normal(shape))


def gradients(name: str, loss: Tensor, **leaves: Tensor) -> Figures:
    """Return a loss and its gradients."""
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {f"{name}.loss": loss, **{f"{name}.grad_{k}": g for k, g in zip(leaves, grads)}}


def dino(three: Path, wespeaker: Path) -> Figures:
    """Losses at three epochs, with a centre, and the centre after the last one."""
    student_VBK, teacher_LBK, center_K = (
        draw(VIEWS, ROWS, OUTPUTS),
        draw(LONG, ROWS, OUTPUTS),
        draw(OUTPUTS),
    )
    found = {
        "dino.student_VBK": student_VBK,
        "dino.teacher_LBK": teacher_LBK,
        "dino.center_K": center_K,
    }
    ours = import_file(three / "speakerlab/loss/dino_loss.py").DINOLoss
    theirs = import_file(wespeaker / "wespeaker/ssl/models/dino_wrapper.py").DINOLoss
    schedule = {"warmup_teacher_temp": 0.04, "teacher_temp": 0.07, "nepochs": 10}
    for name, module in {
        "3dspeaker": ours(OUTPUTS, VIEWS, warmup_teacher_temp_epochs=4, **schedule),
        "wespeaker": theirs(OUTPUTS, VIEWS, LONG, warmup_teacher_temp_epochs_ratio=0.4, **schedule),
    }.items():
        for epoch in EPOCHS:
            module.center = center_K[None].clone()
            leaf = student_VBK.clone().requires_grad_()
            loss = module(leaf.flatten(0, 1), teacher_LBK.flatten(0, 1), epoch)
            found |= gradients(f"dino.{name}.{epoch}", loss, student_VBK=leaf)
        found[f"dino.{name}.center_K"] = module.center[0]
    return found


def regularizers(three: Path) -> Figures:
    """RDINO's two terms of the mean of the long views, for fewer and for more rows than columns."""
    make = import_file(three / "speakerlab/loss/dino_loss.py").RegLoss
    found: Figures = {}
    for name, rows in {"few": 3, "many": 9}.items():
        student_LBW, teacher_LBW = draw(LONG, rows, DIM), draw(LONG, rows, DIM)
        found |= {
            f"spread.{name}.student_LBW": student_LBW,
            f"spread.{name}.teacher_LBW": teacher_LBW,
        }
        for term, (std, cov) in {"std": (1.0, 0.0), "cov": (0.0, 1.0)}.items():
            leaf = student_LBW.clone().requires_grad_()
            loss = make(DIM, std, cov, rows)(teacher_LBW.flatten(0, 1), leaf.flatten(0, 1))
            found |= gradients(f"spread.{name}.{term}", loss, student_LBW=leaf)
    return found


def sdpn(three: Path) -> Figures:
    """The cross-entropy, me-max, and KoLeo of one view."""
    short_VBD, long_BD, prototype_KD = draw(VIEWS, ROWS, DIM), draw(ROWS, DIM), draw(OUTPUTS, DIM)
    found = {
        "sdpn.short_VBD": short_VBD,
        "sdpn.long_BD": long_BD,
        "sdpn.prototype_KD": prototype_KD,
    }
    module = import_file(three / "speakerlab/loss/sdpn_loss.py").SDPNLoss()
    nearest = import_file(three / "speakerlab/loss/keleo_loss.py").KoLeoLoss()
    leaves = {
        "short_VBD": short_VBD.requires_grad_(),
        "prototype_KD": prototype_KD.requires_grad_(),
    }
    labels_KK = torch.eye(OUTPUTS, dtype=torch.float64)
    loss, me_max, _, targets = module(short_VBD.flatten(0, 1), long_BD, prototype_KD, labels_KK)
    found |= gradients("sdpn.cross_entropy", loss, **leaves) | {"sdpn.target_BK": targets[:ROWS]}
    loss, me_max, _, _ = module(short_VBD.flatten(0, 1), long_BD, prototype_KD, labels_KK)
    found |= gradients("sdpn.me_max", me_max, **leaves)
    return found | gradients("sdpn.koleo", nearest(short_VBD[0]), short_VBD=short_VBD)


def simclr(wespeaker: Path) -> Figures:
    module = import_file(wespeaker / "wespeaker/ssl/models/simclr_wrapper.py").SimCLR(
        torch.nn.Module()
    )
    leaf = draw(2, ROWS, DIM).requires_grad_()
    logits, labels = module.prepare_for_info_nce_loss(leaf.flatten(0, 1))
    loss = F.cross_entropy(logits, labels)
    return {"simclr.out_2BD": leaf, **gradients("simclr", loss, out_2BD=leaf)}


def projectors(three: Path) -> Figures:
    """RDINO's and SDPN's heads in training mode, and their weights."""
    rdino = import_file(three / "speakerlab/models/rdino/RDINO_Head.py").RDINOHead
    sdpn_head = import_file(three / "speakerlab/models/sdpn/SDPN_Head.py").SDPNHead
    sizes = {"use_bn": True, "hidden_dim": 6, "bottleneck_dim": 4}
    x_ND = draw(ROWS, DIM)
    found = {"projector.x_ND": x_ND}
    for name, head in {
        "rdino": rdino(DIM, OUTPUTS, add_dim=8, **sizes),
        "sdpn": sdpn_head(DIM, **sizes),
    }.items():
        output = head.double()(x_ND)
        outputs = output if isinstance(output, tuple) else (output,)
        found |= {f"projector.{name}.out{i}": one for i, one in enumerate(outputs)}
        found |= {f"projector.{name}.state.{k}": v for k, v in head.named_parameters()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wespeaker", type=Path, required=True, metavar="DIR")
    parser.add_argument("--3d-speaker", dest="three", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    sys.path.insert(0, str(options.three))
    torch.manual_seed(22)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = dino(options.three, options.wespeaker) | regularizers(options.three)
        found |= sdpn(options.three) | simclr(options.wespeaker) | projectors(options.three)
        dist.destroy_process_group()
    arrays = {name: tensor.detach().numpy() for name, tensor in found.items()}
    assert all(np.isfinite(array).all() for array in arrays.values())
    np.savez_compressed(Path(__file__).with_name("objective_figures.npz"), **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
