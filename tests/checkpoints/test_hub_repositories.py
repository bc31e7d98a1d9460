"""Models of huggingface.co by name, with its own client, from a hub of the test."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, HubServer, Repository, served, use_hub
from models_on_disk import publish_xvector
from refusals import refused, refuses
from voices import make_wave

import speakerlab
from speakerlab.bin import import_
from speakerlab.checkpoints import hub
from speakerlab.checkpoints.model_files import read_card, read_source
from speakerlab.checkpoints.published import load_published
from speakerlab.core import huggingface
from speakerlab.experiments.model_card import describe
from speakerlab.experiments.teachers import load_teacher

pytest.importorskip("huggingface_hub")
NAME = "hf:ann/model"
NOBODY = "http://127.0.0.1:9"  # nobody listens there


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return publish_xvector(tmp_path_factory.mktemp("exp")) / "model"


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[HubServer]:
    with served() as server:
        use_hub(monkeypatch, server.url, tmp_path / "cache")
        yield server


def test_a_model_is_downloaded_once_and_then_used_without_network(
    server: HubServer, model: Path, tmp_path: Path, monkeypatch
) -> None:
    commit = server.add("ann/model", model)
    ours = speakerlab.load(model)
    theirs = speakerlab.load(NAME)
    wave_S = make_wave(0, 0, 1.0)
    assert (theirs.embed(wave_S) == ours.embed(wave_S)).all()
    assert theirs.runtime.source.name == commit

    # A commit never changes, so no file of it is asked for again.
    server.requests.clear()
    assert hub.local(f"{NAME}@{commit}") == theirs.runtime.source
    assert not any("/resolve/" in request for request in server.requests)
    # A branch is looked up, but used as it was if the hub does not answer.
    use_hub(monkeypatch, NOBODY, tmp_path / "cache")
    assert hub.local(NAME) == theirs.runtime.source
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.local(Path(NAME)) == theirs.runtime.source
    with refuses("hf:ann/other", "HF_HUB_OFFLINE"):
        hub.local("hf:ann/other")


def test_only_the_files_of_a_model_are_downloaded(server: HubServer, model: Path):
    other_files = {
        "evil.py": b"1 / 0",
        "pytorch_model.bin": b"x",
        "README.md": b"# page",
    }
    server.add("ann/model", model, **other_files)
    folder = hub.local(NAME)
    names = {path.name for path in folder.iterdir()}
    assert names == {"embedder.safetensors", "config.yaml", "card.json"}
    assert not any("evil" in request for request in server.requests)


def test_a_revision_is_the_model_of_that_time(server, model, tmp_path):
    first = server.add("ann/model", model)
    second = server.add("ann/model", publish_xvector(tmp_path / "b") / "model", x=b"1")
    server.repositories["ann/model"].branches["v1"] = first
    assert hub.local(f"{NAME}@v1").name == first
    assert hub.local(f"{NAME}@{first}").name == first
    assert hub.local(NAME).name == second
    with refuses(f"{NAME}@v9", "no revision v9", f"{server.url}/ann/model/commits"):
        hub.local(f"{NAME}@v9")


def test_the_commit_is_in_the_provenance(server, model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    card = {**read_card(model), "licence": "cc-by-4.0"}
    (source / "card.json").write_text(json.dumps(card))
    commit = server.add("ann/model", source)
    folder = hub.local(NAME)
    pinned = f"{NAME}@{commit}"
    expected = {
        "hub": pinned,
        "page": "https://huggingface.co/ann/model",
        "licence": "cc-by-4.0",
    }
    # A fine-tuned model takes this over as `init_source`, a student for its teacher.
    assert read_source(folder) == expected
    assert load_teacher(NAME).facts["hub"] == pinned
    assert load_teacher(NAME).facts["licence"] == "cc-by-4.0"

    # A copy is in no cache, so its card says it.
    out = tmp_path / "copy"
    import_.main([NAME, "--out", str(out)])
    assert read_source(out) == expected
    assert dict(describe(out))["origin"] == ["https://huggingface.co/ann/model"]
    assert load_published(out).sha256 == card["sha256"]


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("401", ["HTTP 401", "HF_TOKEN"]),
        ("403", ["HTTP 403", "HF_TOKEN"]),
        ("404", ["HTTP 404", "correct the name"]),
        ("500", ["HTTP 500", "try again"]),
        ("gated", ["gated", "on http://127.0.0.1:", "/ann/model", "HF_TOKEN"]),
    ],
)
def test_refusals_of_the_hub_are_one_line(server, model, fault, texts):
    server.add("ann/model", model)
    server.fault = fault
    with refuses(NAME, "cannot be downloaded", *texts) as caught:
        speakerlab.load(NAME)
    assert "\n" not in str(caught.value)


def test_a_private_model_needs_a_token(server, model, monkeypatch):
    server.repositories["ann/model"] = Repository(private=True)
    server.add("ann/model", model)
    with refuses(NAME, "private", "HF_TOKEN"):
        hub.local(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert speakerlab.load(NAME)


def test_a_hub_that_cannot_be_reached_is_one_line(server, tmp_path, monkeypatch):
    use_hub(monkeypatch, NOBODY, tmp_path / "empty")
    with refuses(NAME, "refused", "HF_ENDPOINT") as caught:
        speakerlab.load(NAME)
    assert "\n" not in str(caught.value)


def test_an_interrupted_download_is_one_line_and_continued_later(
    server, model, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    server.add("ann/model", model)
    server.fault = "cut"
    with refuses(NAME, "cannot be downloaded", "try again") as caught:
        speakerlab.load(NAME)
    assert "\n" not in str(caught.value)
    server.fault = ""
    assert speakerlab.load(NAME)


def test_a_damaged_file_is_refused_until_it_is_removed(server, model, tmp_path):
    server.add("ann/model", model)
    server.fault = "flip"
    place = tmp_path / "cache/models--ann--model"
    file = hub.local(NAME) / "embedder.safetensors"
    with refuses(str(file), "sha256", f"remove {place}"):
        speakerlab.load(NAME)
    server.fault = ""
    shutil.rmtree(place)
    assert speakerlab.load(NAME)


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        ({"config.json": b"{}", "model.safetensors": b""}, ["publish"]),
        ({"avg_model.pt": b"x", "config.yaml": b"a: 1"}, ["import hf:ann/other --out"]),
        ({}, ["embedder.safetensors", "card.json"]),
    ],
)
def test_a_repository_of_something_else_is_one_line(server, files, texts):
    repository = server.repositories["ann/other"] = Repository()
    repository.commit("main", {"README.md": b"", **files})
    with refuses("hf:ann/other", "no model of speakerlab", *texts):
        speakerlab.load("hf:ann/other")
    assert not any("avg_model" in request for request in server.requests)


def test_a_checkpoint_of_another_toolkit_is_imported(server, tmp_path):
    from test_hub import write_wespeaker

    commit = server.add("ann/campplus", write_wespeaker(tmp_path / "w"))
    out = tmp_path / "out"
    name = "hf:ann/campplus"
    with refuses("--out", name):
        import_.main([name])
    import_.main([name, "--out", str(out)])
    assert load_published(out).config.frontend["window"] == "hamming"
    source = read_source(out)
    assert source
    assert source["hub"] == f"{name}@{commit}"
    assert source["page"] == "https://huggingface.co/ann/campplus"


@pytest.mark.slow
def test_a_catalogued_model_gets_the_description_of_its_pretrained_one(
    server, tmp_path, monkeypatch
):
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from toolkits.over_pretrained import checkpoint_of, write_base

    server.add("facebook/w2v-bert-2.0", write_base(tmp_path, "w2vbert_authors"))
    name = "zl389/w2v-bert-2.0_SV/model_lmft_0.14"
    monkeypatch.setenv("SPEAKERLAB_CACHE", str(tmp_path / "published"))
    # Put there by hand, as without network.
    file = tmp_path / "published" / name / "model_lmft_0.14.pth"
    file.parent.mkdir(parents=True)
    torch.save(checkpoint_of("w2vbert_authors"), file)
    source = read_source(hub.local("hub:w2vbert2-sv"))
    assert source
    assert source["licence"] == "CC BY-NC-SA 4.0"
    assert not any("safetensors" in request for request in server.requests)


@pytest.mark.parametrize(
    "name",
    [
        "hf:",
        "hf:ann",
        "hf:ann/",
        "hf:ann/a/b",
        "hf:ann/a@",
        "hf:a--b/c",
        "hf:ann/a.git",
    ],
)
def test_other_forms_of_names_are_refused(name):
    with refuses(name, "hf:owner/name@REVISION"):
        hub.local(name)


def test_without_the_package_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refuses(NAME, "pip install huggingface_hub"):
        hub.local(NAME)


def test_only_folders_of_the_cache_have_an_origin(tmp_path):
    commit = "ab" * 20
    place = tmp_path / "models--ann--model/snapshots"
    assert huggingface.origin_of(place / commit) == f"{NAME}@{commit}"
    for other in (place / "main", place, tmp_path / "exp", Path("/"), Path()):
        assert huggingface.origin_of(other) is None


@pytest.mark.slow
def test_a_command_prints_no_bars_and_no_requests_into_a_log(server, model, tmp_path):
    server.add("ann/model", model)
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
    }

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "speakerlab", "card", name]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    done = run(NAME)
    assert done.returncode == 0
    assert done.stdout.startswith("model            xvector")
    assert done.stderr == ""
    done = run("hf:ann/other")
    assert done.returncode == 1
    assert refused(done.stderr, "hf:ann/other", "HTTP 404")
    assert done.stderr.count("\n") == 1
