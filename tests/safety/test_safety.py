"""Data runs no code: what would run if it were trusted is planted, and has not run.

Every plant makes a file when its code runs; `test_the_plants_would_work` shows that each does.
"""

import io
import json
import pickle
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from speakerlab.checkpoints import foreign_files
from speakerlab.checkpoints.foreign import import_checkpoint
from speakerlab.checkpoints.foreign_files import read_tensors, unpack
from speakerlab.checkpoints.published import file_sha256, load_published, publish
from speakerlab.config import build
from speakerlab.config.schema import load_config
from speakerlab.data.tables import write_data_dir
from speakerlab.experiments.initial import init_from
from speakerlab.training.checkpoint import STATE, load_state, read_latest, read_rows
from speakerlab.training.writer import CheckpointWriter

ROOT = Path(__file__).parents[2]


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "the code ran"


def evil_yaml(marker: Path) -> str:
    return f"model: !!python/object/apply:os.system [\"touch '{marker}'\"]\n"


def plant_checkpoint(path: Path, marker: Path, *, kind: str) -> None:
    """A pickled object in place of a checkpoint: bare, or in the zip that torch.save writes."""
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"conv1.weight": Touch(marker)}))
    else:
        torch.save({"state_dict": {"conv1.weight": Touch(marker)}}, path)


def one_line(error: pytest.ExceptionInfo[BaseException]) -> bool:
    return "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["pickle", "zip"])
def test_the_plants_would_work(tmp_path: Path, marker: Path, kind: str) -> None:
    plant_checkpoint(tmp_path / "a.pt", marker, kind=kind)
    torch.load(tmp_path / "a.pt", weights_only=False) if kind == "zip" else pickle.loads(
        (tmp_path / "a.pt").read_bytes()
    )
    assert marker.exists()
    marker.unlink()
    yaml.unsafe_load(evil_yaml(marker))
    assert marker.exists()


@pytest.mark.parametrize("kind", ["pickle", "zip"])
@pytest.mark.parametrize("name", ["embedding_model.ckpt", "campplus_voxceleb.bin", "avg_model.pt"])
def test_pickled_object_is_refused_at_import(
    tmp_path: Path, marker: Path, kind: str, name: str
) -> None:
    plant_checkpoint(tmp_path / name, marker, kind=kind)
    with pytest.raises(ValueError, match="is not a checkpoint of tensors only") as caught:
        import_checkpoint(tmp_path / name, tmp_path / "out")
    assert one_line(caught)
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_pickled_head_beside_a_checkpoint_is_refused(tmp_path: Path, marker: Path) -> None:
    plant_checkpoint(tmp_path / "classifier.ckpt", marker, kind="zip")
    with pytest.raises(ValueError, match="is not a checkpoint of tensors only"):
        read_tensors(tmp_path / "classifier.ckpt")
    assert not marker.exists()


@pytest.fixture
def model(tmp_path: Path, make_config) -> Path:
    config = make_config()
    embedder = build.build_embedder(config)
    publish(tmp_path / "model", embedder=embedder, config=config, facts={})
    return tmp_path / "model"


@pytest.mark.parametrize("kind", ["pickle", "zip"])
@pytest.mark.parametrize("name", ["embedder.safetensors", "head.safetensors"])
def test_pickled_object_in_a_model_is_refused(
    model: Path, marker: Path, kind: str, name: str, make_config
) -> None:
    plant_checkpoint(model / name, marker, kind=kind)
    card = json.loads((model / "card.json").read_text())
    card["sha256"] = file_sha256(model / "embedder.safetensors")  # a forger mends the digest
    (model / "card.json").write_text(json.dumps(card))
    (model / "speakers.txt").write_text("a\n")
    config = make_config()
    embedder = build.build_embedder(config)
    head = build.build_head(config, embed_dim=16, num_classes=1)
    with pytest.raises(ValueError, match=f"{name}: is not a safetensors file") as caught:
        load_published(model)
        init_from(model, embedder=embedder, head=head, classes=["a"], config=config)
    assert one_line(caught)
    assert not marker.exists()


@pytest.mark.parametrize("name", [STATE, "rows_00000000_0.pt"])
def test_pickled_object_in_a_training_checkpoint_is_refused(
    tmp_path: Path, marker: Path, name: str
) -> None:
    writer = CheckpointWriter(tmp_path, keep=2, num_parts=1)
    writer.save({"step": 10, "attempt": 0}, rows=(0, {"w": torch.zeros(2)}))
    writer.wait()
    file = tmp_path / "step_00000010" / name
    before = file_sha256(file)
    plant_checkpoint(file, marker, kind="zip")
    note = file.with_name("note.json")
    note.write_text(note.read_text().replace(before, file_sha256(file)))
    found = read_latest(tmp_path)
    assert found is not None  # by its digest it is whole
    with pytest.raises(ValueError, match="holds more than tensors and plain values") as caught:
        load_state(found.state)
        read_rows(found.folder)
    assert one_line(caught)
    assert not marker.exists()


def test_class_named_in_a_configuration_is_refused(model: Path, marker: Path) -> None:
    (model / "config.yaml").write_text(evil_yaml(marker))
    with pytest.raises(ValueError, match="config.yaml"):
        load_config([model / "config.yaml"])
    with pytest.raises(ValueError, match="config.yaml"):
        load_published(model)
    assert not marker.exists()


@pytest.mark.parametrize("where", ["beside", "given"])
def test_class_named_in_a_configuration_of_wespeaker_is_refused(
    tmp_path: Path, marker: Path, where: str
) -> None:
    (tmp_path / "a").mkdir()
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "a" / "avg_model.pt")
    config = tmp_path / ("a" if where == "beside" else ".") / "config.yaml"
    config.write_text(evil_yaml(marker))
    with pytest.raises(ValueError, match="is not plain YAML") as caught:
        import_checkpoint(
            tmp_path / "a", tmp_path / "out", config=config if where == "given" else None
        )
    assert one_line(caught)
    assert not marker.exists()


def test_class_named_in_the_notes_of_an_experiment_is_not_run(tmp_path: Path, marker: Path) -> None:
    place = tmp_path / "models" / "CKPT-EPOCH-1-00"
    place.mkdir(parents=True)
    (place / "CKPT.yaml").write_text(evil_yaml(marker))
    torch.save({"conv1.weight": torch.zeros(1)}, place / "embedding_model.ckpt")
    with pytest.raises(ValueError, match="holds no known architecture"):
        import_checkpoint(tmp_path, tmp_path / "out")
    assert not marker.exists()


def write_tar(path: Path, name: str, *, kind: bytes, target: str) -> None:
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
        tar.addfile(info, io.BytesIO(b"evil"))


def write_zip(path: Path, name: str, *, mode: int) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        archive.writestr(info, "../evil")


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("../evil", tarfile.REGTYPE, "member '../evil' points outside"),
        ("a/../../evil", tarfile.REGTYPE, "points outside"),
        ("/tmp/evil", tarfile.REGTYPE, "member '/tmp/evil' points outside"),
        ("link", tarfile.SYMTYPE, "member 'link' is a link"),
        ("link", tarfile.LNKTYPE, "member 'link' is a link"),
        ("pipe", tarfile.FIFOTYPE, "member 'pipe' is a special file"),
    ],
)
def test_tar_that_reaches_outside_is_refused(
    tmp_path: Path, name: str, kind: bytes, said: str
) -> None:
    write_tar(tmp_path / "a.tar.gz", name, kind=kind, target=str(tmp_path))
    with pytest.raises(ValueError, match=said) as caught:
        unpack(tmp_path / "a.tar.gz", tmp_path / "in" / "side")
    assert one_line(caught)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz"]


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("../evil", stat.S_IFREG, "points outside"),
        ("..\\evil", stat.S_IFREG, "points outside"),
        ("/tmp/evil", stat.S_IFREG, "points outside"),
        ("C:/evil", stat.S_IFREG, "points outside"),
        ("link", stat.S_IFLNK, "member 'link' is a link"),
    ],
)
def test_zip_that_reaches_outside_is_refused(
    tmp_path: Path, name: str, mode: int, said: str
) -> None:
    write_zip(tmp_path / "a.zip", name, mode=mode | 0o644)
    with pytest.raises(ValueError, match=said):
        unpack(tmp_path / "a.zip", tmp_path / "in" / "side")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.zip"]


def test_good_members_beside_a_bad_one_are_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("avg_model.pt", "first")
        archive.writestr("../evil", "second")
    with pytest.raises(ValueError, match="points outside"):
        import_checkpoint(tmp_path / "a.zip", tmp_path / "out")
    archives_left = sorted(path.name for path in tmp_path.rglob("*"))
    assert archives_left == ["a.zip"]


def test_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("avg_model.pt", "0123456789")
    monkeypatch.setattr(foreign_files, "MAX_BYTES", 9)
    with pytest.raises(ValueError, match="unpacks to more than"):
        unpack(tmp_path / "a.zip", tmp_path / "in")
    monkeypatch.setattr(foreign_files, "MAX_BYTES", 10)
    unpack(tmp_path / "a.zip", tmp_path / "in")
    assert (tmp_path / "in" / "avg_model.pt").read_text() == "0123456789"


def test_broken_archive_is_one_line(tmp_path: Path) -> None:
    for name in ("a.zip", "a.tar.gz"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(ValueError, match="cannot be unpacked") as caught:
            import_checkpoint(tmp_path / name, tmp_path / "out")
        assert one_line(caught)


def test_file_names_never_reach_a_shell(tmp_path: Path, marker: Path) -> None:
    """A path of wav.scp that a shell would run, as Kaldi's pipes do, is only a path."""
    folder = tmp_path / "data"
    write_data_dir(folder, wavs={"u1": Path("x")}, speakers={"u1": "s1"})
    (folder / "wav.scp").write_text(f"u1 touch '{marker}' |\nu2 $(touch '{marker}')\n")
    command = [sys.executable, "-m", "speakerlab", "check", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert not marker.exists()


def test_checkpoint_with_a_nan_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"has NaN or infinity in 1 tensors \(b\)"):
        read_tensors(tmp_path / "a.pt")
