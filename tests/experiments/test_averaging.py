"""The mean of the last scheduled checkpoints, against a computation by hand."""

import pytest
import torch
from refusals import refuses

from speakerlab.checkpoints.published import load_published, write_initial
from speakerlab.experiments.averaging import (
    average_newest,
    mix_with_initial,
    publish_average,
)
from speakerlab.inference.torch_model import load_classifier
from speakerlab.training.writer import CheckpointWriter


@pytest.fixture
def exp(tmp_path, make_config, make_embedder):
    """Experiment with checkpoints of different models at steps 1 to 4; 3 is not scheduled."""
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=10)
    for step in (1, 2, 3, 4):
        weights = make_embedder(f"seed={step}").state_dict()
        task = {}
        for name, tensor in weights.items():
            task[f"embedder.{name}"] = tensor
        task["head.weight_CD"] = torch.full((2, 16), 3.0 * step)
        state = {"step": step, "attempt": 0, "task": task}
        writer.save(state, scheduled=step != 3)
    writer.wait()
    make_config().write(tmp_path / "config.yaml")
    return tmp_path


def test_the_newest_scheduled_checkpoints_are_averaged(exp, make_embedder):
    mean = make_embedder()
    assert average_newest(exp, 2, mean) == [2, 4]
    second = make_embedder("seed=2").state_dict()
    fourth = make_embedder("seed=4").state_dict()
    for name, tensor in mean.state_dict().items():
        total = second[name].double() + fourth[name].double()
        expected = (total / 2).to(tensor.dtype)
        assert torch.equal(tensor, expected), name
    assert average_newest(exp, 99, mean) == [1, 2, 4]


def test_the_head_of_an_identification_is_averaged_too(exp, make_config):
    make_config("task=identification").write(exp / "config.yaml")
    (exp / "speakers.txt").write_text("de\nth\n")
    assert publish_average(exp, 3, exp / "mean")[0] == [1, 2, 4]
    loaded = load_classifier(exp / "mean")
    assert loaded.classes == ["de", "th"]
    expected_CD = torch.full((2, 16), 7.0)
    assert torch.equal(loaded.head.weight_CD, expected_CD)


def test_publishing_replaces_nothing(exp, tmp_path):
    steps, digest = publish_average(exp, 3, tmp_path / "out")
    assert steps == [1, 2, 4]
    assert load_published(tmp_path / "out").sha256 == digest
    for out in (exp, tmp_path / "out"):
        with refuses(str(out)):
            publish_average(exp, 3, out)
    with refuses(f"{tmp_path}/none/config.yaml", error=FileNotFoundError):
        publish_average(tmp_path / "none", 1, tmp_path / "other")


def test_without_scheduled_checkpoints_the_last_one_is_used(
    tmp_path, make_embedder, caplog
):
    with refuses(f"{tmp_path}/checkpoints"):
        average_newest(tmp_path, 1, make_embedder())
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=10)
    weights = make_embedder("seed=1").state_dict()
    last = {}
    best = {}
    for name, tensor in weights.items():
        last[f"embedder.{name}"] = tensor
        # the best checkpoint may be far from the last
        best[f"embedder.{name}"] = tensor + 1
    writer.save(
        {"step": 3, "attempt": 0, "task": best},
        scheduled=False,
        valid={"eer": 0.1},
    )
    writer.save(
        {"step": 7, "attempt": 0, "task": last},
        scheduled=False,
    )
    writer.wait()
    mean = make_embedder()
    assert average_newest(tmp_path, 2, mean) == [7]
    for name, tensor in mean.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert f"{tmp_path}/checkpoints: none is scheduled" in caplog.text


def test_a_share_of_the_initial_weights_is_published(exp, make_config, make_embedder):
    config = make_config("training.initial_share=0.25")
    config.write(exp / "config.yaml")
    write_initial(exp, make_embedder("seed=7"))
    publish_average(exp, 1, exp / "mean")
    published = load_published(exp / "mean").embedder.state_dict()
    trained = make_embedder("seed=4").state_dict()
    initial = make_embedder("seed=7").state_dict()
    for name, tensor in published.items():
        mean = 0.75 * trained[name].double() + 0.25 * initial[name].double()
        torch.testing.assert_close(tensor, mean.to(tensor.dtype))

    # Without a share, nothing changes.
    last = make_embedder("seed=4")
    mix_with_initial(exp, last, make_config())
    for name, tensor in last.state_dict().items():
        assert torch.equal(tensor, trained[name])


def test_a_share_of_the_initial_weights_is_refused_beside_a_head(make_config):
    with refuses("training.initial_share"):
        make_config("task=identification", "training.initial_share=0.5")
