"""Trainings on shards in a store: the weights of a training on a disk, or one line."""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time

import pytest
from object_server import served
from tiny import BARE, copy_data, rows, weights
from voices import RATE

from speakerlab.data.pack import pack_data_dir
from speakerlab.data.remote import REFERENCE, Store
from speakerlab.data.shards import Layout

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
PCM = Layout.of_waves("pcm", sample_rate=RATE)


@pytest.fixture
def published(data, tmp_path):
    """A corpus whose training shards are on an HTTP server, and the server."""
    copied = copy_data(data, tmp_path / "data")
    target = tmp_path / "web/corpus"
    pack_data_dir(copied / "train", layout=PCM, store=Store(f"file://{target}"))
    with served(tmp_path / "web") as server:
        reference = copied / "train/shards" / REFERENCE
        facts = json.loads(reference.read_text())
        reference.write_text(json.dumps({**facts, "url": f"{server.url}/corpus"}))
        yield copied, server


@pytest.mark.slow
def test_a_training_over_http_learns_what_one_on_a_disk_does(
    published, trained, tmp_path, train
):
    copied, server = published
    server.faults = ["500", "cut", "flip", "short"]
    cache = f"runtime.cache_dir={tmp_path / 'cache'}"
    train(tmp_path / "exp", f"data.dir={copied}", cache)
    assert weights(tmp_path / "exp") == weights(trained)
    assert not server.faults
    for row in rows(tmp_path / "exp", "train"):
        assert 0 <= row["data_wait"] <= 1
    # Two ranks share the cache, which has all that they need by now.
    server.forever = "500"
    train(tmp_path / "ranks", f"data.dir={copied}", cache, ranks=2)


@pytest.mark.slow
def test_a_store_that_fails_ends_a_training_in_one_line(published, tmp_path, train):
    copied, server = published
    server.forever = "403"
    cache = f"runtime.cache_dir={tmp_path / 'cache'}"
    done = train(tmp_path / "exp", f"data.dir={copied}", cache, *BARE, code=1)
    last_line = done.stderr.rstrip().splitlines()[-1]
    assert f"{server.url}/corpus/shard-00000.tar: " in last_line
    assert "403" in last_line


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """Start moto's server of S3, with an empty bucket; the environment leads to it."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("needs moto[server]")
    s3fs = pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = "from moto.server import main; main()"
    command = [sys.executable, "-c", start, "-H", "127.0.0.1", "-p", str(port)]
    log = (tmp_path / "moto.log").open("w")
    with log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        yield variables
        server.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)  # four trainings, and moto takes long to start
def test_a_training_from_s3_learns_what_one_on_a_disk_does(
    data, trained, train_command, environment, s3, tmp_path
):
    copied = copy_data(data, tmp_path / "data")
    variables = {**environment, **s3}
    address = "s3://bucket/corpus"

    def run(command):
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    pack = [sys.executable, "-m", "speakerlab", "pack", str(copied / "train")]
    assert f"{address}: 24 utterances" in run([*pack, "--out", address])
    assert "already packed" in run([*pack, "--out", address])
    # Only the tables and the reference are needed on the disk.
    for wav in copied.glob("wav/spk[0-7]-*.wav"):
        wav.unlink()
    names = [path.name for path in (copied / "train/shards").iterdir()]
    assert names == [REFERENCE]
    cache = f"runtime.cache_dir={tmp_path / 'cache'}"
    exp = tmp_path / "exp"
    run(train_command(exp, 1, f"data.dir={copied}", cache))
    assert weights(exp) == weights(trained)

    shutil.rmtree(tmp_path / "cache")
    ranks = tmp_path / "ranks"
    run(train_command(ranks, 2, f"data.dir={copied}", cache))
    disk = tmp_path / "disk"
    run(train_command(disk, 2))
    assert weights(ranks) == weights(disk)

    # Without any table of it on this host.
    shutil.rmtree(copied / "train")
    alone = tmp_path / "alone"
    run(train_command(alone, 2, f"data.dir={copied}", f"data.train=[{address}]", cache))
    assert weights(alone) == weights(disk)
