"""`speakerlab import` and `speakerlab export --format 3dspeaker` are each other's reverse."""

import importlib
import logging
from pathlib import Path

import pytest
import torch
from refusals import refuses

from speakerlab.bin import export, import_
from speakerlab.checkpoints.published import load_published
from speakerlab.models import MODELS


def save_checkpoint(path: Path, *, seed: int = 1) -> None:
    """Save a checkpoint as 3D-Speaker does."""
    torch.manual_seed(seed)
    backbone = MODELS["campplus"](embed_dim=16, init_channels=32, growth_rate=8)
    torch.save(backbone.state_dict(), path)


def test_an_imported_checkpoint_is_exported_bit_for_bit(tmp_path: Path, caplog) -> None:
    file = tmp_path / "campplus_voxceleb.bin"
    model = tmp_path / "model"
    out = tmp_path / "embedding_model.ckpt"
    save_checkpoint(file)
    with caplog.at_level(logging.INFO):
        import_.main([str(file), "--out", str(model)])
    assert "campplus of 3D-Speaker" in caplog.text
    assert "no head" in caplog.text
    assert load_published(model).embedder.embed_dim == 16

    export.main([str(model), "--format", "3dspeaker", "--out", str(out)])
    theirs = torch.load(file)
    ours = torch.load(out)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name])


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a model folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_another_model_is_replaced_only_by_force(tmp_path: Path) -> None:
    first = tmp_path / "first.bin"
    second = tmp_path / "second.bin"
    save_checkpoint(first)
    save_checkpoint(second, seed=2)
    model = tmp_path / "model"
    import_.main([str(first), "--out", str(model)])
    before = contents(model)
    # The same model again: nothing is lost.
    import_.main([str(first), "--out", str(model)])
    assert contents(model) == before

    with refuses(str(model), "already exists; use --force", "--out"):
        import_.main([str(second), "--out", str(model)])
    assert contents(model) == before
    assert sorted(tmp_path.iterdir()) == [first, model, second]
    import_.main([str(second), "--out", str(model), "--force"])
    assert contents(model)["embedder.safetensors"] != before["embedder.safetensors"]


@pytest.mark.parametrize("name", ["calibration.json", "diarization.json"])
def test_calibration_is_lost_only_by_force(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.bin"
    save_checkpoint(file)
    model = tmp_path / "model"
    import_.main([str(file), "--out", str(model)])
    (model / name).write_text("{}")
    with refuses(str(model / name), "already exists; use --force", "--out"):
        import_.main([str(file), "--out", str(model)])
    assert (model / name).exists()
    import_.main([str(file), "--out", str(model), "--force"])
    assert not (model / name).exists()


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    out = tmp_path / "model"
    file.write_text("nothing")
    with refuses(str(file)):
        import_.main([str(file), "--out", str(out)])
    missing = str(tmp_path / "b.ckpt")
    with refuses(missing, error=FileNotFoundError):
        import_.main([missing, "--out", str(out)])
    assert not out.exists()


def test_list_shows_names_data_and_licences(capsys) -> None:
    import_.main(["--list"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    # Name and full name, below their data and licence.
    rows = []
    group = ""
    for line in text.splitlines():
        if line.startswith("  "):
            rows.append((group, *line.split()))
        else:
            group = line
    full = "hub:iic/speech_campplus_sv_en_voxceleb_16k"
    assert ("VoxCeleb; not stated", "hub:campplus-voxceleb", full) in rows
    full = "hub:wespeaker/voxceleb_resnet34_LM"
    assert ("VoxCeleb; CC BY 4.0", "hub:voxceleb_resnet34_LM", full) in rows


def test_published_model_is_copied_from_the_cache(
    tmp_path, monkeypatch, capsys
) -> None:
    model = "hub:campplus-zh-200k"
    copy = tmp_path / "model"
    out = tmp_path / "a.ckpt"
    monkeypatch.setenv("SPEAKERLAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/iic/speech_campplus_sv_zh-cn_16k-common"
    folder.mkdir(parents=True)
    save_checkpoint(folder / "campplus_cn_common.bin")

    # It is in the cache, so nothing is downloaded.
    import_.main([model])
    assert capsys.readouterr().out == f"{folder}\n"
    import_.main([model, "--out", str(copy)])
    assert load_published(copy).embedder.embed_dim == 16
    export.main([model, "--format", "3dspeaker", "--out", str(out)])
    assert out.exists()

    # The same model may be copied again, but not over another one.
    import_.main([model, "--out", str(copy)])
    other = tmp_path / "other.bin"
    save_checkpoint(other, seed=2)
    import_.main([str(other), "--out", str(copy), "--force"])
    before = contents(copy)
    with refuses(str(copy), "already exists; use --force", "--out"):
        import_.main([model, "--out", str(copy)])
    assert contents(copy) == before
    import_.main([model, "--out", str(copy), "--force"])
    assert contents(copy) == contents(folder)


@pytest.mark.parametrize(
    ("arguments", "subject", "value"),
    [
        ([], "import", "--list"),
        (["a.bin"], "--out", "a.bin"),
        (["hub:campplus", "--force"], "--force", "--out"),
        (
            ["hub:campplus", "--model-config", "a.yaml"],
            "--model-config",
            "hub:campplus",
        ),
        (["hub:nothing"], "hub:nothing", "import --list"),
    ],
)
def test_refusals(arguments, subject, value) -> None:
    with refuses(subject, value):
        import_.main(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        "embed a.wav --model HUB --out {out}",
        "verify a.wav b.wav --model HUB",
        "enroll ann a.wav --model HUB --speakers {out}",
        "identify a.wav --model HUB",
        "calibrate --model HUB --data {data} --out {out}",
        "export HUB --out {out}.onnx",
        "import_ HUB",
        "train --config campplus_tiny --exp {out} --init HUB",
    ],
)
def test_every_command_takes_published_models(arguments, tmp_path) -> None:
    (tmp_path / "utt2spk").touch()
    paths = {"out": tmp_path / "out", "data": tmp_path}
    arguments = arguments.replace("HUB", "hub:campplus_zh_200k")
    name, *rest = arguments.format(**paths).split()
    main = importlib.import_module(f"speakerlab.bin.{name}").main
    with refuses("hub:campplus_zh_200k", "did you mean hub:campplus-zh-200k?"):
        main(rest)
