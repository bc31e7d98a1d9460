"""`speakerlab import` and `speakerlab export --format 3dspeaker` are each other's reverse."""

import logging
from pathlib import Path

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
