"""Checkpoints as they come: formats, wrappers and prefixes are read, other files are named."""

import gzip
import zipfile
from pathlib import Path

import pytest
import torch
from refusals import refuses
from safetensors.torch import save_file
from torch import nn

from speakerlab.checkpoints.foreign_files import opened, read_tensors

TENSORS = {"a.weight": torch.ones(2, 3), "b.bias": torch.arange(3)}


def with_prefix(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in TENSORS.items()}


@pytest.mark.parametrize(
    "content",
    [
        TENSORS,
        {"state_dict": TENSORS, "epoch": 3},
        {"model": TENSORS, "optimizer": {"lr": 0.1}, "step": torch.tensor(3)},
        {"model_state_dict": with_prefix("module."), "loss": 0.5},
        {"state_dict": {"model": TENSORS}},
        {"net": TENSORS, "optimizer": {"state": {0: {"step": 1}}}, "epoch": 3},
        {"model_ema": with_prefix("module."), "args": {"lr": 0.1}},
        with_prefix("module._orig_mod."),
        with_prefix("_orig_mod.module."),
        {"state_dict": with_prefix("model."), "pytorch-lightning_version": "2.4"},
        with_prefix("module.model.encoder."),
    ],
)
def test_tensors_are_found_in_what_training_saves(content, tmp_path):
    path = tmp_path / "a.pt"
    for is_zip in (True, False):
        torch.save(content, path, _use_new_zipfile_serialization=is_zip)
        tensors = read_tensors(path)
        assert tensors.keys() == TENSORS.keys()
        assert torch.equal(tensors["b.bias"], TENSORS["b.bias"])


@pytest.mark.parametrize("name", ["m.safetensors", "pytorch_model.bin"])
def test_safetensors_are_read_whatever_their_name(name, tmp_path):
    save_file(with_prefix("module."), tmp_path / name)
    tensors = read_tensors(tmp_path / name)
    assert tensors.keys() == TENSORS.keys()
    with opened(tmp_path) as checkpoint:
        assert checkpoint.file == tmp_path / name

    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-8])
    with refuses(str(tmp_path / name), "not a safetensors file", "copy it again"):
        read_tensors(tmp_path / name)


POINTER = b"""version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 28036335
"""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (POINTER, "Git LFS"),
        (b"\n<!DOCTYPE html>\n<title>404</title>", "web page"),
        (b'<?xml version="1.0"?><Error>AccessDenied</Error>', "web page"),
        (b"", "empty"),
    ],
)
@pytest.mark.parametrize("name", ["a.bin", "a.safetensors", "a.tar.gz", "a.zip"])
def test_other_files_in_the_place_of_a_checkpoint_are_named(
    name, content, reason, tmp_path
):
    path = tmp_path / name
    path.write_bytes(content)
    with refuses(str(path), reason), opened(path) as checkpoint:
        read_tensors(checkpoint.file)


@pytest.mark.parametrize("content", [{}, {"state_dict": {}}, {"model": {}, "step": 3}])
def test_a_checkpoint_without_tensors_is_called_empty(content, tmp_path):
    path = tmp_path / "a.pt"
    torch.save(content, path)
    with refuses(str(path), "no tensors", "is empty"):
        read_tensors(path)


def test_a_checkpoint_cut_short_is_called_incomplete(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(TENSORS, path)
    content = path.read_bytes()
    for size in (len(content) // 2, len(content) - 10):
        path.write_bytes(content[:size])
        with refuses(str(path), "incomplete", "download it again"):
            read_tensors(path)


def test_damage_within_a_checkpoint_is_found(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(1000)}, path)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    path.write_bytes(content)
    with refuses(str(path), "damaged", "download it again"):
        read_tensors(path)


@pytest.mark.parametrize(
    ("name", "content", "format_name"),
    [
        ("a.pt", gzip.compress(b"a", mtime=0), "gzip"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "JSON"),
        ("a.bin", b'{"error":"Repository not found"}', "JSON"),
        ("a.onnx", b"\x08\x07\x12\x07pytorch", "ONNX"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", "HDF5"),
        ("model-00001-of-00002.safetensors", b"a", "several files"),
    ],
)
def test_other_formats_are_named(tmp_path, name, content, format_name):
    path = tmp_path / name
    path.write_bytes(content)
    with refuses(str(path), format_name):
        read_tensors(path)


def test_zip_archives_that_are_no_checkpoints_are_named(tmp_path):
    path = tmp_path / "a.pt"
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(path))
    with refuses(str(path), "TorchScript"):
        read_tensors(path)
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("avg_model.pt", b"a")
    with refuses(str(path), "zip archive"):
        read_tensors(path)


def test_copies_of_systems_are_no_checkpoints(tmp_path):
    for name in ("__MACOSX/avg_model.pt", "m/avg_model.pt", "m/._avg_model.pt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with opened(tmp_path) as checkpoint:
        assert checkpoint.file == tmp_path / "m/avg_model.pt"

    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("a.pt", "._a.pt", "a (conflicted copy).pt"):
        (folder / name).touch()
    with opened(folder) as checkpoint:
        assert checkpoint.file == folder / "a.pt"


@pytest.mark.parametrize("name", ["hyperparams.yaml", "mean_var_norm_emb.ckpt"])
def test_a_model_of_speechbrain_is_named(tmp_path, name):
    path = tmp_path / "embedding_model.ckpt"
    path.touch()
    (tmp_path / name).touch()
    with refuses(str(path), "SpeechBrain", name), opened(tmp_path):
        pass


def test_only_a_configuration_beside_the_checkpoint_must_be_of_a_toolkit(tmp_path):
    path = tmp_path / "m" / "a.pt"
    path.parent.mkdir()
    torch.save(TENSORS, path)
    (tmp_path / "config.yaml").write_text("model: {_target_: other}")
    with opened(path) as checkpoint:
        assert checkpoint.config is None
    beside = path.with_name("config.yaml")
    beside.write_text("model: {_target_: other}")
    # The import refuses it, instead of importing the model without its configuration.
    with opened(path) as checkpoint:
        assert checkpoint.config == beside


def test_a_pickled_model_is_named_with_the_way_out(tmp_path):
    path = tmp_path / "a.pt"
    for content in (nn.Linear(2, 3), {"model": nn.Linear(2, 3), "epoch": 1}):
        torch.save(content, path)
        with refuses(str(path), "torch.nn.modules.linear.Linear", "state_dict()"):
            read_tensors(path)


def test_of_two_models_none_is_chosen(tmp_path):
    torch.save({"student": TENSORS, "teacher": TENSORS}, tmp_path / "a.pt")
    with refuses(str(tmp_path / "a.pt"), "'student'", "save the tensors alone"):
        read_tensors(tmp_path / "a.pt")


def test_tensors_of_8_bits_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(3).to(torch.float8_e4m3fn)}, path)
    with refuses(str(path), "'w' has 8 bits"):
        read_tensors(path)


def test_our_own_model_folder_needs_no_import(publish_to, tmp_path: Path):
    folder, _, _ = publish_to("model")
    with refuses(str(folder), "model folder of speakerlab"), opened(folder):
        pass


def test_a_published_model_without_git_lfs_is_named(publish_to):
    from speakerlab.checkpoints.published import load_published

    folder, _, _ = publish_to("model")
    weights = folder / "embedder.safetensors"
    weights.write_bytes(POINTER)
    with refuses(str(weights), "git lfs pull"):
        load_published(folder)
