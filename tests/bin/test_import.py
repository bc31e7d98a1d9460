"""`speakerlab import` and `speakerlab export --format 3dspeaker`, as a user types them."""

from pathlib import Path

import torch
from refusals import refused, refuses

from speakerlab.bin import export, import_
from speakerlab.checkpoints.published import load_published
from speakerlab.models import MODELS


def write_model(path: Path) -> Path:
    torch.manual_seed(1)
    backbone = MODELS["campplus"](embed_dim=16, init_channels=32, growth_rate=8)
    torch.save(backbone.state_dict(), path)
    return path


def test_checkpoint_goes_in_and_comes_out(run, tmp_path: Path) -> None:
    file = write_model(tmp_path / "campplus_voxceleb.bin")
    done = run("-m", "speakerlab", "import", file, "--out", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert "campplus of 3D-Speaker, features of 3D-Speaker, no head" in done.stderr
    assert load_published(tmp_path / "model").embedder.embed_dim == 16
    out = tmp_path / "embedding_model.ckpt"
    export.main([str(tmp_path / "model"), "--format", "3dspeaker", "--out", str(out)])
    theirs, ours = torch.load(file), torch.load(out)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_what_is_no_checkpoint_is_one_line(run, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("nothing")
    done = run("-m", "speakerlab", "import", tmp_path / "a.ckpt", "--out", tmp_path / "model")
    assert done.returncode == 1
    assert refused(done.stderr, str(tmp_path / "a.ckpt"))
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "model").exists()
    with refuses(str(tmp_path / "b.ckpt"), error=FileNotFoundError):
        import_.main([str(tmp_path / "b.ckpt"), "--out", str(tmp_path / "model")])
