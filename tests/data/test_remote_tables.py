"""A data directory whose tables are in a store gives what the directory on the disk gives."""

import json
from pathlib import Path

import pytest
from object_server import served
from refusals import refuses

from speakerlab.config.schema import DataConfig
from speakerlab.data import remote
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.remote import Cache, Store
from speakerlab.data.remote_tables import DIRECTORY, local_folder
from speakerlab.data.shards import Layout

pytest.importorskip("fsspec")
RATE = 16000
PCM = Layout.of_waves("pcm", sample_rate=RATE)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(
        remote, "CACHE", Cache(tmp_path / "cache", max_bytes=10_000_000)
    )
    yield
    remote._open_store.cache_clear()
    local_folder.cache_clear()


@pytest.fixture
def server(tmp_path):
    with served(tmp_path / "web") as server:
        yield server


@pytest.fixture
def folder(make_data_dir) -> Path:
    return make_data_dir(speakers=range(4), seconds=[0.25, 1.0])


@pytest.fixture
def stored(server) -> Path:
    return server.folder / "corpus"


@pytest.fixture
def address(folder, server, stored) -> str:
    pack_data_dir(folder, layout=PCM, store=Store(f"file://{stored}"))
    return f"{server.url}/corpus"


def ask_again() -> None:
    """Forget what this process has asked the store for."""
    local_folder.cache_clear()


def test_an_address_in_the_settings_is_a_directory(folder, address, tmp_path):
    data = DataConfig(dir=str(tmp_path), train=(address,))
    (copy,) = data.train_folders()
    assert copy.is_relative_to(remote.CACHE.folder)
    assert data.corpora[0].name == "corpus"
    here = read_manifest([folder], sample_rate=RATE)
    there = read_manifest([copy], sample_rate=RATE)
    assert there.sha256() == here.sha256()
    wave_S = there.read(0, 0, 1000)
    assert (wave_S == here.read(0, 0, 1000)).all()
    assert there.parts[0].waves.remote.url == address


def test_tables_are_downloaded_once(address, server):
    first = local_folder(address)
    ask_again()
    tables = [path.name for path in server.folder.glob("corpus/utt2*")]
    for name in tables:
        (server.folder / "corpus" / name).unlink()
    assert local_folder(address + "/") == first


def test_changed_tables_are_uploaded_and_become_another_directory(
    folder, address, stored
):
    before = local_folder(address)
    (folder / "utt2lang").write_text("spk0-0 en\n", encoding="utf-8")
    line = pack_data_dir(folder, layout=PCM, store=Store(f"file://{stored}"))
    assert "already packed" in line
    ask_again()
    after = local_folder(address)
    assert after != before
    assert (after / "utt2lang").read_text(encoding="utf-8") == "spk0-0 en\n"
    assert not (before / "utt2lang").exists()


def test_a_table_of_another_packing_is_refused(address, stored):
    (stored / "utt2spk").write_text("a b\n", encoding="utf-8")
    with refuses(f"{address}/utt2spk"):
        local_folder(address)
    assert not list(remote.CACHE.folder.glob("tables/*/corpus"))


@pytest.mark.parametrize("name", ["../utt2spk", "..", "", "/etc/passwd"])
def test_a_table_that_leads_out_of_the_cache_is_refused(name, address, stored):
    path = stored / DIRECTORY
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["tables"] = {name: next(iter(facts["tables"].values()))}
    path.write_text(json.dumps(facts), encoding="utf-8")
    with refuses(f"{address}/{DIRECTORY}", "is no name of a table"):
        local_folder(address)


def test_a_store_without_tables_is_one_line(server):
    server.folder.mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match=DIRECTORY):
        local_folder(f"{server.url}/nothing")


def test_the_cache_evicts_no_tables(address):
    copy = local_folder(address)
    remote.CACHE._evict(0)
    assert (copy / "wav.scp").exists()


def test_noise_and_rooms_stay_local():
    with pytest.raises(ValueError, match=r"data.train=\[s3://bucket/x/train\]"):
        DataConfig(dir="s3://bucket/x")
    with pytest.raises(ValueError, match="twice"):
        DataConfig(train=("train", "s3://bucket/train"))
