"""Commands that run at once on the same folders: both finish right, or one refuses in one line."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from forked import start_forked
from processes import wait_for
from refusals import refused, refuses
from safetensors.torch import load_file
from tiny import BARE, checkpoints, copy_data, losses, weights
from voices import RATE, write_voices

from speakerlab.bin import extract, score
from speakerlab.checkpoints.published import load_published
from speakerlab.core.atomic import alone, replacing_folder
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import LOCK, pack_data_dir
from speakerlab.data.shards import Layout, read_packed, unread
from speakerlab.data.tables import relabel_data_dir
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.training.checkpoint import read_note

FORK = multiprocessing.get_context("fork")


class Crowd:
    """Commands in the background."""

    def __init__(self, environment, folder: Path) -> None:
        self.environment, self.folder = environment, folder
        self.running = []

    def start(self, *words: object):
        """Start `speakerlab *words`."""
        output = self.folder / str(len(self.running))
        words = ("-m", "speakerlab", *words)
        self.running.append(start_forked(words, self.environment, output))
        return self.running[-1]

    def errors(self, number: int) -> str:
        path = self.folder / f"{number}.err"
        return path.read_text() if path.exists() else ""

    def end(self) -> list[int]:
        """Return the exit codes."""
        for process in self.running:
            process.join(200)
        for number in range(len(self.running)):
            assert "Traceback" not in self.errors(number), self.errors(number)
        return [process.exitcode for process in self.running]


@pytest.fixture
def crowd(environment, tmp_path_factory):
    crowd = Crowd(environment, tmp_path_factory.mktemp("crowd"))
    yield crowd
    for process in crowd.running:
        process.kill()


def test_of_two_trainings_one_refuses_and_names_the_other(trained, settings, crowd, tmp_path):
    exp = tmp_path / "exp"
    trainings = [crowd.start("train", "--exp", exp, *settings) for _ in range(2)]
    codes = crowd.end()
    assert sorted(codes) == [0, 1]
    text, winner = crowd.errors(codes.index(1)), trainings[codes.index(0)]
    assert refused(text, str(exp), f"process {winner.pid} on"), text
    assert len(text.splitlines()) == 1
    assert weights(exp) == weights(trained) and losses(exp) == losses(trained)


def test_two_packings_of_one_folder_write_what_one_writes(data, crowd, tmp_path):
    own, alone_ = copy_data(data, tmp_path / "own"), copy_data(data, tmp_path / "alone")
    pack_data_dir(alone_ / "train", layout=Layout.of_waves("pcm", sample_rate=RATE))
    pack = ("pack", own / "train", "--num-workers", 1, "--codec")
    for codec in ("pcm", "pcm", "flac"):
        crowd.start(*pack, codec)
    assert crowd.end() == [0, 0, 0]
    codec = {"flac": "pcm", "pcm": "flac"}[read_packed(own / "train/shards").layout.codec]
    with alone(own / "train" / LOCK), unread(own / "train"):  # as one that joins
        waiting = crowd.start(*pack, codec)
        lock = str(own / "train" / LOCK)
        wait_for(lambda: lock in map(os.path.realpath, Path(f"/proc/{waiting.pid}/fd").iterdir()))
    assert crowd.end() == [0, 0, 0, 0]
    packed = read_manifest([own / "train"], sample_rate=RATE)
    assert packed.parts[0].waves is not None and not list(packed.parts[0].waves.cut_short())
    whole = read_manifest([alone_ / "train"], sample_rate=RATE)
    for row in range(len(whole)):
        assert np.array_equal(packed.read(row, 0, RATE), whole.read(row, 0, RATE))
    left = [path.name for path in (own / "train").iterdir() if path.name.startswith(".shards")]
    assert not left


def test_shards_that_a_training_reads_are_not_replaced(
    data, trained, settings, crowd, run, tmp_path
):
    own, exp = copy_data(data, tmp_path / "own"), tmp_path / "exp"
    run("-m", "speakerlab", "pack", own / "train")
    crowd.start("train", "--exp", exp, *settings, f"data.dir={own}")
    wait_for(lambda: losses(exp))
    done = run("-m", "speakerlab", "pack", own / "train", "--codec", "flac", code=1)
    assert refused(done.stderr, str(own / "train"), "a training"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "already packed" in run("-m", "speakerlab", "pack", own / "train").stderr
    with refuses(str(own / "train"), "a training"):  # as stage 1 would
        relabel_data_dir(data / "test", own / "train", {"spk8-0": "a", "spk9-0": "b"})
    assert crowd.running[0].is_alive()
    assert crowd.end() == [0]
    assert weights(exp) == weights(trained)
    run("-m", "speakerlab", "pack", own / "train", "--codec", "flac")


def table_of(exp: Path) -> EmbeddingTable:
    return EmbeddingTable.load(exp / "embeddings/test/trained")


def test_two_extractions_write_what_one_writes(trained, data, crowd, tmp_path):
    whole = shutil.copytree(trained, tmp_path / "whole")
    both = shutil.copytree(trained, tmp_path / "both")
    crowd.start("extract", "--exp", whole, "--data", data / "test")
    for nproc in (1, 2):
        crowd.start("extract", "--exp", both, "--data", data / "test", "--nproc", nproc)
    assert crowd.end() == [0, 0, 0]
    for suffix in ("npy", "ids", "json"):
        path = f"embeddings/test/trained.{suffix}"
        assert (both / path).read_bytes() == (whole / path).read_bytes()
    assert len(list((both / "embeddings/test").iterdir())) == 4, "three files and the lock"


def test_no_chunk_is_written_while_another_process_joins_or_deletes(make_exp, data, monkeypatch):
    """Otherwise the joining process deletes the folder below the one that writes."""
    exp, saved = make_exp("a"), EmbeddingTable.save
    words = ["--exp", str(exp), "--data", str(data / "test")]
    lock = exp / "embeddings/test/.trained.lock"

    def save(table: EmbeddingTable, stem: Path) -> None:
        is_held = FORK.Process(target=must_wait, args=(lock,))
        is_held.start()
        is_held.join()
        assert is_held.exitcode == 0, f"{stem} is written without the lock"
        saved(table, stem)

    monkeypatch.setattr(EmbeddingTable, "save", save)
    extract.main(words)
    assert len(table_of(exp).ids) == 12


def must_wait(lock: Path) -> None:
    """Fail if the lock is free."""
    FORK.Process(target=take, args=(lock, done := FORK.Event()), daemon=True).start()
    assert not done.wait(0.3)


def take(lock: Path, done) -> None:
    with alone(lock):
        done.set()


@pytest.fixture
def embedded(trained, data, tmp_path) -> Path:
    """A copy of the trained experiment with embeddings of the test set."""
    exp = shutil.copytree(trained, tmp_path / "embedded")
    extract.main(["--exp", str(exp), "--data", str(data / "test")])
    return exp


def test_two_scorings_keep_the_rows_of_both(embedded, data, crowd, tmp_path):
    lists = [Path(shutil.copy(data / "test/trials", data / f"test/trials_{i}")) for i in range(3)]
    try:
        with alone(embedded / ".results.lock"):
            for path in lists:
                crowd.start("score", "--exp", embedded, "--trials", path)
            for number in range(3):  # all have begun before one may read results.json
                wait_for(lambda number=number: "locked by another" in crowd.errors(number))
            assert not (embedded / "results.json").exists()
        assert crowd.end() == [0, 0, 0]
    finally:
        for path in lists:
            path.unlink()
    rows = json.loads((embedded / "results.json").read_text())
    names = [f"test/{path.name}" for path in lists]
    assert sorted(row["trials"] for row in rows) == names
    page = (embedded / "report.html").read_text()
    assert all(name in page for name in names)


def test_a_scoring_and_a_training_in_one_experiment(trained, settings, data, crowd, tmp_path):
    """The training continues with more epochs and writes checkpoints; its old model is scored."""
    exp = shutil.copytree(trained, tmp_path / "exp")
    extract.main(["--exp", str(exp), "--data", str(data / "test")])
    crowd.start("train", "--exp", exp, *settings, "training.num_epochs=1000")
    wait_for(lambda: max(losses(exp)) > 24)
    score.main(["--exp", str(exp), "--trials", str(data / "test/trials")])
    (row,) = json.loads((exp / "results.json").read_text())
    assert row["model_sha256"] == load_published(trained).sha256
    crowd.running[0].terminate()
    assert crowd.end() == [128 + signal.SIGTERM]
    assert weights(exp) == weights(trained)
    step = max(losses(exp))
    assert read_note(checkpoints(exp)[-1]).step == step > 24


def test_two_calibrations_into_one_copy(trained, data, crowd, tmp_path):
    out = tmp_path / "out"
    for _ in range(3):
        words = ["--model", trained, "--data", data / "test", "--out", out, "--force"]
        crowd.start("calibrate", *words)
    assert crowd.end() == [0, 0, 0]
    assert (
        json.loads((out / "model/calibration.json").read_text())["source"]
        == "test: 4 speakers, 12 recordings"
    )
    assert load_published(out).sha256 == load_published(trained).sha256
    assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "model"]


def test_two_means_published_to_one_folder(trained, crowd, tmp_path):
    """The folder is whole, whoever is last; one that starts later refuses."""
    out = tmp_path / "mean"
    for last in (1, 2, 2):
        crowd.start("average", trained, "--last", last, "--out", out)
    codes = crowd.end()
    assert 0 in codes and set(codes) <= {0, 1}
    for number in (i for i, code in enumerate(codes) if code):
        assert refused(crowd.errors(number), str(out), "already exists")
    load_published(out)
    assert load_file(out / "embedder.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["mean"]


def replace_often(folder: Path, name: str) -> None:
    for _ in range(50):
        with replacing_folder(folder) as fresh:
            for number in range(3):
                (fresh / f"{number}").write_text(name)


def test_a_folder_that_many_replace_is_always_whole(tmp_path):
    folder = tmp_path / "folder"
    writers = [FORK.Process(target=replace_often, args=(folder, f"{i}")) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len({(folder / f"{number}").read_text() for number in range(3)}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_appears_during_the_swap_is_replaced_too(tmp_path, monkeypatch):
    folder, rename = tmp_path / "folder", Path.rename
    folder.mkdir()

    def rename_late(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path == folder:
            monkeypatch.undo()
            (folder / "of another process").mkdir(parents=True)
        return moved

    monkeypatch.setattr(Path, "rename", rename_late)
    with replacing_folder(folder) as fresh:
        (fresh / "own").touch()
    assert [path.name for path in folder.iterdir()] == ["own"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_trainings_share_data_that_are_rewritten_when_they_have_ended(settings, crowd, tmp_path):
    """Two experiments read one packed folder; the lock is free again when both have ended."""
    folder = write_voices(tmp_path / "train", speakers=range(6), seconds=(1.5, 1.5))
    pack_data_dir(folder, layout=Layout.of_waves("pcm", sample_rate=RATE))
    for name in "ab":
        more = [f"data.dir={tmp_path}", "training.num_epochs=1", f"seed={ord(name)}", *BARE]
        crowd.start("train", "--exp", tmp_path / name, *settings, *more)
    assert crowd.end() == [0, 0]
    assert weights(tmp_path / "a") != weights(tmp_path / "b")
    began = time.monotonic()
    relabel_data_dir(folder, folder, {"spk1-0": "a", "spk2-0": "b"})
    assert time.monotonic() - began < 10 and not (folder / "shards").exists()
