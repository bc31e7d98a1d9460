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

STORED = [
    pytest.param(name, marks=[] if member.smallest else [pytest.mark.slow])
    for name, member in MEMBERS.items()
    if member.model in MODELS and (PARITY / f"{name}.npz").exists()
]


@pytest.mark.parametrize("name", STORED)
def test_published_member_is_recognised_with_its_arguments(name: str) -> None:
    member, figures = MEMBERS[name], read_figures(name)
    args: dict[str, Any] = {k: v for k, v in member.args.items() if k != "feat_dim"}
    found = recognise(
        figures.shapes,
        toolkits=(member.toolkit,),
        pooling=args.get("pooling"),  # from the configuration: two poolings have equal tensors
        feat_dim=int(str(member.args.get("feat_dim", 80))),
        where=name,
    )
    assert (found.row.model, found.row.toolkit) == (member.model, member.toolkit)
    assert found.args == complete_args(member.model, args)
    assert len(found.names) == len(MODELS[member.model](**member.args).state_dict())


def campplus_shapes() -> dict[str, tuple[int, ...]]:
    return dict(read_figures("campplus_192").shapes)


def test_counters_may_be_missing() -> None:
    shapes = {n: s for n, s in campplus_shapes().items() if not n.endswith("batches_tracked")}
    assert recognise(shapes, where="a.ckpt").row.model == "campplus"


def test_partial_match_lists_every_kind_at_most_five_times() -> None:
    shapes = campplus_shapes()
    renamed = [name for name in shapes if name.startswith("xvector.block3.tdnnd16.")]
    for name in renamed:
        shapes[f"extra.{name}"] = shapes.pop(name)
    shapes["head.conv1.weight"] = (32, 2, 3, 3)
    with pytest.raises(ValueError, match="nothing was imported") as caught:
        recognise(shapes, where="a.ckpt")
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if "is missing" in line]) == 5
    assert len([line for line in lines if "is not expected" in line]) == 5
    assert "head.conv1.weight: has shape [32, 2, 3, 3] instead of [32, 1, 3, 3]" in lines
    missing = len([name for name in renamed if not name.endswith("num_batches_tracked")])
    assert f"... and {missing - 5} more missing tensors" in lines
    assert lines[-1].startswith("a.ckpt: ")
    assert "campplus of 3D-Speaker" in lines[-1]


def test_other_tensors_are_refused_in_one_line() -> None:
    with refuses("a.pt", "1 tensors"):
        recognise({"encoder.0.weight": (3, 3)}, where="a.pt")


def test_recognition_draws_nothing() -> None:
    before = torch.random.get_rng_state()
    recognise(read_figures("eres2net_base").shapes, where="a.ckpt")
    assert torch.equal(torch.random.get_rng_state(), before)
