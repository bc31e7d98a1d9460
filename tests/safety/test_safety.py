"""Data runs no code: exploits are planted in every file that is read, and must not have run.

Every exploit makes a file when its code runs; `test_the_exploits_would_work` shows that each does.
"""

import io
import json
import pickle
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from refusals import refuses

from speakerlab.bin import check
from speakerlab.checkpoints import foreign_files
from speakerlab.checkpoints.foreign import import_checkpoint
from speakerlab.checkpoints.foreign_files import read_tensors, unpack
from speakerlab.checkpoints.published import file_sha256, load_published, publish
from speakerlab.config import build
from speakerlab.config.schema import load_config
from speakerlab.data.tables import write_data_dir
from speakerlab.experiments.initial import init_from
from speakerlab.training.checkpoint import STATE, load_state, read_latest
from speakerlab.training.writer import CheckpointWriter


class Touch:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """The file that an exploit would make; a test ends with an error if it is there."""
    path = tmp_path / "the code ran"
    yield path
    assert not path.exists()


@pytest.fixture
def model(tmp_path: Path, make_config, make_embedder) -> Path:
    publish(
        tmp_path / "model", embedder=make_embedder(), config=make_config(), facts={}
    )
    return tmp_path / "model"


def evil_yaml(marker: Path) -> str:
    return f"model: !!python/object/apply:os.system [\"touch '{marker}'\"]\n"


def plant_checkpoint(path: Path, marker: Path, *, kind: str) -> None:
    """Write a pickled object as a checkpoint: bare, or in the zip that torch.save writes."""
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"conv1.weight": Touch(marker)}))
    else:
        torch.save({"state_dict": {"conv1.weight": Touch(marker)}}, path)


def save_weights(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"conv1.weight": torch.zeros(1)}, path)


@pytest.mark.parametrize("kind", ["pickle", "zip"])
def test_the_exploits_would_work(tmp_path: Path, marker: Path, kind: str) -> None:
    path = tmp_path / "a.pt"
    plant_checkpoint(path, marker, kind=kind)
    (
        torch.load(path, weights_only=False)
        if kind == "zip"
        else pickle.loads(path.read_bytes())
    )
    marker.unlink()  # so it was there
    yaml.unsafe_load(evil_yaml(marker))
    marker.unlink()


@pytest.mark.parametrize("kind", ["pickle", "zip"])
@pytest.mark.parametrize(
    "name", ["embedding_model.ckpt", "campplus_voxceleb.bin", "avg_model.pt"]
)
def test_a_pickled_object_is_refused_at_import(
    tmp_path: Path, marker: Path, kind, name
):
    plant_checkpoint(tmp_path / name, marker, kind=kind)
    for read in (read_tensors, lambda path: import_checkpoint(path, tmp_path / "out")):
        with refuses(str(tmp_path / name)):
            read(tmp_path / name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["pickle", "zip"])
@pytest.mark.parametrize("name", ["embedder.safetensors", "head.safetensors"])
def test_a_pickled_object_in_a_model_is_refused(
    model: Path, marker: Path, kind, name, make_config, make_embedder
):
    plant_checkpoint(model / name, marker, kind=kind)
    card = json.loads((model / "card.json").read_text())
    card["sha256"] = file_sha256(
        model / "embedder.safetensors"
    )  # a forger corrects the digest
    (model / "card.json").write_text(json.dumps(card))
    (model / "speakers.txt").write_text("a\n")
    config = make_config()
    head = build.build_head(config, embed_dim=16, num_classes=1)
    with refuses(str(model / name), "safetensors"):
        load_published(model)
        init_from(
            model, embedder=make_embedder(), head=head, classes=["a"], config=config
        )


def test_a_pickled_object_in_a_training_checkpoint_is_refused(
    tmp_path: Path, marker: Path
):
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save({"step": 10, "attempt": 0})
    writer.wait()
    file = tmp_path / "step_00000010" / STATE
    before = file_sha256(file)
    plant_checkpoint(file, marker, kind="zip")
    note = file.with_name("note.json")
    note.write_text(note.read_text().replace(before, file_sha256(file)))
    latest = read_latest(tmp_path)
    assert latest is not None  # by its digest it is whole
    with refuses("checkpoint"):
        load_state(latest[1])


def test_a_class_in_a_configuration_is_refused(model: Path, marker: Path) -> None:
    (model / "config.yaml").write_text(evil_yaml(marker))
    for load in (
        lambda: load_config([model / "config.yaml"]),
        lambda: load_published(model),
    ):
        with pytest.raises(ValueError, match="config.yaml"):
            load()


@pytest.mark.parametrize("where", ["a", "."])
def test_a_class_in_a_configuration_of_wespeaker_is_refused(
    tmp_path: Path, marker: Path, where
):
    """Beside the checkpoint, or given."""
    save_weights(tmp_path / "a/avg_model.pt")
    config = tmp_path / where / "config.yaml"
    config.write_text(evil_yaml(marker))
    with refuses(str(config), "YAML"):
        import_checkpoint(
            tmp_path / "a", tmp_path / "out", config=config if where == "." else None
        )


def test_a_class_in_the_notes_of_an_experiment_is_not_run(
    tmp_path: Path, marker: Path
) -> None:
    place = tmp_path / "models/CKPT-EPOCH-1-00"
    save_weights(place / "embedding_model.ckpt")
    (place / "CKPT.yaml").write_text(evil_yaml(marker))
    with pytest.raises(ValueError, match="architecture"):
        import_checkpoint(tmp_path, tmp_path / "out")


def write_archive(path: Path, name: str, kind: bytes | int) -> None:
    """Write an archive of a good member and one of that name; kind: of a tar, or a zip's mode."""
    if isinstance(kind, bytes):
        with tarfile.open(path, "w:gz") as tar:
            tar.addfile(tarfile.TarInfo("avg_model.pt"))
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = str(path.parent)
            info.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"evil"))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("avg_model.pt", "0123456789")
            info = zipfile.ZipInfo(name)
            info.external_attr = (kind | 0o644) << 16
            archive.writestr(info, "../evil")


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("../evil", tarfile.REGTYPE, "'../evil'"),
        ("a/../../evil", tarfile.REGTYPE, "evil'"),
        ("/tmp/evil", tarfile.REGTYPE, "'/tmp/evil'"),
        ("link", tarfile.SYMTYPE, "'link'"),
        ("link", tarfile.LNKTYPE, "'link'"),
        ("pipe", tarfile.FIFOTYPE, "'pipe'"),
        ("../evil", stat.S_IFREG, "'../evil'"),
        ("..\\evil", stat.S_IFREG, "evil'"),
        ("/tmp/evil", stat.S_IFREG, "'/tmp/evil'"),
        ("C:/evil", stat.S_IFREG, "'C:/evil'"),
        ("link", stat.S_IFLNK, "'link'"),
    ],
)
def test_an_archive_that_reaches_outside_is_not_unpacked(
    tmp_path: Path, name, kind, value
):
    path = tmp_path / ("a.tar.gz" if isinstance(kind, bytes) else "a.zip")
    write_archive(path, name, kind)
    with refuses(str(path), value):
        unpack(path, tmp_path / "in/side")
    with refuses(str(path), value):
        import_checkpoint(path, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == [path.name]


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "a.zip"
    write_archive(path, "evil", stat.S_IFREG)  # 17 bytes in all
    monkeypatch.setattr(foreign_files, "MAX_BYTES", 16)
    with refuses(str(path), "GiB"):
        unpack(path, tmp_path / "in")
    monkeypatch.setattr(foreign_files, "MAX_BYTES", 17)
    unpack(path, tmp_path / "in")
    assert (tmp_path / "in/avg_model.pt").read_text() == "0123456789"


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_a_broken_archive_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no archive")
    with refuses(str(tmp_path / name)):
        import_checkpoint(tmp_path / name, tmp_path / "out")


def test_file_names_never_reach_a_shell(tmp_path: Path, marker: Path) -> None:
    """A path of wav.scp that a shell would run, as Kaldi's pipes do, is only a path."""
    folder = tmp_path / "data"
    write_data_dir(folder, wavs={"u1": Path("x")}, speakers={"u1": "s1"})
    (folder / "wav.scp").write_text(f"u1 touch '{marker}' |\nu2 $(touch '{marker}')\n")
    with pytest.raises(ValueError):
        check.main([str(folder)])


def test_a_checkpoint_with_a_nan_is_refused(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}, tmp_path / "a.pt"
    )
    with refuses(str(tmp_path / "a.pt"), "(b)"):
        read_tensors(tmp_path / "a.pt")
