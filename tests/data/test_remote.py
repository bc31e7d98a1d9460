"""Shards in a store give the samples of shards on a disk, or one line; the cache is bounded.

Letters: S samples.
"""

import asyncio
import errno
import gc
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from object_server import ObjectServer, served
from refusals import refuses

from speakerlab.bin.pack import main as pack_command
from speakerlab.data import loader, pack, remote
from speakerlab.data.arrays import stable_hash
from speakerlab.data.loader import TrainCrops, micro_batches, train_loader
from speakerlab.data.manifest import Manifest, read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.remote import Cache, RemoteShards, Store, read_ahead
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.shards import Layout

asyn = pytest.importorskip("fsspec.asyn")
RATE = 16000
PIECE = 40_000
LAYOUTS = {
    "pcm": Layout.of_waves("pcm", sample_rate=RATE),
    "flac": Layout.of_waves("flac", sample_rate=RATE),
}
# What a server does -> a part of the line of the refusal.
FAULTS = {
    "403": "403|Forbidden|Access",
    "500": "500|Internal Server Error",
    "cut": "payload|incomplete|of 40000 bytes",
    "short": "of 40000 bytes",
    "flip": "the checksum is wrong for",
    "stall": "no answer for",
    "whole": "sends more than the range",
}


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch, tmp_path):
    """Several shards of several pieces although there are a few seconds of audio."""
    monkeypatch.setattr(pack, "MIN_SHARD_BYTES", 150_000)
    monkeypatch.setattr(pack, "FEWEST_SHARDS", 4)
    monkeypatch.setattr(remote, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote, "ATTEMPT_SECONDS", 1.0)
    monkeypatch.setattr(
        remote, "CACHE", Cache(tmp_path / "cache", max_bytes=10_000_000)
    )
    # Of the S3 that `served` plays.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield
    remote._open_store.cache_clear()
    if "s3fs" in sys.modules:
        # It keeps the address of this test's server, and hangs if it closes at the end of Python.
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
        gc.collect()


@pytest.fixture
def folder(make_data_dir) -> Path:
    return make_data_dir(speakers=range(4), seconds=[0.25, 1.0, 4.3])


@pytest.fixture
def server(tmp_path):
    with served(tmp_path) as server:
        yield server


def waves_of(folder: Path, manifest: Manifest | None = None) -> dict[str, np.ndarray]:
    if manifest is None:
        manifest = read_manifest([folder], sample_rate=RATE)
    waves = {}
    for row, utterance in enumerate(manifest.ids):
        num_samples = int(manifest.num_samples_N[row])
        waves[utterance] = manifest.read(row, 0, num_samples)
    return waves


def assert_equal(waves: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(waves) == list(expected)
    for utterance, wave_S in waves.items():
        assert np.array_equal(wave_S, expected[utterance]), utterance


def packed_of(manifest: Manifest):
    packed = manifest.parts[0].waves
    assert packed is not None
    assert packed.remote is not None
    return packed


def move_to(folder: Path, url: str) -> None:
    """Let a data directory refer to the same shards by another address."""
    path = folder / "shards" / remote.REFERENCE
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "url": url}))


def publish(folder: Path, server: ObjectServer, layout: Layout = LAYOUTS["pcm"]) -> str:
    """Pack into the folder of a server; return the address that the server gives it."""
    target = server.folder / "bucket/corpus"
    pack_data_dir(folder, layout=layout, store=Store(f"file://{target}"))
    url = f"{server.url}/bucket/corpus"
    move_to(folder, url)
    return url


@pytest.mark.parametrize("codec", LAYOUTS)
def test_shards_in_a_store_give_the_audio(codec, folder, server):
    expected = waves_of(folder)
    publish(folder, server, LAYOUTS[codec])
    assert [path.name for path in (folder / "shards").iterdir()] == ["remote.json"]
    assert len(list((server.folder / "bucket/corpus").glob("*.tar"))) == 4
    manifest = read_manifest([folder], sample_rate=RATE)
    packed_of(manifest)
    assert_equal(waves_of(folder, manifest), expected)
    # The second time, nothing is downloaded.
    num_requests = len(server.paths)
    assert num_requests > 4
    assert_equal(waves_of(folder, manifest), expected)
    assert len(server.paths) == num_requests


def test_a_store_has_the_bytes_of_a_disk(folder, make_data_dir, tmp_path):
    pack_data_dir(folder, layout=LAYOUTS["pcm"])
    other = make_data_dir("other", speakers=range(4), seconds=[0.25, 1.0, 4.3])
    target = tmp_path / "store"
    pack_command([str(other), "--out", f"file://{target}", "--num-workers", "2"])
    names = {path.name for path in (folder / "shards").iterdir()}
    tables = {"wav.scp", "utt2spk", "utt2dur", "directory.json"}
    assert {path.name for path in target.iterdir()} == names | tables
    for path in target.glob("*.tar"):
        assert path.read_bytes() == (folder / "shards" / path.name).read_bytes()


def test_packing_again_uploads_nothing_unless_something_has_changed(folder, tmp_path):
    store = Store("memory://again")
    first = pack_data_dir(folder, layout=LAYOUTS["pcm"], store=store)
    assert first.startswith("memory://again: 12 utterances in 4 shards")
    for target in (store, None):  # without --out, they may be anywhere
        line = pack_data_dir(folder, layout=LAYOUTS["pcm"], store=target)
        assert line == f"{folder}: already packed"
    # A shard that has gone is noticed.
    system, root = store._open()
    system.rm(f"{root}/shard-00002.tar")
    expected = waves_of_recordings(folder)
    assert "12 utterances" in pack_data_dir(folder, layout=LAYOUTS["pcm"], store=store)
    assert_equal(waves_of(folder), expected)
    # To another store, all is uploaded.
    other = Store("memory://other")
    assert "12 utterances" in pack_data_dir(folder, layout=LAYOUTS["pcm"], store=other)
    assert store.sizes() == other.sizes()


def waves_of_recordings(folder: Path) -> dict[str, np.ndarray]:
    """Return the waves without the shards."""
    hidden = folder.parent / "hidden"
    (folder / "shards").rename(hidden)
    waves = waves_of(folder)
    hidden.rename(folder / "shards")
    return waves


def test_an_interrupted_upload_continues(folder, monkeypatch):
    uploaded: list[str] = []
    upload = Store.upload

    def fail_in_the_third(store: Store, path: Path, name: str) -> None:
        if len(uploaded) == 2:
            uploaded.append("failed")
            raise ValueError(f"{store.url}/{name}: cannot be written")
        uploaded.append(name)
        upload(store, path, name)

    monkeypatch.setattr(Store, "upload", fail_in_the_third)
    store = Store("memory://interrupted")
    expected = waves_of(folder)
    with refuses("memory://interrupted/shard-00002.tar", "cannot be written"):
        pack_data_dir(folder, layout=LAYOUTS["pcm"], store=store)
    assert not (folder / "shards").exists()
    pack_data_dir(folder, layout=LAYOUTS["pcm"], store=store)
    # Each file is uploaded once; the index follows the shards, and the tables follow both.
    assert [name for name in uploaded if name != "failed"] == [
        *(f"shard-{number:05d}.tar" for number in range(4)),
        "index.safetensors",
        *("utt2dur", "utt2spk", "wav.scp"),
        "directory.json",
    ]
    assert_equal(waves_of(folder), expected)


def test_shards_of_others_are_not_replaced(folder, make_data_dir):
    store = Store("memory://taken")
    pack_data_dir(folder, layout=LAYOUTS["pcm"], store=store)
    other = make_data_dir("elsewhere/other", speakers=range(2))
    with refuses("--out", "memory://taken"):
        pack_data_dir(other, layout=LAYOUTS["pcm"], store=store)
    # Those of the directory itself are, after its tables have changed.
    (folder / "rejected.tsv").write_text("spk0-0\tx.wav\tnoise\n")
    line = pack_data_dir(folder, layout=LAYOUTS["pcm"], store=store)
    assert "11 utterances" in line
    assert len(waves_of(folder)) == 11


@pytest.mark.parametrize(
    "protocol", ["http", pytest.param("s3", marks=pytest.mark.slow)]
)
def test_a_store_that_misbehaves_is_asked_again_and_refused_in_the_end(
    protocol, folder, server, monkeypatch
):
    expected = waves_of(folder)
    url = publish(folder, server)
    if protocol == "s3":
        url = use_s3(folder, server, monkeypatch)
    manifest = read_manifest([folder], sample_rate=RATE)
    assert packed_of(manifest).remote.url == url
    for fault, cause in FAULTS.items():
        shutil.rmtree(remote.CACHE.folder)
        server.faults = ["", fault, "", fault]
        assert_equal(waves_of(folder, manifest), expected)
        assert not server.faults

        shutil.rmtree(remote.CACHE.folder)
        server.paths.clear()
        server.forever = fault
        started_at = time.monotonic()
        with refuses(f"{url}/shard-00000.tar") as caught:
            manifest.read(0, 0, 1000)
        message = str(caught.value)
        assert "\n" not in message
        assert any(part in message for part in cause.split("|")), message
        assert len(server.paths) == remote.ATTEMPTS
        assert time.monotonic() - started_at < 20

        # Nothing wrong was kept: once the store has recovered, so have the samples.
        server.forever = ""
        assert_equal(waves_of(folder, manifest), expected)


def use_s3(folder: Path, server: ObjectServer, monkeypatch) -> str:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    move_to(folder, "s3://bucket/corpus")
    return "s3://bucket/corpus"


def test_an_address_that_is_wrong_is_one_line(folder, server, monkeypatch):
    publish(folder, server)
    move_to(folder, f"{server.url}/elsewhere")
    with refuses(
        f"{server.url}/elsewhere/index.safetensors",
        "no such file",
        error=FileNotFoundError,
    ):
        read_manifest([folder], sample_rate=RATE)
    move_to(folder, "nowhere://bucket/corpus")
    with refuses("nowhere://bucket/corpus", "pip install"):
        read_manifest([folder], sample_rate=RATE)


def test_an_index_that_was_replaced_is_refused(folder, server):
    url = publish(folder, server)
    index = server.folder / "bucket/corpus/index.safetensors"
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    with refuses(f"{url}/index.safetensors", "remote.json"):
        read_manifest([folder], sample_rate=RATE)


def test_a_reference_that_leads_out_of_the_cache_is_refused(folder, server):
    publish(folder, server)
    path = folder / "shards/remote.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "index_sha256": "../../x"}))
    with refuses(str(path), "damaged"):
        read_manifest([folder], sample_rate=RATE)
    shards = RemoteShards(url="memory://x", index_sha256="0" * 64, index_bytes=1)
    assert remote.CACHE.folder.resolve() in shards._piece("../..", 0).resolve().parents


def test_without_fsspec_a_line_names_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with refuses("s3://bucket/x", "fsspec", "pip install"):
        pack_data_dir(folder, layout=LAYOUTS["pcm"], store=Store("s3://bucket/x"))


@pytest.mark.parametrize("url", ["https://host/x", "data/shards"])
def test_an_address_that_cannot_be_written_is_refused(url, folder):
    with refuses("--out", url):
        pack_command([str(folder), "--out", url])


def test_a_damaged_piece_in_the_cache_is_downloaded_again(folder, server):
    expected = waves_of(folder)
    publish(folder, server)
    manifest = read_manifest([folder], sample_rate=RATE)
    waves_of(folder, manifest)
    pieces = sorted(remote.CACHE.folder.glob("*/*.pieces/*"))
    content = bytearray(pieces[0].read_bytes())
    content[len(content) // 2] ^= 1
    pieces[0].write_bytes(content)
    pieces[1].write_bytes(b"")  # as after the end of the host
    pieces[2].unlink()
    assert_equal(waves_of(folder, manifest), expected)


def bytes_in(cache: Cache) -> int:
    return sum(path.stat().st_size for path in cache.folder.glob("*/*/*"))


def test_the_cache_stays_in_its_bounds_and_the_least_used_leave(tmp_path):
    cache = Cache(tmp_path / "bounded", max_bytes=10_000)
    paths = [cache.folder / f"key/shard/{number}" for number in range(20)]
    for number, path in enumerate(paths):
        cache.add(path, bytes(1000))
        os.utime(path, (number, number))
        assert bytes_in(cache) <= 10_000
        # The first one is used again and again.
        assert cache.read(paths[0], 0, 1) is not None
    assert paths[0].exists()
    assert not paths[1].exists()
    assert paths[-1].exists()


def test_a_piece_may_leave_while_it_is_read(tmp_path):
    cache = Cache(tmp_path / "bounded", max_bytes=1000)
    path = cache.folder / "key/shard/0"
    cache.add(path, b"x" * 1000)
    with path.open("rb") as file:
        cache.add(cache.folder / "key/shard/1", b"y" * 1000)
        assert not path.exists()
        assert file.read() == b"x" * 1000


def test_a_full_disk_makes_room_and_otherwise_is_one_line(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "full", max_bytes=100_000)
    room = 5000
    write_bytes = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        if bytes_in(cache) + len(content) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    for number in range(10):
        path = cache.folder / f"key/shard/{number}"
        cache.add(path, bytes(1000))
        assert path.exists()
    room = 0
    with refuses(str(cache.folder), "disk is full", "runtime.cache_dir"):
        cache.add(path.with_name("more"), bytes(1000))


def test_a_full_disk_without_a_ledger_empties_a_quarter_of_the_cache(
    tmp_path, monkeypatch
):
    cache = Cache(tmp_path / "full", max_bytes=100_000)
    for number in range(8):
        cache.add(cache.folder / f"key/shard/{number}", bytes(1000))
    # The disk has no room for the ledger, nor for another piece.
    (cache.folder / "ledger").unlink()
    monkeypatch.setattr(Cache, "_write_ledger", lambda cache, num_bytes: None)
    write_bytes = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        if bytes_in(cache) + len(content) > 8000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    cache.add(cache.folder / "key/shard/8", bytes(1000))
    assert bytes_in(cache) == 7000


def read_all(folder: Path) -> dict[str, int]:
    waves = waves_of(folder)
    return {name: stable_hash(wave_S.tobytes().hex()) for name, wave_S in waves.items()}


def test_processes_and_threads_share_a_cache_that_is_too_small(folder, server):
    expected = read_all(folder)
    publish(folder, server)
    remote.CACHE.max_bytes = 8 * PIECE
    with multiprocessing.get_context("fork").Pool(3) as pool:
        for waves in pool.map(read_all, [folder] * 6):
            assert waves == expected
    with ThreadPoolExecutor(4) as threads:
        for waves in threads.map(read_all, [folder] * 4):
            assert waves == expected
    assert bytes_in(remote.CACHE) <= remote.CACHE.max_bytes


def test_a_forked_process_reads_although_it_got_a_loop_that_stands_still(
    folder, server, monkeypatch
):
    """fsspec until 2025.3 lets the loop of the parent be that of a forked process."""
    expected = waves_of(folder)
    publish(folder, server)
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    monkeypatch.setattr(asyn, "iothread", [ended])
    monkeypatch.setattr(asyn, "loop", [asyncio.new_event_loop()])
    assert_equal(waves_of(folder), expected)


def test_a_piece_is_downloaded_once_for_all(folder, server):
    publish(folder, server)
    server.latency = 0.02
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.map(read_all, [folder] * 3)
    pieces = list(remote.CACHE.folder.glob("*/*.pieces/*"))
    assert len(server.paths) == len(pieces)


def batches_of(folder: Path, *, num_workers: int, num_ahead: int = 16):
    manifest = read_manifest([folder], sample_rate=RATE)
    crops = TrainCrops(
        manifest,
        {},
        crop_samples=RATE // 2,
        label_KN=np.arange(4)[None],
        seed=0,
    )
    order = EpochOrder(
        manifest.num_samples_N, crop_samples=RATE // 2, global_batch=8, seed=0
    )
    return train_loader(
        crops,
        micro_batches(order, start_step=0, stop_step=12, micro_batch=4),
        num_workers=num_workers,
        pin_memory=False,
        num_ahead=num_ahead,
    )


def test_a_cache_that_is_smaller_than_the_shuffled_rows_is_warned_of(
    folder, server, caplog
):
    publish(folder, server)
    expected = list(batches_of(folder, num_workers=0))
    assert "runtime.cache_gb" not in caplog.text
    # 12 utterances have 710 kB; in windows of 3 rows, two windows have half of that.
    remote.CACHE.max_bytes = 400_000
    next(batches_of(folder, num_workers=0))
    assert "runtime.cache_gb" in caplog.text
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "BLOCK_ROWS", 3)
        patch.setattr(loader, "WINDOW_BLOCKS", 1)
        batches = list(batches_of(folder, num_workers=0))
    assert "runtime.cache_gb" not in caplog.text
    for batch, other in zip(batches, expected):
        assert np.array_equal(batch.wave_BS, other.wave_BS)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_from_a_store_are_those_from_a_disk(num_workers, folder, server):
    expected = list(batches_of(folder, num_workers=0))
    publish(folder, server)
    batches = list(batches_of(folder, num_workers=num_workers))
    assert len(batches) == len(expected) == 24
    for batch, other in zip(batches, expected):
        assert np.array_equal(batch.wave_BS, other.wave_BS)
        assert np.array_equal(batch.row_B, other.row_B)
    assert not multiprocessing.active_children()


def test_crops_are_read_ahead_no_further_than_allowed(tmp_path):
    """Of lists of 2, 6 items beyond those that were taken are fetched; none is left out."""
    lists = [[number, number + 1] for number in range(0, 40, 2)]
    fetched = tmp_path / "fetched"
    fetched.mkdir()

    def fetch(item: int) -> None:
        (fetched / f"{item}").touch()
        raise ValueError("errors of reading ahead are dropped")

    def wait_for(count: int) -> list[int]:
        deadline = time.monotonic() + 10
        while len(list(fetched.iterdir())) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # more may come
        return sorted(int(path.name) for path in fetched.iterdir())

    items = read_ahead(lists, lambda item: item, fetch, num_ahead=6)
    assert next(items) == [0, 1]
    first = wait_for(6)
    # The reader may start before or after the first list was taken.
    assert first in (list(range(8)), list(range(2, 8)))
    assert next(items) == [2, 3]
    assert wait_for(len(first) + 2)[-1] == 9
    assert list(items) == lists[2:]
    assert not multiprocessing.active_children()


def test_a_store_that_fails_while_training_reads_is_one_line(folder, server):
    url = publish(folder, server)
    batches = batches_of(folder, num_workers=1)
    server.forever = "500"
    with pytest.raises(ValueError) as caught:
        list(batches)
    last_line = str(caught.value).rstrip().splitlines()[-1]
    _, _, message = last_line.partition(": ")
    assert message.startswith(f"{url}/shard-")
    assert "500" in message


def test_recordings_are_not_needed(folder, server, tmp_path):
    expected = waves_of(folder)
    publish(folder, server)
    shutil.rmtree(tmp_path / "wav")
    assert_equal(waves_of(folder), expected)
