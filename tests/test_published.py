"""The published model: the same numbers when it comes back, and refused when it is another."""

import hashlib
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from voices import make_noise

from speakerlab import build
from speakerlab.published import (
    file_sha256,
    find_model,
    init_from,
    load_published,
    publish,
    read_classes,
)


@pytest.fixture
def publish_to(make_config, make_embedder, tmp_path: Path):
    """publish_to("a", classes=["x"]) -> (folder, embedder, head) of a model of `tmp_path/a`."""

    def make(name: str, *overrides: str, classes=("a", "b", "c")):
        config, embedder = make_config(*overrides), make_embedder(*overrides)
        head = build.build_head(config, embed_dim=16, num_classes=len(classes))
        publish(
            tmp_path / name,
            embedder=embedder,
            head=head,
            config=config,
            speakers=classes,
            facts={"steps": 7},
        )
        return tmp_path / name, embedder, head

    return make


def test_a_published_model_gives_the_same_embedding_bit_for_bit(publish_to):
    folder, embedder, _ = publish_to("exp/model")
    found = load_published(folder)
    assert not found.embedder.training
    with torch.inference_mode():
        assert torch.equal(found.embedder(make_noise(1.3)), embedder(make_noise(1.3)))
    assert load_published(folder.parent).sha256 == found.sha256  # by its experiment
    assert found.config.model.args["embed_dim"] == 16


def test_what_lies_in_the_folder(publish_to):
    folder, embedder, head = publish_to("model")
    assert sorted(path.name for path in folder.iterdir()) == [
        "card.json",
        "config.yaml",
        "embedder.safetensors",
        "head.safetensors",
        "speakers.txt",
    ]
    card = json.loads((folder / "card.json").read_text())
    assert card["sha256"] == file_sha256(folder / "embedder.safetensors")
    assert card["steps"] == 7
    assert card["parameters"] == sum(p.numel() for p in embedder.parameters())
    assert read_classes(folder) == ["a", "b", "c"]
    weight_CD = load_file(folder / "head.safetensors")["weight_CD"]
    assert torch.equal(weight_CD, head.get_parameter("weight_CD"))
    assert list(folder.parent.iterdir()) == [folder]


def test_equal_weights_are_equal_bytes(publish_to):
    a, b, other = (publish_to(*given)[0] for given in (("a",), ("x/b",), ("c", "seed=1")))
    for name in ("embedder.safetensors", "head.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
        assert (a / name).read_bytes() != (other / name).read_bytes()


def test_publishing_again_replaces_everything(publish_to):
    folder, _, _ = publish_to("model")
    (folder / "old.txt").touch()
    before = load_published(folder).sha256
    publish_to("model", "seed=1")
    assert load_published(folder).sha256 != before
    assert not (folder / "old.txt").exists()


@pytest.mark.parametrize("place", [200, -1])
def test_a_flipped_byte_is_refused(publish_to, place):
    folder, _, _ = publish_to("model")
    weights = folder / "embedder.safetensors"
    wanted = file_sha256(weights)
    content = bytearray(weights.read_bytes())
    content[place] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        load_published(folder)
    got = hashlib.sha256(content).hexdigest()
    assert str(refused.value) == (
        f"{weights}: sha256 must be {wanted}, got {got}; copy the model again"
    )


def test_no_model(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="has no model, got no embedder.safetensors; run s"):
        find_model(tmp_path)


def test_initialisation_takes_the_embedder_and_the_rows_of_the_same_name(
    publish_to, make_config, make_embedder, caplog, head_rows, copied
):
    folder, embedder, old_head = publish_to("model", classes=("a", "b", "c"))
    fresh = make_embedder("seed=9")
    classes = ["new", "c", "a", "c#0.9"]
    head = build.build_head(make_config("seed=9"), embed_dim=16, num_classes=4)
    before_CD = head.get_parameter("weight_CD").detach().clone()
    with caplog.at_level(logging.INFO):
        init_from(folder, embedder=fresh, head=head, classes=classes, head_rows=head_rows)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, embedder.state_dict()[name]), name
    wanted_CD = before_CD.clone()
    if copied:
        old_CD = old_head.get_parameter("weight_CD")
        wanted_CD[1], wanted_CD[2] = old_CD[2], old_CD[0]
    assert torch.equal(head.get_parameter("weight_CD"), wanted_CD)
    assert head.get_parameter("weight_CD").requires_grad
    assert f"tensors, {copied} of 4 head rows by name" in caplog.text


def test_a_model_that_does_not_fit_is_refused_by_its_tensors(publish_to, make_embedder):
    folder, _, head = publish_to("model")
    narrow = make_embedder("model.args.embed_dim=8")
    before = {name: tensor.clone() for name, tensor in narrow.state_dict().items()}
    with pytest.raises(ValueError) as refused:
        init_from(folder, embedder=narrow, head=head, classes=["a"], head_rows="match")
    assert str(refused.value) == (
        f"{folder}: must hold the model of this configuration, got 3 tensors that are missing, "
        "unexpected or of another shape (backbone.xvector.dense.linear.weight, "
        "backbone.xvector.dense.nonlinear.batchnorm.running_mean, "
        "backbone.xvector.dense.nonlinear.batchnorm.running_var); use its model section"
    )
    assert all(torch.equal(narrow.state_dict()[name], before[name]) for name in before)


def test_sha256_of_a_file_larger_than_a_piece(tmp_path: Path):
    content = b"abc" * 1_000_000
    (tmp_path / "x").write_bytes(content)
    assert file_sha256(tmp_path / "x") == hashlib.sha256(content).hexdigest()
