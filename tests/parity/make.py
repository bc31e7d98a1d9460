"""Makes the figures of tests/parity from the code of their publishers.

    python tests/parity/make.py --toolkit 3dspeaker|wespeaker|redimnet2 --peer CHECKOUT \
        [--out DIR] [NAME ...]

builds the named members of tests/models/members.py (all of the package without names) from the
modules of the checkout, in float64 and eval mode, and writes DIR/NAME.npz, by default beside this
file. What it holds, and the rule of the weights, is in tests/models/figures.py. For each it prints
how far the published code in fp32 is from itself in float64: the least that can be allowed to ours.

3D-Speaker's package bears the name of ours. This process never imports ours: the package that it
imports is made of the checkout's folder, and its own `__init__` (command lines, downloads) is not
run.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from figures import FRAMES, PARITY, Figures, error, features, fill, write_figures
from members import MEMBERS, Member

PACKAGES = {"3dspeaker": "speakerlab", "wespeaker": "wespeaker", "redimnet2": "redimnet2"}
SEED = 0


def add_package(toolkit: str, peer: Path) -> None:
    """Make the toolkit's package importable from the checkout `peer`, and from nowhere else."""
    name = PACKAGES[toolkit]
    folder = peer / name
    if not folder.is_dir():
        raise SystemExit(f"{peer}: holds no {name}; give the folder of a checkout")
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


class Transposed(nn.Module):
    """In place of the features of a module that computes them: (B, T, F) to (B, F, T)."""

    def forward(self, feats_BTF: torch.Tensor) -> torch.Tensor:
        return feats_BTF.transpose(1, 2)


def build(member: Member) -> nn.Module:
    module, _, name = member.upstream.partition(":")
    network: Any = getattr(import_module(module), name)(**member.upstream_args)
    if hasattr(network, "spec"):
        network.spec = Transposed()
    return network.eval()


@torch.no_grad()
def make_figures(member: Member) -> tuple[Figures, float]:
    """The figures, and the error of the published code in fp32."""
    network = build(member)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    weights = {name: fill(name, shape, SEED) for name, shape in shapes.items()}
    network.load_state_dict(weights)
    feats = {frames: features(frames, SEED, feat_dim=member.feat_dim) for frames in FRAMES}
    rough = {frames: embed(network, feats_BTF) for frames, feats_BTF in feats.items()}
    network.double()
    exact = {frames: embed(network, feats_BTF.double()) for frames, feats_BTF in feats.items()}
    figures = Figures(
        shapes=shapes,
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        seed=SEED,
        embedding={frames: emb_BD.numpy() for frames, emb_BD in exact.items()},
    )
    return figures, max(error(rough[frames], figures.embedding[frames]) for frames in FRAMES)


def embed(network: nn.Module, feats_BTF: torch.Tensor) -> torch.Tensor:
    """emb_BD: of several outputs the last."""
    output = network(feats_BTF)
    return output[-1] if isinstance(output, tuple | list) else output


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toolkit", required=True, choices=sorted(PACKAGES))
    parser.add_argument("--peer", required=True, type=Path, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, default=PARITY, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    package = PACKAGES[options.toolkit]
    known = [name for name, one in MEMBERS.items() if one.upstream.startswith(f"{package}.")]
    unknown = set(options.names) - set(known)
    if unknown:
        parser.error(f"no members of {options.toolkit}: {sorted(unknown)}; there are {known}")
    options.names = options.names or known
    return options


def main() -> None:
    options = parse()
    add_package(options.toolkit, options.peer)
    for name in options.names:
        figures, fp32_error = make_figures(MEMBERS[name])
        write_figures(name, figures, folder=options.out)
        print(f"{name}: {figures.num_parameters:,} parameters, fp32 is {fp32_error:.1e} away")


if __name__ == "__main__":
    main()
