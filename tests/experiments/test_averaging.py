"""The mean of the last checkpoints of the schedule, by hand."""

import pytest
import torch
from refusals import refuses

from speakerlab.checkpoints.published import load_published
from speakerlab.experiments.averaging import average_newest, publish_average
from speakerlab.inference.torch_model import load_classifier
from speakerlab.training.checkpoint import list_checkpoints
from speakerlab.training.writer import CheckpointWriter


@pytest.fixture
def exp(tmp_path, make_config, make_embedder):
    """Checkpoints at steps 1 to 4, each an embedder of its own seed; step 3 off the schedule."""
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=10)
    for step in (1, 2, 3, 4):
        weights = make_embedder(f"seed={step}").state_dict()
        task = {f"embedder.{name}": tensor for name, tensor in weights.items()}
        task["head.weight_CD"] = torch.zeros(3, 16)
        writer.save({"step": step, "attempt": 0, "task": task}, scheduled=step != 3)
    writer.wait()
    make_config().write(tmp_path / "config.yaml")
    return tmp_path


def test_the_mean_is_that_of_the_newest_on_the_schedule(exp, make_embedder):
    mean = make_embedder()
    assert average_newest(exp, 2, mean) == [2, 4]
    one, other = (make_embedder(f"seed={step}").state_dict() for step in (2, 4))
    for name, tensor in mean.state_dict().items():
        hand = ((one[name].double() + other[name].double()) / 2).to(tensor.dtype)
        assert torch.equal(tensor, hand), name
    assert average_newest(exp, 99, mean) == [1, 2, 4]


def test_it_is_published_as_a_model(exp, tmp_path):
    steps, digest = publish_average(exp, 3, tmp_path / "out")
    assert steps == [1, 2, 4] and load_published(tmp_path / "out").sha256 == digest


def test_a_head_that_decides_is_averaged_and_published(make_config, make_embedder, tmp_path):
    folder, head = tmp_path / "lid", {"head.weight_CD": torch.ones(2, 16)}
    writer = CheckpointWriter(folder / "checkpoints", keep=10)
    weights = make_embedder().state_dict()
    for step in (1, 2, 6):
        task = {f"embedder.{name}": tensor for name, tensor in weights.items()}
        task |= {name: step * tensor for name, tensor in head.items()}
        writer.save({"step": step, "attempt": 0, "task": task}, scheduled=True)
    writer.wait()
    make_config("task=identification").write(folder / "config.yaml")
    (folder / "speakers.txt").write_text("de\nth\n")
    assert publish_average(folder, 3, tmp_path / "mean")[0] == [1, 2, 6]
    found = load_classifier(tmp_path / "mean")
    assert found.classes == ["de", "th"]
    assert torch.equal(found.head.weight_CD, torch.full((2, 16), 3.0))


def test_nothing_that_is_there_is_replaced(exp, tmp_path):
    (tmp_path / "notes").mkdir()
    for out in (exp, tmp_path / "notes"):
        with refuses(str(out)):
            publish_average(exp, 3, out)
    assert len(list_checkpoints(exp / "checkpoints")) == 3  # one was off the schedule


def test_what_cannot_be_averaged_is_said(exp, tmp_path, make_embedder):
    with refuses("--last", 0):
        publish_average(exp, 0, tmp_path / "out")
    with refuses(f"{tmp_path}/none/config.yaml", error=FileNotFoundError):
        publish_average(tmp_path / "none", 1, tmp_path / "out")
    with refuses(f"{tmp_path}/none/checkpoints"):
        average_newest(tmp_path / "none", 1, make_embedder())
