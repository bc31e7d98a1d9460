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

from speakerlab.checkpoints.architectures import ARCHITECTURES
from speakerlab.checkpoints.foreign import (
    _warn_of_doubt,
    export_3dspeaker,
    import_checkpoint,
)
from speakerlab.checkpoints.model_files import read_classes
from speakerlab.checkpoints.published import Published, publish
from speakerlab.checkpoints.recognise import Recognised
from speakerlab.config import build
from speakerlab.config.schema import parse_config
from speakerlab.data import audio
from speakerlab.models import MODELS

DEFAULT_SHARED = Path(__file__).parents[3] / "shared"
SHARED = Path(os.environ.get("SPEAKERLAB_SHARED", DEFAULT_SHARED))
CHECKOUTS = {"3dspeaker": "SPEAKERLAB_3DSPEAKER", "wespeaker": "SPEAKERLAB_WESPEAKER"}


@torch.no_grad()
def embed(published: Published, files: list[Path]) -> np.ndarray:
    """Return the embeddings of whole files, (N, D)."""
    embs: list[np.ndarray] = []
    for file in files:
        samples = audio.read(file).astype(np.float32)
        wave_S = torch.from_numpy(samples) / 32768
        emb_1D = published.embedder(wave_S[None])
        embs.append(emb_1D[0].numpy())
    return np.stack(embs)


def least_cosine(ours_ND: np.ndarray, theirs_ND: np.ndarray) -> float:
    """Return the cosine of the two embeddings of a file that differ most."""
    product_N = (ours_ND * theirs_ND).sum(1)
    our_norm_N = np.linalg.norm(ours_ND, axis=1)
    their_norm_N = np.linalg.norm(theirs_ND, axis=1)
    cosine_N = product_N / (our_norm_N * their_norm_N)
    return float(cosine_N.min())


@pytest.fixture
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A small CAM++ of 16 dimensions as 3D-Speaker and as WeSpeaker leave one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(1)
    backbone = MODELS["campplus"](
        embed_dim=16,
        init_channels=32,
        growth_rate=8,
    )
    state = backbone.state_dict()
    files = {
        "3dspeaker": folder / "a/embedding_model.ckpt",
        "wespeaker": folder / "b/avg_model.pt",
    }
    for file in files.values():
        file.parent.mkdir()
    torch.save(state, files["3dspeaker"])
    projection = {"projection.weight": torch.zeros(6, 16)}
    torch.save(state | projection, files["wespeaker"])
    config = {
        **CASES["campplus_wespeaker"].config,
        "model_args": {"pooling_func": "TSTP"},
    }
    config_file = files["wespeaker"].with_name("config.yaml")
    config_file.write_text(yaml.dump(config))
    return files


# The other cases have the same networks or front ends.
USUAL_CASES = ("campplus", "eres2net_base", "ecapa512_wespeaker")
OTHER_CASES = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
    if name not in USUAL_CASES
]


@pytest.mark.parametrize("name", [*USUAL_CASES, *OTHER_CASES])
def test_imported_model_equals_what_its_toolkit_gave(name: str, tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    stored = np.load(STORED)
    files = real_files(SHARED)
    assert [file.name for file in files] == stored["files"].tolist()
    checkpoint = write_checkpoint(name, tmp_path)
    published = import_checkpoint(checkpoint, tmp_path / "model")
    ours_ND = embed(published, files)
    assert least_cosine(ours_ND, stored[name]) > 0.999999
    if name == "campplus":
        # the features of the other toolkit give other embeddings
        other = import_checkpoint(
            tmp_path / name,
            tmp_path / "other",
            frontend="wespeaker",
        )
        other_ND = embed(other, files)
        assert least_cosine(other_ND, stored[name]) < 0.9999


@pytest.mark.parametrize("toolkit", CHECKOUTS)
def test_imported_model_equals_its_toolkit_side_by_side(
    toolkit: str, tmp_path: Path
) -> None:
    checkout = os.environ.get(CHECKOUTS[toolkit])
    if not checkout or not SHARED.is_dir():
        pytest.skip(f"needs ../shared and {CHECKOUTS[toolkit]}, a checkout")
    files = real_files(SHARED)
    written: dict[str, Path] = {}
    for name, case in CASES.items():
        if case.toolkit == toolkit:
            written[name] = write_checkpoint(name, tmp_path)
    theirs = run_peer(toolkit, Path(checkout), written, files, tmp_path)
    for name, checkpoint in written.items():
        published = import_checkpoint(checkpoint, tmp_path / "models" / name)
        ours_ND = embed(published, files)
        cosine = least_cosine(ours_ND, theirs[name])
        assert cosine > 0.999999, name


def test_front_end_and_source_are_recorded(checkpoints, tmp_path: Path) -> None:
    of_3dspeaker = import_checkpoint(checkpoints["3dspeaker"], tmp_path / "a")
    of_wespeaker = import_checkpoint(checkpoints["wespeaker"], tmp_path / "b")
    settings_of_both = {
        "dither": 0.0,
        "mean_norm": True,
        "num_mel_bins": 80,
        "sample_rate": 16000,
    }
    expected = {"window": "povey", "scale": 1.0} | settings_of_both
    assert expected.items() <= of_3dspeaker.config.frontend.items()
    expected = {"window": "hamming", "scale": 32768.0} | settings_of_both
    assert expected.items() <= of_wespeaker.config.frontend.items()

    card_text = (tmp_path / "b" / "card.json").read_text()
    source = json.loads(card_text)["source"]
    assert source["toolkit"] == "wespeaker"
    assert source["file"] == "avg_model.pt"
    assert source["architecture"] == "campplus of WeSpeaker"
    assert len(source["sha256"]) == 64


def test_archives_are_opened_like_the_file(checkpoints, tmp_path: Path) -> None:
    file = checkpoints["wespeaker"]
    name = "campplus_cn_common_200k"
    archive = tmp_path / f"{name}.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(file.parent, arcname=name)
    # WeSpeaker's copy of a model takes the features of 3D-Speaker.
    converted = import_checkpoint(archive, tmp_path / "a")
    assert converted.config.frontend["window"] == "povey"
    with_option = import_checkpoint(archive, tmp_path / "a", frontend="wespeaker")
    assert with_option.config.frontend["window"] == "hamming"

    bundle_stem = str(tmp_path / "voxceleb_CAM++")
    bundle = shutil.make_archive(bundle_stem, "zip", file.parent)
    digests: set[str] = set()
    for path in (Path(bundle), file.parent, file):
        published = import_checkpoint(path, tmp_path / "m")
        digests.add(published.sha256)
    assert len(digests) == 1


def test_wespeaker_checkpoint_without_configuration_is_refused(
    checkpoints, tmp_path: Path
) -> None:
    state = torch.load(checkpoints["wespeaker"], weights_only=True)
    # With the projection, it could only be WeSpeaker's.
    del state["projection.weight"]
    file = tmp_path / "avg_model.pt"
    torch.save(state, file)
    with refuses(str(file), "config.yaml", error=FileNotFoundError):
        import_checkpoint(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()

    config = checkpoints["wespeaker"].with_name("config.yaml")
    imported = import_checkpoint(file, tmp_path / "out", config=config)
    assert imported.config.frontend["window"] == "hamming"


def write_experiment(
    folder: Path, checkpoint: Path, *, num_rows: int, speakers: list[str]
) -> Path:
    """An experiment as 3D-Speaker leaves it: two checkpoints, and its list of speakers."""
    state = torch.load(checkpoint, weights_only=True)
    # Names as of data-parallel training. The rows of the head are the number of the epoch.
    parallel_state = {}
    for name, tensor in state.items():
        parallel_state[f"module.{name}"] = tensor
    for epoch in (9, 10):
        place = folder / f"exp/campplus/models/CKPT-EPOCH-{epoch}-00"
        place.mkdir(parents=True)
        torch.save(parallel_state, place / "embedding_model.ckpt")
        weight_CD = torch.full((num_rows, 16), float(epoch))
        torch.save({"weight": weight_CD}, place / "classifier.ckpt")

    lines = ["ID, spk, path\n"]
    for number, speaker in enumerate(speakers):
        lines.append(f"u{number},{speaker},{speaker}.wav\n")
    (folder / "data").mkdir()
    (folder / "data/train.csv").write_text("".join(lines))
    config = {
        "embedding_model": {"obj": "speakerlab.models.campplus.DTDNN.CAMPPlus"},
        "feature_extractor": {"args": {"mean_nor": True}},
        "loss": {
            "obj": "speakerlab.loss.margin_loss.ArcMarginLoss",
            "args": {"scale": 30.0},
        },
    }
    (folder / "exp/campplus/config.yaml").write_text(yaml.dump(config))
    return folder / "exp/campplus"


def test_head_of_an_experiment_is_kept_by_the_names_of_its_list(
    checkpoints, tmp_path: Path, caplog
) -> None:
    file = checkpoints["3dspeaker"]
    model = tmp_path / "model"
    experiment = write_experiment(
        tmp_path / "a",
        file,
        num_rows=6,
        speakers=["z", "a", "z"],
    )
    speakers = tmp_path / "a/data/train.csv"
    published = import_checkpoint(experiment, model, speakers=speakers)
    assert " ".join(read_classes(model)) == "z a z#0.9 a#0.9 z#1.1 a#1.1"
    weight_CD = load_file(model / "head.safetensors")["weight_CD"]
    # Of the newest checkpoint, which is not the last by name.
    expected_CD = torch.full((6, 16), 10.0)
    assert torch.equal(weight_CD, expected_CD)
    assert published.config.head.args["scale"] == 30.0

    # Six rows are neither those of four speakers nor of four speakers at three speeds.
    experiment = write_experiment(
        tmp_path / "b",
        file,
        num_rows=6,
        speakers=["z", "a", "b", "c"],
    )
    speakers = tmp_path / "b/data/train.csv"
    with caplog.at_level("INFO"):
        import_checkpoint(experiment, model, speakers=speakers)
    assert not (model / "head.safetensors").exists()
    assert "does not list the speakers of the head's 6 rows" in caplog.text
    assert "no head" in caplog.text


def test_projection_of_wespeaker_is_named_by_sorted_speakers(
    checkpoints, tmp_path: Path
) -> None:
    utt2spk = tmp_path / "utt2spk"
    utt2spk.write_text("u1 b\nu2 a\nu3 b\n")
    model = tmp_path / "model"
    import_checkpoint(checkpoints["wespeaker"], model, speakers=utt2spk)
    assert " ".join(read_classes(model)) == "a b a#0.9 b#0.9 a#1.1 b#1.1"


def test_export_refuses_what_3dspeaker_would_not_reproduce(
    checkpoints, tmp_path: Path, make_config
) -> None:
    import_checkpoint(checkpoints["wespeaker"], tmp_path / "we")
    with refuses(str(tmp_path / "we"), "window: hamming, scale: 32768"):
        export_3dspeaker(tmp_path / "we", tmp_path / "a.ckpt")

    args = {"dilations": [1, 1, 2]}
    dilated = parse_config({"model": {"name": "campplus", "args": args}})
    refusals = [
        (dilated, "dilations: [1, 1, 2]"),
        # Their tensors differ as well.
        (make_config(), "campplus with blocks: [1, 1, 1]"),
        (parse_config({"model": {"name": "redimnet"}}), "no such redimnet"),
    ]
    for config, value in refusals:
        embedder = build.build_embedder(config)
        publish(tmp_path / "own", embedder=embedder, config=config, facts={})
        with refuses(str(tmp_path / "own"), value, "--format onnx") as caught:
            export_3dspeaker(tmp_path / "own", tmp_path / "a.ckpt")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.ckpt").exists()


def test_features_that_are_no_filter_bank_are_refused(
    checkpoints, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model_args: {}\ndataset_args: {frontend: clap}\n")
    with refuses(str(config), "frontend: clap"):
        import_checkpoint(checkpoints["wespeaker"], tmp_path / "out", config=config)


TFMEL = {
    "n_mels": 72,
    "norm_signal": True,
    "do_preemph": True,
    "n_fft": 512,
    "win_length": 400,
    "hop_length": 160,
    "f_min": 20,
    "f_max": 7600,
}


def test_redimnet2_of_its_authors_and_of_wespeaker_has_its_own_features(
    tmp_path: Path,
) -> None:
    shapes = read_figures("redimnet2_b0").shapes
    state = {}
    for name, shape in shapes.items():
        state[name] = fill(name, shape, 0)
    mels = {"spec.torchfbank.2.melbanks_pt": torch.zeros(72, 256, 1)}
    content = {
        "model_config": {"C": 12},
        "state_dict": mels | state,
    }
    torch.save(content, tmp_path / "b0-vox2-lm.pt")
    of_authors = import_checkpoint(tmp_path / "b0-vox2-lm.pt", tmp_path / "a")

    torch.save(state, tmp_path / "avg_model.pt")
    config = tmp_path / "config.yaml"
    model_args = {"feat_dim": 72}
    dataset_args = {
        "frontend": "tfmel",
        "tfmel_args": TFMEL,
        "cmvn": False,
    }
    content = {"model_args": model_args, "dataset_args": dataset_args}
    config.write_text(yaml.dump(content))
    of_wespeaker = import_checkpoint(tmp_path / "avg_model.pt", tmp_path / "b")

    expected_frontend = {
        "kind": "tfmel",
        "num_mel_bins": 72,
        "window": "hamming",
        "high_freq": 7600.0,
        "mean_norm": True,
    }
    for imported in (of_authors, of_wespeaker):
        assert imported.config.model.args["size"] == "b0"
        assert not imported.config.model.args["dual"]
        assert expected_frontend.items() <= imported.config.frontend.items()
        imported_state = imported.embedder.backbone.state_dict()
        assert imported_state["linear.bias"].equal(state["linear.bias"])

    # Settings of tfmel that we have no features for.
    dataset_args["tfmel_args"] = TFMEL | {"norm_signal": False}
    content = {"model_args": model_args, "dataset_args": dataset_args}
    config.write_text(yaml.dump(content))
    with refuses(str(config), "frontend: tfmel"):
        import_checkpoint(tmp_path / "avg_model.pt", tmp_path / "c")


def test_network_of_both_toolkits_is_warned_about(
    checkpoints, tmp_path: Path, caplog
) -> None:
    import_checkpoint(checkpoints["3dspeaker"], tmp_path / "a")
    assert "both 3D-Speaker and WeSpeaker have this network" in caplog.text
    caplog.clear()
    import_checkpoint(checkpoints["3dspeaker"], tmp_path / "b", frontend="3dspeaker")
    assert "have this network" not in caplog.text


def test_configuration_that_names_no_toolkit_is_named_in_the_warning(
    checkpoints, tmp_path: Path, caplog
) -> None:
    file = checkpoints["3dspeaker"]
    import_checkpoint(file, tmp_path / "a")
    assert "without a config.yaml" in caplog.text
    caplog.clear()

    # It is of another program, or has lost the section of the model.
    config = file.parents[1] / "config.yaml"
    config.write_text("batch_size: 32\n")
    import_checkpoint(file, tmp_path / "b")
    assert f"{config} does not tell" in caplog.text
    assert "without a config.yaml" not in caplog.text
    caplog.clear()

    # In an archive, its path starts with the archive's.
    archive = tmp_path / "campplus.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(file, arcname=f"a/{file.name}")
        tar.add(config, arcname="config.yaml")
    import_checkpoint(archive, tmp_path / "c")
    assert f"{archive}/config.yaml does not tell" in caplog.text


def test_network_that_speechbrain_has_too_is_warned_about(caplog) -> None:
    for row in ARCHITECTURES:
        caplog.clear()
        _warn_of_doubt(Recognised(row, {}, {}), Path("a.ckpt"))
        is_same = (row.model, row.toolkit) == ("ecapa_tdnn", "3dspeaker")
        assert ("SpeechBrain" in caplog.text) == is_same
