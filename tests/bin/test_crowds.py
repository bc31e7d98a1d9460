"""Commands that run at once on the same folders: both finish right, or one refuses in one line."""

import multiprocessing
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from forked import start_forked
from processes import wait_for
from refusals import refused, refuses
from safetensors.torch import load_file
from tiny import BARE, checkpoints, copy_data, losses, names_in, read_json, weights
from voices import RATE, write_voices

from speakerlab.bin import extract, score
from speakerlab.checkpoints.published import load_published
from speakerlab.core.atomic import locked, replacing_folder
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import LOCK, pack_data_dir
from speakerlab.data.shards import Layout, read_packed, without_readers
from speakerlab.data.tables import relabel_data_dir
from speakerlab.scoring.embeddings import EmbeddingTable
from speakerlab.training.checkpoint import read_note

FORK = multiprocessing.get_context("fork")
PCM = Layout.of_waves("pcm", sample_rate=RATE)


class Crowd:
    """Commands in the background."""

    def __init__(self, environment, folder: Path) -> None:
        self.environment = environment
        self.folder = folder
        self.running = []

    def start(self, *arguments: object):
        """Start `speakerlab *words`."""
        number = len(self.running)
        output = self.folder / str(number)
        arguments = ("-m", "speakerlab", *arguments)
        process = start_forked(arguments, self.environment, output)
        self.running.append(process)
        return process

    def errors(self, number: int) -> str:
        path = self.folder / f"{number}.err"
        return path.read_text() if path.exists() else ""

    def end(self) -> list[int]:
        """Return the exit codes."""
        for process in self.running:
            process.join(200)
        for number in range(len(self.running)):
            errors = self.errors(number)
            assert "Traceback" not in errors, errors
        return [process.exitcode for process in self.running]


@pytest.fixture
def crowd(environment, tmp_path_factory):
    crowd = Crowd(environment, tmp_path_factory.mktemp("crowd"))
    yield crowd
    for process in crowd.running:
        process.kill()


def test_of_two_trainings_one_refuses_and_names_the_other(
    trained, settings, crowd, tmp_path
):
    exp = tmp_path / "exp"
    for _ in range(2):
        crowd.start("train", "--exp", exp, *settings)
    codes = crowd.end()
    assert sorted(codes) == [0, 1]

    winner = crowd.running[codes.index(0)]
    text = crowd.errors(codes.index(1))
    assert refused(text, str(exp), f"process {winner.pid} on"), text
    assert len(text.splitlines()) == 1
    assert weights(exp) == weights(trained)
    assert losses(exp) == losses(trained)


def test_two_packings_of_one_folder_write_what_one_writes(data, crowd, tmp_path):
    train = copy_data(data, tmp_path / "own") / "train"
    expected = copy_data(data, tmp_path / "alone") / "train"
    pack_data_dir(expected, layout=PCM)
    lock = train / LOCK
    pack = ("pack", train, "--num-workers", 1, "--codec")

    for codec in ("pcm", "pcm", "flac"):
        crowd.start(*pack, codec)
    assert crowd.end() == [0, 0, 0]

    # With the locks of a packing that joins its shards, a packing with another codec waits.
    codec = read_packed(train / "shards").layout.codec
    other_codec = "pcm" if codec == "flac" else "flac"
    with locked(lock), without_readers(train):
        waiting = crowd.start(*pack, other_codec)

        def has_opened_lock() -> bool:
            files = Path(f"/proc/{waiting.pid}/fd").iterdir()
            return str(lock) in map(os.path.realpath, files)

        wait_for(has_opened_lock)
    assert crowd.end() == [0, 0, 0, 0]

    packed = read_manifest([train], sample_rate=RATE)
    assert packed.parts[0].waves is not None
    assert not list(packed.parts[0].waves.cut_short())
    expected_packed = read_manifest([expected], sample_rate=RATE)
    for row in range(len(expected_packed)):
        wave_S = packed.read(row, 0, RATE)
        expected_S = expected_packed.read(row, 0, RATE)
        assert np.array_equal(wave_S, expected_S)
    # No unfinished shards are left.
    assert not list(train.glob(".shards*"))


@pytest.mark.slow
def test_shards_that_a_training_reads_are_not_replaced(
    data, trained, settings, crowd, run, tmp_path
):
    copied = copy_data(data, tmp_path / "own")
    exp = tmp_path / "exp"
    pack = ("-m", "speakerlab", "pack", copied / "train")
    run(*pack)
    crowd.start("train", "--exp", exp, *settings, f"data.dir={copied}")
    wait_for(lambda: losses(exp))

    done = run(*pack, "--codec", "flac", code=1)
    assert refused(done.stderr, str(copied / "train"), "a training"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = run(*pack)
    assert "already packed" in done.stderr
    # Stage 1 of a recipe would relabel the data.
    speakers = {"spk8-0": "a", "spk9-0": "b"}
    with refuses(str(copied / "train"), "a training"):
        relabel_data_dir(data / "test", copied / "train", speakers)

    assert crowd.running[0].is_alive()
    assert crowd.end() == [0]
    assert weights(exp) == weights(trained)
    run(*pack, "--codec", "flac")


def extract_test_set(exp: Path, data: Path) -> None:
    test = data / "test"
    extract.main(["--exp", str(exp), "--data", str(test)])


def table_of(exp: Path) -> EmbeddingTable:
    return EmbeddingTable.load(exp / "embeddings/test/trained")


def test_two_extractions_write_what_one_writes(trained, data, crowd, tmp_path):
    whole = shutil.copytree(trained, tmp_path / "whole")
    both = shutil.copytree(trained, tmp_path / "both")
    extract_both = ("extract", "--exp", both, "--data", data / "test")
    crowd.start("extract", "--exp", whole, "--data", data / "test")
    for nproc in (1, 2):
        crowd.start(*extract_both, "--nproc", nproc)
    assert crowd.end() == [0, 0, 0]
    for suffix in ("npy", "ids", "json"):
        path = f"embeddings/test/trained.{suffix}"
        expected = (whole / path).read_bytes()
        assert (both / path).read_bytes() == expected
    # Three files and the lock.
    assert len(names_in(both / "embeddings/test")) == 4


def test_no_chunk_is_written_while_another_process_joins_or_deletes(
    make_exp, data, monkeypatch
):
    """Otherwise the joining process deletes the folder below the one that writes."""
    exp = make_exp("a")
    saved = EmbeddingTable.save
    lock = exp / "embeddings/test/.trained.lock"

    def save(table: EmbeddingTable, stem: Path) -> None:
        # Another process cannot take the lock, which this one holds.
        other = FORK.Process(target=must_wait, args=(lock,))
        other.start()
        other.join()
        assert other.exitcode == 0, f"{stem} is written without the lock"
        saved(table, stem)

    monkeypatch.setattr(EmbeddingTable, "save", save)
    extract_test_set(exp, data)
    assert len(table_of(exp).ids) == 12


def must_wait(lock: Path) -> None:
    """Fail if the lock is free."""
    done = FORK.Event()
    process = FORK.Process(target=take, args=(lock, done), daemon=True)
    process.start()
    assert not done.wait(0.3)


def take(lock: Path, done) -> None:
    with locked(lock):
        done.set()


@pytest.fixture
def embedded(trained, data, tmp_path) -> Path:
    """A copy of the trained experiment with embeddings of the test set."""
    exp = shutil.copytree(trained, tmp_path / "embedded")
    extract_test_set(exp, data)
    return exp


@pytest.mark.slow
def test_two_scorings_keep_the_rows_of_both(embedded, data, crowd, tmp_path):
    lists = []
    for number in range(3):
        copy = data / f"test/trials_{number}"
        lists.append(Path(shutil.copy(data / "test/trials", copy)))
    results = embedded / "results.json"
    try:
        # All have begun before the first one may read results.json.
        with locked(embedded / ".results.lock"):
            for path in lists:
                crowd.start("score", "--exp", embedded, "--trials", path)
            for number in range(3):
                wait_for(partial(is_waiting, crowd, number))
            assert not results.exists()
        assert crowd.end() == [0, 0, 0]
    finally:
        for path in lists:
            path.unlink()

    rows = read_json(results)
    names = [f"test/{path.name}" for path in lists]
    assert sorted(row["trials"] for row in rows) == names
    page = (embedded / "report.html").read_text()
    for name in names:
        assert name in page


def is_waiting(crowd: Crowd, number: int) -> bool:
    return "locked by another" in crowd.errors(number)


@pytest.mark.slow
def test_a_scoring_and_a_training_in_one_experiment(
    trained, settings, data, crowd, tmp_path
):
    """The training continues with more epochs and writes checkpoints; its old model is scored."""
    exp = shutil.copytree(trained, tmp_path / "exp")
    extract_test_set(exp, data)
    crowd.start("train", "--exp", exp, *settings, "training.num_epochs=1000")
    # The trained experiment ended at step 24.
    wait_for(lambda: max(losses(exp)) > 24)
    score.main(["--exp", str(exp), "--trials", str(data / "test/trials")])
    (row,) = read_json(exp / "results.json")
    assert row["model_sha256"] == load_published(trained).sha256

    crowd.running[0].terminate()
    assert crowd.end() == [128 + signal.SIGTERM]
    assert weights(exp) == weights(trained)
    step = max(losses(exp))
    assert step > 24
    assert read_note(checkpoints(exp)[-1]).step == step


@pytest.mark.slow
def test_two_calibrations_into_one_copy(trained, data, crowd, tmp_path):
    out = tmp_path / "out"
    folders = ["--model", trained, "--data", data / "test", "--out", out]
    for _ in range(3):
        crowd.start("calibrate", *folders, "--force")
    assert crowd.end() == [0, 0, 0]
    calibration = read_json(out / "model/calibration.json")
    assert calibration["source"] == "test: 4 speakers, 12 recordings"
    expected = load_published(trained).sha256
    assert load_published(out).sha256 == expected
    assert names_in(out) == [".copy.lock", "config.yaml", "model"]


def test_two_means_published_to_one_folder(trained, crowd, tmp_path):
    """The folder is whole, whoever is last; one that starts later refuses."""
    out = tmp_path / "mean"
    for last in (1, 2, 2):
        crowd.start("average", trained, "--last", last, "--out", out)
    codes = crowd.end()
    assert 0 in codes
    for number, code in enumerate(codes):
        if code == 0:
            continue
        assert code == 1
        assert refused(crowd.errors(number), str(out), "already exists")
    load_published(out)
    assert load_file(out / "embedder.safetensors")
    assert names_in(tmp_path) == ["mean"]


def replace_often(folder: Path, name: str) -> None:
    for _ in range(50):
        with replacing_folder(folder) as fresh:
            for number in range(3):
                (fresh / f"{number}").write_text(name)


def test_a_folder_that_many_replace_is_always_whole(tmp_path):
    folder = tmp_path / "folder"
    writers = []
    for number in range(4):
        writer = FORK.Process(target=replace_often, args=(folder, str(number)))
        writer.start()
        writers.append(writer)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    # All three files are of the same writer.
    texts = {path.read_text() for path in folder.iterdir()}
    assert len(texts) == 1
    assert names_in(folder) == ["0", "1", "2"]
    assert names_in(tmp_path) == ["folder"]


def test_a_folder_that_appears_during_the_swap_is_replaced_too(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    rename = Path.rename
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
    assert names_in(folder) == ["own"]
    assert names_in(tmp_path) == ["folder"]


def test_trainings_share_data_that_are_rewritten_when_they_have_ended(
    settings, crowd, tmp_path
):
    """Two experiments read one packed folder; the lock is free again when both have ended."""
    folder = write_voices(tmp_path / "train", speakers=range(6), seconds=(1.5, 1.5))
    pack_data_dir(folder, layout=PCM)
    overrides = [f"data.dir={tmp_path}", "training.num_epochs=1", *BARE]
    first = tmp_path / "a"
    second = tmp_path / "b"
    crowd.start("train", "--exp", first, *settings, *overrides, "seed=97")
    crowd.start("train", "--exp", second, *settings, *overrides, "seed=98")
    assert crowd.end() == [0, 0]
    assert weights(first) != weights(second)
    # A lock that is never released would wait much longer.
    began = time.monotonic()
    relabel_data_dir(folder, folder, {"spk1-0": "a", "spk2-0": "b"})
    assert time.monotonic() - began < 10
    assert not (folder / "shards").exists()
