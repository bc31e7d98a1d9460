"""Architectures are known by their tensors: every published member, and none that is not whole."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refuses

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from figures import PARITY, read_figures
from members import MEMBERS

from speakerlab.checkpoints.recognise import complete_args, recognise
from speakerlab.models import MODELS

STORED = []
for name, member in MEMBERS.items():
    is_stored = (PARITY / f"{name}.npz").exists()
    # Networks over a pretrained model are not imported.
    if member.model in MODELS and is_stored and not member.layers:
        marks = [] if member.smallest else [pytest.mark.slow]
        STORED.append(pytest.param(name, marks=marks))


@pytest.mark.parametrize("name", STORED)
def test_published_member_is_recognised_with_its_arguments(name: str) -> None:
    member = MEMBERS[name]
    figures = read_figures(name)
    args: dict[str, Any] = dict(member.args)
    feat_dim = int(str(args.pop("feat_dim", 80)))
    recognised = recognise(
        figures.shapes,
        toolkits=(member.toolkit,),
        # From the configuration: two poolings have equal tensors.
        pooling=args.get("pooling"),
        feat_dim=feat_dim,
        where=name,
    )
    assert recognised.row.model == member.model
    assert recognised.row.toolkit == member.toolkit
    assert recognised.args == complete_args(member.model, args)
    with torch.device("meta"):  # without weights
        backbone = MODELS[member.model](**member.args)
    assert len(recognised.names) == len(backbone.state_dict())


def campplus_shapes() -> dict[str, tuple[int, ...]]:
    return dict(read_figures("campplus_192").shapes)


def test_counters_may_be_missing() -> None:
    shapes = campplus_shapes()
    for name in list(shapes):
        if name.endswith("num_batches_tracked"):
            del shapes[name]
    recognised = recognise(shapes, where="a.ckpt")
    assert recognised.row.model == "campplus"


def test_partial_match_lists_every_kind_at_most_five_times() -> None:
    shapes = campplus_shapes()
    layer = "xvector.block3.tdnnd16."
    renamed = [name for name in shapes if name.startswith(layer)]
    for name in renamed:
        shapes[f"extra.{name}"] = shapes.pop(name)
    shapes["head.conv1.weight"] = (32, 2, 3, 3)
    with pytest.raises(ValueError, match="nothing was imported") as caught:
        recognise(shapes, where="a.ckpt")
    lines = str(caught.value).splitlines()
    missing = [line for line in lines if "is missing" in line]
    assert len(missing) == 5
    unexpected = [line for line in lines if "is not expected" in line]
    assert len(unexpected) == 5
    misshaped = "head.conv1.weight: has shape [32, 2, 3, 3] instead of [32, 1, 3, 3]"
    assert misshaped in lines
    num_missing = 0
    for name in renamed:
        num_missing += not name.endswith("num_batches_tracked")
    assert f"... and {num_missing - 5} more missing tensors" in lines
    assert lines[-1].startswith("a.ckpt: ")
    assert "campplus of 3D-Speaker" in lines[-1]


def test_other_tensors_are_refused_in_one_line() -> None:
    with refuses("a.pt", "1 tensors"):
        shapes = {"encoder.0.weight": (3, 3)}
        recognise(shapes, where="a.pt")


def test_recognition_draws_nothing() -> None:
    before = torch.random.get_rng_state()
    recognise(read_figures("eres2net_base").shapes, where="a.ckpt")
    after = torch.random.get_rng_state()
    assert torch.equal(after, before)
