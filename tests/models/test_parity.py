"""The published architectures: parameter names, shapes, counts, and the embeddings they must give.

The figures are those of the publishers' code (see figures.py), computed in float64. In float64 ours
must give the same to 1e-9: every wrong detail shows. In fp32 some of these networks, of
random weights, amplify rounding: the published ERes2NetV2 w24s4ep4 is 15 % away from itself in
float64, and from itself in fp32 on another machine; what is allowed there is in the tables.

Errors here are the largest difference over the largest value.
"""

import copy
import math
import os
import subprocess
import sys
from functools import lru_cache

import numpy as np
import pytest
import torch
from figures import FRAMES, PARITY, error, features, fill, read_figures
from members import MEMBERS
from torch import nn

from speakerlab.checkpoints.architectures import to_our_name
from speakerlab.models import MODELS

LARGE = 10_000_000  # parameters; from here on float64 takes seconds, so `make test` does half of it

every_member = pytest.mark.parametrize("name", MEMBERS)


def rename(name: str, published: str) -> str:
    """Our name of a tensor that the member `name` is published with."""
    return to_our_name(published, model=MEMBERS[name].model, toolkit=MEMBERS[name].toolkit)


@lru_cache(maxsize=1)
def filled(name: str) -> nn.Module:
    """The member in eval mode with the weights that its figures were computed with."""
    member, figures = MEMBERS[name], read_figures(name)
    model = MODELS[member.model](**member.args).eval()
    weights = {
        rename(name, published): fill(published, shape, figures.seed)
        for published, shape in figures.shapes.items()
    }
    weights.pop("", None)
    model.load_state_dict(weights)
    return model


def cases():
    for name, member in MEMBERS.items():
        stored = (PARITY / f"{name}.npz").exists()  # if not, another test says so
        large = stored and read_figures(name).num_parameters > LARGE
        # what overflows fp32 with such weights is in float64 only
        for dtype in (torch.float64, torch.float32)[: 1 + math.isfinite(member.fp32)]:
            for frames in FRAMES:
                too_long = dtype == torch.float64 and frames == max(FRAMES) and large
                slow = too_long or not member.smallest
                marks = [pytest.mark.slow] if slow else []
                number = str(dtype).removeprefix("torch.")
                yield pytest.param(name, dtype, frames, marks=marks, id=f"{name} {number} {frames}")


def test_registry_members_and_figures_are_the_same_set():
    assert {member.model for member in MEMBERS.values()} == set(MODELS)
    assert {member.model for member in MEMBERS.values() if member.smallest} == set(MODELS)
    assert {path.stem for path in PARITY.glob("*.npz")} == set(MEMBERS)


@every_member
def test_names_shapes_and_count_are_as_published(name):
    member, figures = MEMBERS[name], read_figures(name)
    with torch.device("meta"):
        model = MODELS[member.model](**member.args)
    ours = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    renamed = {rename(name, key): shape for key, shape in figures.shapes.items()}
    left_out = [key for key in figures.shapes if not rename(name, key)]
    renamed.pop("", None)
    assert len(renamed) + len(left_out) == len(figures.shapes)  # no two have one name
    assert ours == renamed
    count = figures.num_parameters - sum(int(np.prod(figures.shapes[key])) for key in left_out)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(("name", "dtype", "frames"), [*cases()])
@torch.no_grad()
def test_embeddings_are_as_published(name, dtype, frames):
    member, figures = MEMBERS[name], read_figures(name)
    model = filled(name)
    if dtype == torch.float64:
        model = copy.deepcopy(model).double()
    emb_BD = model(features(frames, figures.seed, feat_dim=member.feat_dim).to(dtype))
    allowed = member.fp32 if dtype == torch.float32 else 1e-9
    assert error(emb_BD, figures.embedding[frames]) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["campplus_192", "eres2net_base", "xvector_wespeaker"])
def test_figures_are_what_the_publishers_code_gives(name, tmp_path):
    """With SPEAKERLAB_3DSPEAKER and SPEAKERLAB_WESPEAKER naming checkouts."""
    toolkit = MEMBERS[name].toolkit
    peer = os.environ.get(f"SPEAKERLAB_{toolkit.upper()}")
    if peer is None:
        pytest.skip(f"SPEAKERLAB_{toolkit.upper()} is not set")
    command = [sys.executable, PARITY / "make.py", "--toolkit", toolkit, "--peer", peer]
    subprocess.run([*command, "--out", tmp_path, name], check=True)
    made, stored = read_figures(name, folder=tmp_path), read_figures(name)
    assert made.shapes == stored.shapes
    for frames in FRAMES:
        np.testing.assert_allclose(made.embedding[frames], stored.embedding[frames], rtol=1e-5)
