"""`speakerlab publish` to a folder and to a hub of the test, and back by its name."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hub_server import TOKEN, HubServer, Repository, served, use_hub
from models_on_disk import CALIBRATION, publish_segmenter, publish_xvector
from refusals import refuses
from voices import RATE, make_wave

import speakerlab
from speakerlab.bin import card, diarize, import_, publish
from speakerlab.checkpoints.published import load_segmenter
from speakerlab.inference.segmentation import Segmentation

NAME = "hf:ann/model"


@pytest.fixture
def exp(tmp_path: Path) -> Path:
    return publish_xvector(tmp_path / "exp", CALIBRATION)


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    with served() as server:
        use_hub(monkeypatch, server.url, tmp_path / "cache", token=TOKEN)
        yield server


def published_name(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the name that the command has printed."""
    (line,) = capsys.readouterr().out.splitlines()
    return line


def other_model(exp: Path) -> Path:
    """Return an experiment with another model, without calibration."""
    other = publish_xvector(exp.with_name("other"))
    weights = (other / "model/embedder.safetensors").read_bytes()
    card = json.loads((other / "model/card.json").read_text())
    from hashlib import sha256

    changed = weights[:-1] + bytes([weights[-1] ^ 1])
    (other / "model/embedder.safetensors").write_bytes(changed)
    card["sha256"] = sha256(changed).hexdigest()
    (other / "model/card.json").write_text(json.dumps(card))
    return other


def test_what_was_published_is_loaded_by_the_printed_name(
    server: HubServer, exp: Path, capsys, caplog
) -> None:
    caplog.set_level("INFO")
    publish.main([str(exp), "--to", NAME])
    pinned = published_name(capsys)
    assert f"published, see {server.url}/ann/model" in caplog.text
    repository = server.repositories["ann/model"]
    commit = repository.branches["main"]
    assert pinned == f"{NAME}@{commit}"
    assert sorted(repository.commits[commit]) == [
        ".gitattributes",
        "README.md",
        "calibration.json",
        "card.json",
        "config.yaml",
        "embedder.safetensors",
    ]
    page = repository.commits[commit]["README.md"].decode()
    assert f'speakerlab.load("{NAME}")' in page
    assert not repository.private

    model = speakerlab.load(pinned)
    ours = speakerlab.load(exp)
    wave_S = make_wave(0, 0, 1.0)
    assert (model.embed(wave_S) == ours.embed(wave_S)).all()
    assert model.calibration == ours.calibration


def test_a_segmentation_network_comes_back_by_its_name(
    server: HubServer, tmp_path: Path, capsys
) -> None:
    exp = publish_segmenter(tmp_path / "segmenter")
    publish.main([str(exp), "--to", NAME])
    pinned = published_name(capsys)
    # The same model again, and one of the other kind.
    publish.main([str(exp), "--to", NAME])
    with refuses(NAME, "another model", "--force"):
        publish.main([str(publish_xvector(tmp_path / "exp")), "--to", NAME])

    out = tmp_path / "out"
    import_.main([pinned, "--out", str(out)])
    ours = load_segmenter(exp)
    assert load_segmenter(out).sha256 == ours.sha256
    capsys.readouterr()
    card.main([pinned])
    printed = capsys.readouterr().out
    assert "M parameters, segmentation" in printed
    assert "not stated" in printed


def test_diarize_takes_a_segmentation_network_by_its_name(
    server: HubServer, tmp_path: Path, monkeypatch, capsys
) -> None:
    exp = publish_segmenter(tmp_path / "segmenter")
    publish.main([str(exp), "--to", NAME])
    pinned = published_name(capsys)
    recording = tmp_path / "a.wav"
    wave_S = np.concatenate([make_wave(number, 0, 3.0) for number in range(2)])
    soundfile.write(recording, wave_S, RATE)
    model = publish_xvector(tmp_path / "exp", CALIBRATION)

    def diarize_with(segmentation: str) -> str:
        options = ["--model", str(model), "--segmentation", segmentation]
        diarize.main([str(recording), *options])
        return capsys.readouterr().out

    expected = diarize_with(str(exp))
    assert diarize_with(NAME) == expected
    # From the cache alone, without and with a revision.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert diarize_with(NAME) == expected
    assert diarize_with(pinned) == expected
    digest = load_segmenter(exp).sha256
    assert Segmentation(NAME).sha256 == Segmentation(pinned).sha256 == digest
    with refuses("hf:ann/other", "HF_HUB_OFFLINE"):
        diarize_with("hf:ann/other")
    # A model of embeddings is no segmentation network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    publish.main([str(model), "--to", "hf:ann/voices"])
    with pytest.raises((ValueError, FileNotFoundError), match="segmentation"):
        diarize_with("hf:ann/voices")


def test_another_model_is_replaced_only_by_force_and_as_a_whole(
    server: HubServer, exp: Path, capsys
) -> None:
    publish.main([str(exp), "--to", NAME])
    pinned = published_name(capsys)
    other = other_model(exp)
    with refuses(NAME, "another model", "--force"):
        publish.main([str(other), "--to", NAME])
    publish.main([str(other), "--to", NAME, "--force"])
    repository = server.repositories["ann/model"]
    files = repository.commits[repository.branches["main"]]
    # That of the earlier model would decide wrongly for this one.
    assert "calibration.json" not in files
    assert ".gitattributes" in files
    assert speakerlab.load(NAME).sha256 == speakerlab.load(other).sha256
    # The earlier one is still there.
    assert speakerlab.load(pinned).sha256 == speakerlab.load(exp).sha256


def test_the_same_model_is_published_again_without_force(server, exp, capsys):
    publish.main([str(exp), "--to", NAME])
    published_name(capsys)
    publish.main([str(exp), "--to", NAME, "--licence", "MIT"])
    repository = server.repositories["ann/model"]
    page = repository.commits[repository.branches["main"]]["README.md"].decode()
    assert page.startswith("---\nlicense: mit\n")


def test_a_branch_and_a_private_repository_are_made(server, exp, capsys, monkeypatch):
    publish.main([str(exp), "--to", NAME, "--revision", "v2", "--private"])
    repository = server.repositories["ann/model"]
    assert repository.private
    commit = repository.branches["v2"]
    assert published_name(capsys) == f"{NAME}@{commit}"
    assert repository.branches["main"] != commit
    page = repository.commits[commit]["README.md"].decode()
    assert f'speakerlab.load("{NAME}@v2")' in page
    assert speakerlab.load(f"{NAME}@v2")

    server.repositories["ann/public"] = Repository()
    with refuses("hf:ann/public", "is public", "--private"):
        publish.main([str(exp), "--to", "hf:ann/public", "--private"])


def test_a_repository_of_something_else_is_kept(server, exp):
    repository = server.repositories["ann/other"] = Repository()
    commit = repository.commit("main", {"avg_model.pt": b"x"})
    with refuses(f"hf:ann/other@{commit}", "avg_model.pt", "another name"):
        publish.main([str(exp), "--to", "hf:ann/other", "--force"])
    assert repository.branches["main"] == commit


def test_refusals_of_the_hub_are_one_line(server, exp, monkeypatch):
    server.fault = "403"
    with refuses(NAME, "cannot be published", "HTTP 403", "HF_TOKEN"):
        publish.main([str(exp), "--to", NAME])
    server.fault = ""
    monkeypatch.delenv("HF_TOKEN")
    with refuses(NAME, "cannot be published", "HTTP 401", "hf auth login"):
        publish.main([str(exp), "--to", NAME])
    assert server.repositories == {}


def test_a_folder_needs_no_other_package(exp, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    out = tmp_path / "out"
    caplog.set_level("INFO")
    publish.main([str(exp), "--to", str(out)])
    assert published_name(capsys) == str(out)
    assert f"{out}: written to a folder; hf:owner/name publishes it" in caplog.text
    monkeypatch.chdir(tmp_path)
    publish.main([str(exp), "--to", "ann/my-model"])
    assert published_name(capsys) == "ann/my-model"
    assert "to a folder; hf:ann/my-model publishes it" in caplog.text
    assert speakerlab.load(out).sha256 == speakerlab.load(exp).sha256
    with refuses(NAME, "pip install huggingface_hub"):
        publish.main([str(exp), "--to", NAME])


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (["--to", "hf:ann/model@main"], "--to"),
        (["--to", "hf:ann"], "hf:ann"),
        (["--to", "out", "--revision", "v2"], "--revision"),
        (["--to", "out", "--private"], "--private"),
    ],
)
def test_options_that_contradict_are_refused(exp, arguments, subject):
    with refuses(subject):
        publish.main([str(exp), *arguments])


def test_an_experiment_without_a_model_is_refused(tmp_path):
    with refuses(tmp_path, "embedder.safetensors", error=FileNotFoundError):
        publish.main([str(tmp_path), "--to", str(tmp_path / "out")])
