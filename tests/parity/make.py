"""Makes the figures of tests/parity from the code of their publishers.

    python tests/parity/make.py --toolkit 3dspeaker|wespeaker|redimnet2|mhfa --peer CHECKOUT \
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

PACKAGES = {
    "3dspeaker": "speakerlab",
    "wespeaker": "wespeaker",
    "redimnet2": "redimnet2",
    "mhfa": "models",  # github.com/JunyiPeng00/SLT22_MultiHead-Factorized-Attentive-Pooling
}
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
    make_network = getattr(import_module(module), name)
    network: Any = make_network(**member.upstream_args)
    # A module that computes its features is given them here.
    if hasattr(network, "spec"):
        network.spec = Transposed()
    if member.layers == "normalised":
        # WeSpeaker has this part in its front end; here the network is given it.
        network.norm = nn.LayerNorm(member.feat_dim)
    return network.eval()


def as_published(network: Any, member: Member, feats_BTF: torch.Tensor) -> Any:
    """The input of the published code, for features of several layers side by side."""
    num_layers = member.args.get("num_layers", 1)
    layers = feats_BTF.chunk(num_layers, 2)
    if member.layers == "tuple":
        return layers
    if member.layers == "last axis":
        return torch.stack(layers, -1).transpose(1, 2)
    if member.layers == "normalised":
        normalised_BTF = network.norm(feats_BTF)
        # WeSpeaker's cmvn, which is its default.
        return normalised_BTF - normalised_BTF.mean(1, keepdim=True)
    return feats_BTF


@torch.no_grad()
def make_figures(member: Member) -> tuple[Figures, float]:
    """The figures, and the error of the published code in fp32."""
    network = build(member)
    # Each weight is drawn by its published name: our model gets the same ones.
    shapes = {}
    weights = {}
    for name, value in network.state_dict().items():
        shapes[name] = tuple(value.shape)
        weights[name] = fill(name, shapes[name], SEED)
    network.load_state_dict(weights)

    # First in fp32, then in float64.
    feats = {}
    rough = {}
    for frames in FRAMES:
        feats[frames] = features(frames, SEED, feat_dim=member.feat_dim)
        rough[frames] = embed(network, member, feats[frames])
    network.double()
    exact = {}
    for frames in FRAMES:
        emb_BD = embed(network, member, feats[frames].double())
        exact[frames] = emb_BD.numpy()

    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    figures = Figures(
        shapes=shapes,
        num_parameters=num_parameters,
        seed=SEED,
        embedding=exact,
    )
    fp32_error = max(error(rough[frames], exact[frames]) for frames in FRAMES)
    return figures, fp32_error


def embed(network: nn.Module, member: Member, feats_BTF: torch.Tensor) -> torch.Tensor:
    """emb_BD: of several outputs the last."""
    output = network(as_published(network, member, feats_BTF))
    has_several = isinstance(output, tuple | list)
    return output[-1] if has_several else output


def parse() -> argparse.Namespace:
    first_line = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first_line)
    parser.add_argument(
        "--toolkit",
        required=True,
        choices=sorted(PACKAGES),
    )
    parser.add_argument(
        "--peer",
        required=True,
        type=Path,
        metavar="CHECKOUT",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=PARITY,
        metavar="DIR",
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    prefix = PACKAGES[options.toolkit] + "."
    member_names = []
    for name, member in MEMBERS.items():
        if member.upstream.startswith(prefix):
            member_names.append(name)
    unknown = set(options.names) - set(member_names)
    if unknown:
        parser.error(
            f"no members of {options.toolkit}: {sorted(unknown)}; there are {member_names}"
        )
    options.names = options.names or member_names
    return options


def main() -> None:
    options = parse()
    add_package(options.toolkit, options.peer)
    for name in options.names:
        figures, fp32_error = make_figures(MEMBERS[name])
        write_figures(name, figures, folder=options.out)
        print(
            f"{name}: {figures.num_parameters:,} parameters, fp32 is {fp32_error:.1e}"
            " away"
        )


if __name__ == "__main__":
    main()
