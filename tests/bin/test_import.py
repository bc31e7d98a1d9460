"""`speakerlab import` and `speakerlab export --format 3dspeaker` are each other's reverse."""

import importlib
import logging
import re
from pathlib import Path

import pytest
import torch
from refusals import refuses

from speakerlab.bin import export, import_
from speakerlab.checkpoints.published import load_published
from speakerlab.models import MODELS


def test_an_imported_checkpoint_is_exported_bit_for_bit(tmp_path: Path, caplog) -> None:
    torch.manual_seed(1)
    backbone = MODELS["campplus"](embed_dim=16, init_channels=32, growth_rate=8)
    file, out = tmp_path / "campplus_voxceleb.bin", tmp_path / "embedding_model.ckpt"
    torch.save(backbone.state_dict(), file)
    with caplog.at_level(logging.INFO):
        import_.main([str(file), "--out", str(tmp_path / "model")])
    assert "campplus of 3D-Speaker" in caplog.text and "no head" in caplog.text
    assert load_published(tmp_path / "model").embedder.embed_dim == 16
    export.main([str(tmp_path / "model"), "--format", "3dspeaker", "--out", str(out)])
    theirs, ours = torch.load(file), torch.load(out)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "a.ckpt", tmp_path / "model"
    file.write_text("nothing")
    with refuses(str(file)):
        import_.main([str(file), "--out", str(out)])
    with refuses(str(tmp_path / "b.ckpt"), error=FileNotFoundError):
        import_.main([str(tmp_path / "b.ckpt"), "--out", str(out)])
    assert not out.exists()


def test_list_shows_names_data_and_licences(capsys) -> None:
    import_.main(["--list"])
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["name", "training data", "licence", "other name"]
    full = "hub:iic/speech_campplus_sv_en_voxceleb_16k"
    assert ["hub:campplus-voxceleb", "VoxCeleb", "not stated", full] in rows
    full = "hub:wespeaker/voxceleb_resnet34_LM"
    assert ["hub:voxceleb_resnet34_LM", "VoxCeleb", "CC BY 4.0", full] in rows


def test_published_model_is_copied_from_the_cache(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SPEAKERLAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/iic/speech_campplus_sv_zh-cn_16k-common"
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    backbone = MODELS["campplus"](embed_dim=16, init_channels=32, growth_rate=8)
    torch.save(backbone.state_dict(), folder / "campplus_cn_common.bin")
    import_.main(["hub:campplus-zh-200k"])
    assert capsys.readouterr().out == f"{folder}\n"
    import_.main(["hub:campplus-zh-200k", "--out", str(tmp_path / "model")])
    assert load_published(tmp_path / "model").embedder.embed_dim == 16
    export.main(
        ["hub:campplus-zh-200k", "--format", "3dspeaker", "--out", str(tmp_path / "a.ckpt")]
    )
    assert (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize(
    ("words", "subject", "value"),
    [
        ([], "import", "--list"),
        (["a.bin"], "--out", "a.bin"),
        (["hub:campplus", "--model-config", "a.yaml"], "--model-config", "hub:campplus"),
        (["hub:nothing"], "hub:nothing", "import --list"),
    ],
)
def test_refusals(words, subject, value) -> None:
    with refuses(subject, value):
        import_.main(words)


@pytest.mark.parametrize(
    "words",
    [
        "embed a.wav --model HUB --out {out}",
        "verify a.wav b.wav --model HUB",
        "enroll ann a.wav --model HUB --speakers {out}",
        "identify a.wav --model HUB",
        "calibrate --model HUB --data {data} --out {out}",
        "export HUB --out {out}",
        "import_ HUB",
        "train --config campplus_tiny --exp {out} --init HUB",
    ],
)
def test_every_command_takes_published_models(words, tmp_path) -> None:
    (tmp_path / "utt2spk").touch()
    words = words.format(out=tmp_path / "out", data=tmp_path).replace("HUB", "hub:campplus_zh_200k")
    name, *rest = words.split()
    with refuses("hub:campplus_zh_200k", "did you mean hub:campplus-zh-200k?"):
        importlib.import_module(f"speakerlab.bin.{name}").main(rest)
