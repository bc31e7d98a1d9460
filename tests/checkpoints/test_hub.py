"""Published models by name, from a server of the test: whole and the right file, or nothing."""

import hashlib
import json
import os
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from refusals import refuses

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from figures import fill, read_figures

from speakerlab.checkpoints import hub
from speakerlab.checkpoints.catalogue import MODELS, known_name, near_miss
from speakerlab.checkpoints.model_files import find_model, read_source
from speakerlab.checkpoints.published import load_published
from speakerlab.models import MODELS as BACKBONES

NAME = "iic/speech_campplus_sv_zh-cn_16k-common"
PATH = "models/iic/speech_campplus_sv_zh-cn_16k-common/resolve/v1.0.0/campplus_cn_common.bin"


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; promises `extra` bytes more than it sends, and notes what was asked."""

    extra = 0
    asked: list[str] = []

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "Content-Length":
            value = str(int(value) + Handler.extra)
        super().send_header(keyword, value)

    def do_GET(self) -> None:
        Handler.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


def write_model(path: Path, *, seed: int) -> str:
    """A small CAM++ under the names of 3D-Speaker; the digest of the file."""
    torch.manual_seed(seed)
    backbone = BACKBONES["campplus"](embed_dim=16, init_channels=32, growth_rate=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(backbone.state_dict(), path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """The folder that is served as the mirror; the cache is `tmp_path/cache`."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        Handler.extra = 0
        Handler.asked = []
        monkeypatch.setenv("SPEAKERLAB_HUB", f"http://127.0.0.1:{httpd.server_port}")
        monkeypatch.setenv("SPEAKERLAB_CACHE", str(tmp_path / "cache"))
        yield folder
        httpd.shutdown()
        thread.join()


def left_behind(tmp_path: Path) -> list[str]:
    """Paths in the cache, without its lock."""
    names: list[str] = []
    for path in (tmp_path / "cache").rglob("*"):
        if path.name != ".lock":
            names.append(str(path.relative_to(tmp_path)))
    return sorted(names)


def test_model_is_downloaded_once_and_then_opened_offline(
    server: Path, monkeypatch, caplog
):
    digest = write_model(server / PATH, seed=1)
    with caplog.at_level("INFO"):
        folder = hub.fetch(f"hub:{NAME}")
    assert f"sha256:{digest}" in caplog.text
    published = load_published(folder)
    assert published.embedder.embed_dim == 16
    assert published.config.frontend["window"] == "povey"

    # Nobody listens there.
    monkeypatch.setenv("SPEAKERLAB_HUB", "http://127.0.0.1:9")
    for name in (
        NAME,
        "speech_campplus_sv_zh-cn_16k-common",
        "damo/speech_campplus_sv_zh-cn_16k-common",
    ):
        assert hub.fetch(name) == folder
    assert Handler.asked == [f"/{PATH}"]


def test_known_digest_is_checked_before_the_file_is_opened(server, tmp_path) -> None:
    (server / PATH).parent.mkdir(parents=True)
    (server / PATH).write_bytes(b"not a checkpoint")
    with refuses(f"hub:{NAME}", f"instead of the requested {'0' * 64}"):
        hub.fetch(f"hub:{NAME}@sha256:{'0' * 64}")
    assert left_behind(tmp_path) == []

    # Digests are compared without regard to case.
    digest = write_model(server / PATH, seed=1)
    folder = hub.fetch(f"hub:{NAME}@sha256:{digest.upper()}")
    assert load_published(folder)
    with refuses(f"hub:{NAME}", "abc"):
        hub.fetch(f"hub:{NAME}@sha256:abc")
    # The variable in `hub:NAME@sha256:$DIGEST` was not set.
    with refuses(f"hub:{NAME}", "sha256 '' is not 64 hex digits"):
        hub.fetch(f"hub:{NAME}@sha256:")


def test_another_file_than_the_first_is_refused(server: Path, tmp_path: Path) -> None:
    first = write_model(server / PATH, seed=1)
    folder = hub.fetch(NAME)
    # The model is gone, but the digest of its file is remembered.
    shutil.rmtree(folder)
    second = write_model(server / PATH, seed=2)
    with refuses(f"hub:{NAME}", second, first):
        hub.fetch(NAME)
    assert not folder.exists()
    for name in left_behind(tmp_path):
        assert "iic/" not in name

    # Requested by its digest, it is taken.
    assert hub.fetch(f"{NAME}@sha256:{second}") == folder
    assert hub.fetch(NAME) == folder


def test_failed_downloads_are_one_line(
    server: Path, tmp_path: Path, monkeypatch
) -> None:
    address = f"{os.environ['SPEAKERLAB_HUB']}/{PATH}"
    with refuses(address, "HTTP Error 404") as missing:
        hub.fetch(NAME)
    write_model(server / PATH, seed=1)

    # The connection ends before all promised bytes have come.
    size = (server / PATH).stat().st_size
    Handler.extra = 10
    with refuses(address, f"{size} of {size + 10} bytes"):
        hub.fetch(NAME)
    monkeypatch.setenv("SPEAKERLAB_HUB", "http://127.0.0.1:9")
    with refuses(f"http://127.0.0.1:9/{PATH}", "refused") as dead:
        hub.fetch(NAME)
    assert "\n" not in str(missing.value) + str(dead.value)
    assert left_behind(tmp_path) == []


def write_wespeaker(folder: Path) -> Path:
    """Write a small CAM++ as WeSpeaker does; return the folder."""
    write_model(folder / "avg_model.pt", seed=3)
    (folder / "config.yaml").write_text("model: CAMPPlus\nmodel_args: {feat_dim: 80}\n")
    return folder


def test_archive_of_wespeaker_is_imported(server: Path, tmp_path: Path) -> None:
    (server / "wespeaker").mkdir()
    name = "campplus_cn_common_200k"
    with tarfile.open(server / f"wespeaker/{name}.tar.gz", "w:gz") as tar:
        tar.add(write_wespeaker(tmp_path / "a"), arcname=name)
    published = load_published(hub.fetch("hub:wespeaker/campplus"))
    # As WeSpeaker's command line has it.
    assert published.config.frontend["window"] == "povey"


def test_archive_is_found_by_the_index_of_its_publisher(
    server: Path, tmp_path: Path, monkeypatch
):
    base = os.environ["SPEAKERLAB_HUB"]
    monkeypatch.delenv("SPEAKERLAB_HUB")
    monkeypatch.setattr(hub, "WESPEAKER_INDEX", f"{base}/index.json")
    row = {
        "Key": "voxceleb_resnet34.zip",
        "Url": f"{base}/elsewhere/a.zip?signed=1",
    }
    index = {"Data": [row]}
    (server / "index.json").write_text(json.dumps(index))
    model = write_wespeaker(tmp_path / "a")
    shutil.make_archive(str(server / "elsewhere/a"), "zip", model)
    published = load_published(hub.fetch("voxceleb_resnet34"))
    assert published.config.frontend["window"] == "hamming"
    with refuses("hub:wespeaker/voxceleb_resnet34_LM", "voxceleb_resnet34_LM.zip"):
        hub.fetch("voxceleb_resnet34_LM")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("speech_camplus_sv_en_voxceleb", "hub:speech_campplus_sv_en_voxceleb_16k?"),
        ("voxceleb_resnet34_lm", "hub:voxceleb_resnet34_LM?"),
        ("campplus_zh_200k", "hub:campplus-zh-200k?"),
        ("wespeaker/voxceleb_resnet43", "hub:wespeaker/voxceleb_resnet34?"),
        ("nothing", "import --list"),  # resembles none
        ("campplus_tiny", "import --list"),
    ],
)
def test_unknown_name_is_answered_with_a_near_miss_or_the_list(
    name: str, suggestion: str
) -> None:
    with refuses(f"hub:{name}", suggestion):
        hub.fetch(f"hub:{name}")


def test_name_without_hub_is_answered_with_the_published_model() -> None:
    with refuses("campplus-zh-200k", "hub:campplus-zh-200k?", error=FileNotFoundError):
        find_model(Path("campplus-zh-200k"))
    for path in ("exp/mini", "model"):
        assert near_miss(path) == ""


def test_short_names_are_unique_and_find_their_model() -> None:
    assert known_name("campplus-zh-200k") == NAME
    short_names = [model.short_name for model in MODELS.values()]
    assert len(set(short_names)) == len(MODELS)
    assert [known_name(name) for name in short_names] == list(MODELS)


def test_publishers_words_are_kept_in_the_card(server: Path) -> None:
    write_model(server / PATH, seed=1)
    source = read_source(hub.local("hub:campplus-zh-200k"))
    assert source
    assert source["hub"] == NAME
    assert source["licence"] == "not stated"
    assert source["training_data"].startswith("200,000")
    assert source["page"].endswith(NAME)


def test_file_put_into_the_cache_by_hand_is_used(server: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache" / NAME / "campplus_cn_common.bin"
    with refuses(f"{os.environ['SPEAKERLAB_HUB']}/{PATH}", file):
        hub.fetch(NAME)
    Handler.asked.clear()

    # A file that was put there is checked as a downloaded one is.
    digest = write_model(file, seed=1)
    with refuses(f"hub:{NAME}", digest):
        hub.fetch(f"{NAME}@sha256:{'0' * 64}")
    published = load_published(hub.fetch(f"hub:{NAME}"))
    assert published.folder == file.parent
    assert Handler.asked == []
    assert not file.exists()


def test_addresses_are_those_of_the_publishers(monkeypatch) -> None:
    monkeypatch.delenv("SPEAKERLAB_HUB", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)

    def address_of(name: str) -> str:
        return hub._address(MODELS[known_name(name)], Path())

    releases = "PalabraAI/redimnet2/releases/download/v1.0.0"
    assert address_of(NAME) == f"https://www.modelscope.cn/{PATH}"
    assert address_of("redimnet2-b3") == f"https://github.com/{releases}/b3-vox2-lm.pt"
    assert address_of("redimnet2-b6-voxblink2").endswith("/b6-vb2%2Bvox2_v0-lm.pt")
    file = "zl389/w2v-bert-2.0_SV/resolve/main/model_lmft_0.14.pth"
    assert address_of("w2vbert2-sv") == f"https://huggingface.co/{file}"
    monkeypatch.setenv("HF_ENDPOINT", "http://m/")
    assert address_of("w2vbert2-sv") == f"http://m/{file}"

    monkeypatch.setenv("SPEAKERLAB_HUB", "http://m/")
    assert address_of("voxceleb_CAM++") == "http://m/wespeaker/voxceleb_CAM%2B%2B.zip"
    assert address_of("redimnet2-b3") == f"http://m/github/{releases}/b3-vox2-lm.pt"
    assert len(MODELS) == 58


@pytest.mark.slow
def test_redimnet2_of_its_authors_is_imported(server: Path) -> None:
    file = server / MODELS[known_name("redimnet2-b0")].path
    file.parent.mkdir(parents=True)
    state = {"spec.torchfbank.2.melbanks_pt": torch.zeros(72, 256, 1)}
    for name, shape in read_figures("redimnet2_b0").shapes.items():
        state[name] = fill(name, shape, 0)
    torch.save({"model_config": {"C": 12}, "state_dict": state}, file)
    published = load_published(hub.local("hub:redimnet2-b0"))
    assert published.config.frontend["kind"] == "tfmel"
    source = read_source(published.folder)
    assert source
    assert source["licence"] == "MIT"
    assert source["training_data"] == "VoxCeleb2"


def test_a_model_over_a_pretrained_one_names_it() -> None:
    over_pretrained = [model for model in MODELS.values() if model.pretrained]
    assert {model.pretrained for model in over_pretrained} == {
        "hf:facebook/w2v-bert-2.0"
    }
    assert {model.short_name for model in over_pretrained} == {
        "w2vbert2_mfa",
        "w2vbert2_mfa_without_lm",
        "w2vbert2-sv",
        "w2vbert2-sv-without-lm",
    }
