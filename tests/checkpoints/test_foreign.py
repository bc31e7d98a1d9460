"""Checkpoints of both toolkits, imported and written back: the same embeddings, or a refusal."""

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from refusals import refuses
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent / "toolkits"))

from toolkit_cases import (
    CASES,
    STORED,
    fill,
    read_figures,
    real_files,
    run_peer,
    write_checkpoint,
)

from speakerlab.checkpoints.foreign import export_3dspeaker, import_checkpoint
from speakerlab.checkpoints.model_files import read_classes
from speakerlab.checkpoints.published import Published, publish
from speakerlab.config import build
from speakerlab.config.schema import parse_config
from speakerlab.data import audio
from speakerlab.models import MODELS

SHARED = Path(os.environ.get("SPEAKERLAB_SHARED", Path(__file__).parents[3] / "shared"))
CHECKOUTS = {"3dspeaker": "SPEAKERLAB_3DSPEAKER", "wespeaker": "SPEAKERLAB_WESPEAKER"}


@torch.no_grad()
def embed(published: Published, files: list[Path]) -> np.ndarray:
    waves = [torch.from_numpy(audio.read(file).astype(np.float32)) / 32768 for file in files]
    return np.stack([published.embedder(wave_S[None])[0].numpy() for wave_S in waves])


def least_cosine(ours_ND: np.ndarray, theirs_ND: np.ndarray) -> float:
    norms_N = np.linalg.norm(ours_ND, axis=1) * np.linalg.norm(theirs_ND, axis=1)
    return float(((ours_ND * theirs_ND).sum(1) / norms_N).min())


@pytest.fixture
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A small CAM++ of 16 dimensions as 3D-Speaker and as WeSpeaker leave one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(1)
    state = MODELS["campplus"](embed_dim=16, init_channels=32, growth_rate=8).state_dict()
    files = {"3dspeaker": folder / "a/embedding_model.ckpt", "wespeaker": folder / "b/avg_model.pt"}
    for file in files.values():
        file.parent.mkdir()
    torch.save(state, files["3dspeaker"])
    torch.save({**state, "projection.weight": torch.zeros(6, 16)}, files["wespeaker"])
    config = {**CASES["campplus_wespeaker"].config, "model_args": {"pooling_func": "TSTP"}}
    files["wespeaker"].with_name("config.yaml").write_text(yaml.dump(config))
    return files


@pytest.mark.parametrize("name", CASES)
def test_imported_model_equals_what_its_toolkit_gave(name: str, tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    stored = np.load(STORED)
    files = real_files(SHARED)
    assert [file.name for file in files] == stored["files"].tolist()
    published = import_checkpoint(write_checkpoint(name, tmp_path), tmp_path / "model")
    assert least_cosine(embed(published, files), stored[name]) > 0.999999
    if name == "campplus":
        other = import_checkpoint(tmp_path / name, tmp_path / "other", frontend="wespeaker")
        assert least_cosine(embed(other, files), stored[name]) < 0.9999


@pytest.mark.parametrize("toolkit", CHECKOUTS)
def test_imported_model_equals_its_toolkit_side_by_side(toolkit: str, tmp_path: Path) -> None:
    checkout = os.environ.get(CHECKOUTS[toolkit])
    if not checkout or not SHARED.is_dir():
        pytest.skip(f"needs ../shared and {CHECKOUTS[toolkit]}, a checkout")
    files = real_files(SHARED)
    written = {n: write_checkpoint(n, tmp_path) for n, c in CASES.items() if c.toolkit == toolkit}
    theirs = run_peer(toolkit, Path(checkout), written, files, tmp_path)
    for name, checkpoint in written.items():
        published = import_checkpoint(checkpoint, tmp_path / "models" / name)
        assert least_cosine(embed(published, files), theirs[name]) > 0.999999, name


def test_front_end_and_source_are_recorded(checkpoints, tmp_path: Path) -> None:
    three = import_checkpoint(checkpoints["3dspeaker"], tmp_path / "a").config.frontend
    we = import_checkpoint(checkpoints["wespeaker"], tmp_path / "b").config.frontend
    keys = ("window", "scale", "dither", "mean_norm", "num_mel_bins", "sample_rate")
    assert [three[key] for key in keys] == ["povey", 1.0, 0.0, True, 80, 16000]
    assert [we[key] for key in keys] == ["hamming", 32768.0, 0.0, True, 80, 16000]
    source = json.loads((tmp_path / "b" / "card.json").read_text())["source"]
    assert (source["toolkit"], source["file"]) == ("wespeaker", "avg_model.pt")
    assert source["architecture"] == "campplus of WeSpeaker"
    assert len(source["sha256"]) == 64


def test_archives_are_opened_like_the_file(checkpoints, tmp_path: Path) -> None:
    file, name = checkpoints["wespeaker"], "campplus_cn_common_200k"
    with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(file.parent, arcname=name)
    # WeSpeaker's copy of a model takes the features of 3D-Speaker.
    converted = import_checkpoint(tmp_path / f"{name}.tar.gz", tmp_path / "a")
    assert converted.config.frontend["window"] == "povey"
    asked = import_checkpoint(tmp_path / f"{name}.tar.gz", tmp_path / "a", frontend="wespeaker")
    assert asked.config.frontend["window"] == "hamming"
    bundle = shutil.make_archive(str(tmp_path / "voxceleb_CAM++"), "zip", file.parent)
    paths = (Path(bundle), file.parent, file)
    assert len({import_checkpoint(path, tmp_path / "m").sha256 for path in paths}) == 1


def test_wespeaker_checkpoint_without_configuration_is_refused(checkpoints, tmp_path: Path) -> None:
    state = torch.load(checkpoints["wespeaker"], weights_only=True)
    del state["projection.weight"]  # with it, it can only be WeSpeaker's
    torch.save(state, tmp_path / "avg_model.pt")
    with refuses(str(tmp_path / "avg_model.pt"), "config.yaml", error=FileNotFoundError):
        import_checkpoint(tmp_path / "avg_model.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    config = checkpoints["wespeaker"].with_name("config.yaml")
    found = import_checkpoint(tmp_path / "avg_model.pt", tmp_path / "out", config=config)
    assert found.config.frontend["window"] == "hamming"


def write_experiment(folder: Path, checkpoint: Path, *, num_rows: int, speakers: list[str]) -> Path:
    """An experiment as 3D-Speaker leaves it: two checkpoints, and its list of speakers."""
    state = torch.load(checkpoint, weights_only=True)
    for epoch in (9, 10):
        place = folder / f"exp/campplus/models/CKPT-EPOCH-{epoch}-00"
        place.mkdir(parents=True)
        torch.save({f"module.{n}": v for n, v in state.items()}, place / "embedding_model.ckpt")
        weight_CD = torch.full((num_rows, 16), float(epoch))
        torch.save({"weight": weight_CD}, place / "classifier.ckpt")
    rows = "".join(f"u{i},{s},{s}.wav\n" for i, s in enumerate(speakers))
    (folder / "data").mkdir()
    (folder / "data/train.csv").write_text(f"ID, spk, path\n{rows}")
    config = {
        "embedding_model": {"obj": "speakerlab.models.campplus.DTDNN.CAMPPlus"},
        "feature_extractor": {"args": {"mean_nor": True}},
        "loss": {"obj": "speakerlab.loss.margin_loss.ArcMarginLoss", "args": {"scale": 30.0}},
    }
    (folder / "exp/campplus/config.yaml").write_text(yaml.dump(config))
    return folder / "exp/campplus"


def test_head_of_an_experiment_is_kept_by_the_names_of_its_list(
    checkpoints, tmp_path: Path, caplog
) -> None:
    file, listed = checkpoints["3dspeaker"], "data/train.csv"
    experiment = write_experiment(tmp_path / "a", file, num_rows=6, speakers=["z", "a", "z"])
    published = import_checkpoint(experiment, tmp_path / "model", speakers=tmp_path / "a" / listed)
    assert read_classes(tmp_path / "model") == ["z", "a", "z#0.9", "a#0.9", "z#1.1", "a#1.1"]
    weight_CD = load_file(tmp_path / "model" / "head.safetensors")["weight_CD"]
    assert torch.equal(weight_CD, torch.full((6, 16), 10.0))  # of the newest, not the last by name
    assert published.config.head.args["scale"] == 30.0
    experiment = write_experiment(tmp_path / "b", file, num_rows=6, speakers=["z", "a", "b", "c"])
    with caplog.at_level("INFO"):
        import_checkpoint(experiment, tmp_path / "model", speakers=tmp_path / "b" / listed)
    assert not (tmp_path / "model" / "head.safetensors").exists()
    assert "does not list the speakers of the head's 6 rows" in caplog.text
    assert "no head" in caplog.text


def test_projection_of_wespeaker_is_named_by_sorted_speakers(checkpoints, tmp_path: Path) -> None:
    listed = tmp_path / "utt2spk"
    listed.write_text("u1 b\nu2 a\nu3 b\n")
    import_checkpoint(checkpoints["wespeaker"], tmp_path / "model", speakers=listed)
    assert read_classes(tmp_path / "model") == ["a", "b", "a#0.9", "b#0.9", "a#1.1", "b#1.1"]


def test_export_refuses_what_3dspeaker_would_not_reproduce(
    checkpoints, tmp_path: Path, make_config
) -> None:
    import_checkpoint(checkpoints["wespeaker"], tmp_path / "we")
    with refuses(str(tmp_path / "we"), "window: hamming, scale: 32768"):
        export_3dspeaker(tmp_path / "we", tmp_path / "a.ckpt")
    dilated = parse_config({"model": {"name": "campplus", "args": {"dilations": [1, 1, 2]}}})
    for config, value in ((dilated, "dilations: [1, 1, 2]"), (make_config(), "nearest, campplus")):
        embedder = build.build_embedder(config)
        publish(tmp_path / "own", embedder=embedder, config=config, facts={})
        with refuses(str(tmp_path / "own"), value):
            export_3dspeaker(tmp_path / "own", tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_features_that_are_no_filter_bank_are_refused(checkpoints, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model_args: {}\ndataset_args: {frontend: s3prl}\n")
    with refuses(str(config), "frontend: s3prl"):
        import_checkpoint(checkpoints["wespeaker"], tmp_path / "out", config=config)


TFMEL = {"n_mels": 72, "norm_signal": True, "do_preemph": True, "n_fft": 512, "win_length": 400}
TFMEL |= {"hop_length": 160, "f_min": 20, "f_max": 7600}


def test_redimnet2_of_its_authors_and_of_wespeaker_has_its_own_features(tmp_path: Path) -> None:
    shapes = read_figures("redimnet2_b0").shapes
    state = {name: fill(name, shape, 0) for name, shape in shapes.items()}
    mels = {"spec.torchfbank.2.melbanks_pt": torch.zeros(72, 256, 1)}
    content = {"model_config": {"C": 12}, "state_dict": {**mels, **state}}
    torch.save(content, tmp_path / "b0-vox2-lm.pt")
    theirs = import_checkpoint(tmp_path / "b0-vox2-lm.pt", tmp_path / "a")
    torch.save(state, tmp_path / "avg_model.pt")
    dataset = {"frontend": "tfmel", "tfmel_args": TFMEL, "cmvn": False}
    write = tmp_path.joinpath("config.yaml").write_text
    write(yaml.dump({"model_args": {"feat_dim": 72}, "dataset_args": dataset}))
    we = import_checkpoint(tmp_path / "avg_model.pt", tmp_path / "b")
    for found in (theirs, we):
        assert found.config.model.args["size"] == "b0" and not found.config.model.args["dual"]
        wanted = {"kind": "tfmel", "num_mel_bins": 72, "window": "hamming", "high_freq": 7600.0}
        assert (
            wanted.items() <= found.config.frontend.items() and found.config.frontend["mean_norm"]
        )
        assert found.embedder.backbone.state_dict()["linear.bias"].equal(state["linear.bias"])
    other = {**dataset, "tfmel_args": {**TFMEL, "norm_signal": False}}
    write(yaml.dump({"model_args": {"feat_dim": 72}, "dataset_args": other}))
    with refuses(str(tmp_path / "config.yaml"), "frontend: tfmel"):
        import_checkpoint(tmp_path / "avg_model.pt", tmp_path / "c")


def test_network_of_both_toolkits_is_warned_about(checkpoints, tmp_path: Path, caplog) -> None:
    import_checkpoint(checkpoints["3dspeaker"], tmp_path / "a")
    assert "both 3D-Speaker and WeSpeaker have this network" in caplog.text
    caplog.clear()
    import_checkpoint(checkpoints["3dspeaker"], tmp_path / "b", frontend="3dspeaker")
    assert "have this network" not in caplog.text
