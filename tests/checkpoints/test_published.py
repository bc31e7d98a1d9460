"""The published model: the same numbers when it comes back, and refused when it is another."""

import hashlib
import json

import pytest
import torch
from refusals import refuses
from safetensors.torch import load_file
from voices import make_noise

from speakerlab.checkpoints.model_files import read_classes
from speakerlab.checkpoints.published import file_sha256, load_published


def test_a_published_model_gives_the_same_embedding_bit_for_bit(publish_to):
    folder, embedder, head = publish_to("exp/model")
    loaded = load_published(folder)
    assert not loaded.embedder.training
    wave_1S = make_noise(1.3)
    with torch.inference_mode():
        expected_1D = embedder(wave_1S)
        assert torch.equal(loaded.embedder(wave_1S), expected_1D)
    assert loaded.config.model.args["embed_dim"] == 16

    # a model may also be named by the folder of its experiment
    by_experiment = load_published(folder.parent)
    assert by_experiment.sha256 == loaded.sha256

    tensors = {"embedder.safetensors", "head.safetensors"}
    names = {path.name for path in folder.iterdir()}
    assert names == tensors | {"card.json", "config.yaml", "speakers.txt"}
    card = json.loads((folder / "card.json").read_text())
    assert card["sha256"] == file_sha256(folder / "embedder.safetensors")
    assert card["steps"] == 7
    num_parameters = sum(p.numel() for p in embedder.parameters())
    assert card["parameters"] == num_parameters
    assert read_classes(folder) == ["a", "b", "c"]
    weight_CD = load_file(folder / "head.safetensors")["weight_CD"]
    assert torch.equal(weight_CD, head.get_parameter("weight_CD"))
    # no temporary file remains
    assert list(folder.parent.iterdir()) == [folder]


def test_equal_weights_are_equal_bytes(publish_to):
    first, _, _ = publish_to("a")
    equal, _, _ = publish_to("x/b")
    different, _, _ = publish_to("c", "seed=1")
    for name in ("embedder.safetensors", "head.safetensors"):
        content = (first / name).read_bytes()
        assert (equal / name).read_bytes() == content
        assert (different / name).read_bytes() != content


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
    with refuses(str(weights), wanted, hashlib.sha256(content).hexdigest()):
        load_published(folder)


@pytest.mark.parametrize("name", ["config.yaml", "card.json"])
def test_a_folder_without_one_of_its_files_is_called_incomplete(publish_to, name):
    folder, _, _ = publish_to("exp/model")
    (folder / name).unlink()
    for path in (folder, folder.parent):
        with refuses(str(folder), name, "copy the model", error=FileNotFoundError):
            load_published(path)
        with refuses(str(folder), name, "copy the model", error=FileNotFoundError):
            read_classes(path)


@pytest.mark.parametrize("occupant", ["a file", "a folder of notes", "an experiment"])
def test_a_model_replaces_nothing_but_a_model(publish_to, tmp_path, occupant):
    place = tmp_path / "model"
    if occupant == "a file":
        place.write_text("mine")
    else:
        existing_file = place / "notes.txt"
        if occupant == "an experiment":
            existing_file = place / "checkpoints/note"
        existing_file.parent.mkdir(parents=True)
        existing_file.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with refuses(str(place)):
        publish_to("model")
    assert sorted(tmp_path.rglob("*")) == before
