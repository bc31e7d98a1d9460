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

VIEWS = 4
LONG = 2
ROWS = 6
DIM = 5
OUTPUTS = 7
EPOCHS = (0, 3, 9)
RANDOM = np.random.default_rng(22)
Figures = dict[str, Tensor]


def draw(*shape: int) -> Tensor:
    return torch.from_numpy(RANDOM.standard_normal(shape))


def gradients(name: str, loss: Tensor, **leaves: Tensor) -> Figures:
    """Return a loss and its gradients."""
    grads = torch.autograd.grad(loss, list(leaves.values()))
    figures = {f"{name}.loss": loss}
    for key, grad in zip(leaves, grads):
        figures[f"{name}.grad_{key}"] = grad
    return figures


def dino(three: Path, wespeaker: Path) -> Figures:
    """Losses at three epochs, with a centre, and the centre after the last one."""
    student_VBK = draw(VIEWS, ROWS, OUTPUTS)
    teacher_LBK = draw(LONG, ROWS, OUTPUTS)
    center_K = draw(OUTPUTS)
    figures = {
        "dino.student_VBK": student_VBK,
        "dino.teacher_LBK": teacher_LBK,
        "dino.center_K": center_K,
    }
    ours = import_file(three / "speakerlab/loss/dino_loss.py").DINOLoss
    theirs = import_file(wespeaker / "wespeaker/ssl/models/dino_wrapper.py").DINOLoss
    schedule = {
        "warmup_teacher_temp": 0.04,
        "teacher_temp": 0.07,
        "nepochs": 10,
    }
    modules = {
        "3dspeaker": ours(
            OUTPUTS,
            VIEWS,
            warmup_teacher_temp_epochs=4,
            **schedule,
        ),
        "wespeaker": theirs(
            OUTPUTS,
            VIEWS,
            LONG,
            warmup_teacher_temp_epochs_ratio=0.4,
            **schedule,
        ),
    }
    teacher_NK = teacher_LBK.flatten(0, 1)
    for name, module in modules.items():
        for epoch in EPOCHS:
            # The loss moves the center: begin each epoch with the same.
            module.center = center_K[None].clone()
            leaf = student_VBK.clone().requires_grad_()
            loss = module(leaf.flatten(0, 1), teacher_NK, epoch)
            figures |= gradients(f"dino.{name}.{epoch}", loss, student_VBK=leaf)
        figures[f"dino.{name}.center_K"] = module.center[0]
    return figures


def regularizers(three: Path) -> Figures:
    """RDINO's two terms of the mean of the long views, for fewer and for more rows than columns."""
    make = import_file(three / "speakerlab/loss/dino_loss.py").RegLoss
    figures: Figures = {}
    num_rows = {"few": 3, "many": 9}
    # Weights of the two terms: one at a time.
    weights = {"std": (1.0, 0.0), "cov": (0.0, 1.0)}
    for name, rows in num_rows.items():
        student_LBW = draw(LONG, rows, DIM)
        teacher_LBW = draw(LONG, rows, DIM)
        figures[f"spread.{name}.student_LBW"] = student_LBW
        figures[f"spread.{name}.teacher_LBW"] = teacher_LBW
        for term, (std, cov) in weights.items():
            leaf = student_LBW.clone().requires_grad_()
            regularizer = make(DIM, std, cov, rows)
            loss = regularizer(teacher_LBW.flatten(0, 1), leaf.flatten(0, 1))
            figures |= gradients(f"spread.{name}.{term}", loss, student_LBW=leaf)
    return figures


def sdpn(three: Path) -> Figures:
    """The cross-entropy, me-max, and KoLeo of one view."""
    short_VBD = draw(VIEWS, ROWS, DIM)
    long_BD = draw(ROWS, DIM)
    prototype_KD = draw(OUTPUTS, DIM)
    figures = {
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
    short_ND = short_VBD.flatten(0, 1)
    loss, _, _, targets = module(short_ND, long_BD, prototype_KD, labels_KK)
    figures |= gradients("sdpn.cross_entropy", loss, **leaves)
    figures["sdpn.target_BK"] = targets[:ROWS]

    # The graph of the first pass is freed: a second one for the other term.
    short_ND = short_VBD.flatten(0, 1)
    _, me_max, _, _ = module(short_ND, long_BD, prototype_KD, labels_KK)
    figures |= gradients("sdpn.me_max", me_max, **leaves)
    koleo = nearest(short_VBD[0])
    return figures | gradients("sdpn.koleo", koleo, short_VBD=short_VBD)


def simclr(wespeaker: Path) -> Figures:
    wrapper = import_file(wespeaker / "wespeaker/ssl/models/simclr_wrapper.py")
    module = wrapper.SimCLR(torch.nn.Module())
    leaf = draw(2, ROWS, DIM).requires_grad_()
    logits, labels = module.prepare_for_info_nce_loss(leaf.flatten(0, 1))
    loss = F.cross_entropy(logits, labels)
    figures = {"simclr.out_2BD": leaf}
    return figures | gradients("simclr", loss, out_2BD=leaf)


def projectors(three: Path) -> Figures:
    """RDINO's and SDPN's heads in training mode, and their weights."""
    rdino = import_file(three / "speakerlab/models/rdino/RDINO_Head.py").RDINOHead
    sdpn_head = import_file(three / "speakerlab/models/sdpn/SDPN_Head.py").SDPNHead
    sizes = {
        "use_bn": True,
        "hidden_dim": 6,
        "bottleneck_dim": 4,
    }
    x_ND = draw(ROWS, DIM)
    figures = {"projector.x_ND": x_ND}
    heads = {
        "rdino": rdino(DIM, OUTPUTS, add_dim=8, **sizes),
        "sdpn": sdpn_head(DIM, **sizes),
    }
    for name, head in heads.items():
        outputs = head.double()(x_ND)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        for index, output_ND in enumerate(outputs):
            figures[f"projector.{name}.out{index}"] = output_ND
        for key, parameter in head.named_parameters():
            figures[f"projector.{name}.state.{key}"] = parameter
    return figures


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
    three = options.three
    wespeaker = options.wespeaker
    # The modules of 3D-Speaker import their package by name.
    sys.path.insert(0, str(three))
    torch.manual_seed(22)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        # In this order: all draw from one generator.
        figures = dino(three, wespeaker)
        figures |= regularizers(three)
        figures |= sdpn(three)
        figures |= simclr(wespeaker)
        figures |= projectors(three)
        dist.destroy_process_group()

    arrays = {name: tensor.detach().numpy() for name, tensor in figures.items()}
    for name, array in arrays.items():
        assert np.isfinite(array).all(), name
    target = Path(__file__).with_name("objective_figures.npz")
    np.savez_compressed(target, **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
