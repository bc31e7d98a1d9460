"""The published architectures: parameter names, shapes, counts, and the embeddings they must give.

The figures are those of the publishers' code (see figures.py), computed in float64. In float64 ours
must give the same to 1e-9: every wrong detail shows. In fp32 some of these networks, of
random weights, amplify rounding: the published ERes2NetV2 w24s4ep4 is 15 % away from itself in
float64, and from itself in fp32 on another machine; what is allowed there is in the tables.

Errors here are the largest difference over the largest value.
"""

import copy
import itertools
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

every_member = pytest.mark.parametrize("name", MEMBERS)


def rename(name: str, published: str) -> str:
    """Our name of a tensor that the member `name` is published with."""
    member = MEMBERS[name]
    return to_our_name(
        published,
        model=member.model,
        toolkit=member.toolkit,
    )


@lru_cache(maxsize=1)
def filled(name: str) -> nn.Module:
    """The member in eval mode with the weights that its figures were computed with."""
    member = MEMBERS[name]
    figures = read_figures(name)
    model = MODELS[member.model](**member.args)
    model.eval()
    weights = {}
    for published, shape in figures.shapes.items():
        our_name = rename(name, published)
        weights[our_name] = fill(published, shape, figures.seed)
    weights.pop("", None)
    model.load_state_dict(weights)
    return model


def cases():
    for name, member in MEMBERS.items():
        dtypes = [torch.float64]
        # Members that overflow fp32 with such weights are tested in float64 only.
        if math.isfinite(member.fp32):
            dtypes.append(torch.float32)
        for dtype, frames in itertools.product(dtypes, FRAMES):
            # `make test` takes the exact type with the fewest frames, the fast one with the most.
            is_usual = frames == (min if dtype == torch.float64 else max)(FRAMES)
            marks = []
            if not is_usual or not member.smallest:
                marks.append(pytest.mark.slow)
            number = str(dtype).removeprefix("torch.")
            yield pytest.param(
                name,
                dtype,
                frames,
                marks=marks,
                id=f"{name} {number} {frames}",
            )


def test_registry_members_and_figures_are_the_same_set():
    models = {member.model for member in MEMBERS.values()}
    models_of_smallest = {
        member.model for member in MEMBERS.values() if member.smallest
    }
    stored_names = {path.stem for path in PARITY.glob("*.npz")}
    assert models == set(MODELS)
    assert models_of_smallest == set(MODELS)
    assert stored_names == set(MEMBERS)


@every_member
def test_names_shapes_and_count_are_as_published(name):
    member = MEMBERS[name]
    figures = read_figures(name)
    with torch.device("meta"):
        model = MODELS[member.model](**member.args)
    ours = {key: tuple(value.shape) for key, value in model.state_dict().items()}

    # Published tensors without a name of ours are left out here.
    expected = {}
    left_out = []
    for key, shape in figures.shapes.items():
        our_name = rename(name, key)
        if our_name:
            expected[our_name] = shape
        else:
            left_out.append(key)
    # No two have one name.
    assert len(expected) + len(left_out) == len(figures.shapes)
    assert ours == expected

    num_left_out = sum(math.prod(figures.shapes[key]) for key in left_out)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == figures.num_parameters - num_left_out


@pytest.mark.parametrize(("name", "dtype", "frames"), [*cases()])
@torch.no_grad()
def test_embeddings_are_as_published(name, dtype, frames):
    member = MEMBERS[name]
    figures = read_figures(name)
    model = filled(name)
    if dtype == torch.float64:
        model = copy.deepcopy(model).double()
    feats_BTF = features(frames, figures.seed, feat_dim=member.feat_dim)
    emb_BD = model(feats_BTF.to(dtype))
    allowed = member.fp32 if dtype == torch.float32 else 1e-9
    expected_BD = figures.embedding[frames]
    assert error(emb_BD, expected_BD) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["campplus_192", "eres2net_base", "xvector_wespeaker"])
def test_figures_are_what_the_publishers_code_gives(name, tmp_path):
    """With SPEAKERLAB_3DSPEAKER and SPEAKERLAB_WESPEAKER naming checkouts."""
    toolkit = MEMBERS[name].toolkit
    variable = f"SPEAKERLAB_{toolkit.upper()}"
    peer = os.environ.get(variable)
    if peer is None:
        pytest.skip(f"{variable} is not set")
    command = [
        sys.executable,
        PARITY / "make.py",
        "--toolkit",
        toolkit,
        "--peer",
        peer,
        "--out",
        tmp_path,
        name,
    ]
    subprocess.run(command, check=True)
    made = read_figures(name, folder=tmp_path)
    stored = read_figures(name)
    assert made.shapes == stored.shapes
    for frames in FRAMES:
        emb_BD = made.embedding[frames]
        expected_BD = stored.embedding[frames]
        np.testing.assert_allclose(emb_BD, expected_BD, rtol=1e-5)
