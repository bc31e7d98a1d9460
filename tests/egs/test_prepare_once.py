"""Preparing once: the record, the lock, and where `--noise auto` and `--rirs auto` look."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpora import write_short
from refusals import refused

from speakerlab.core.atomic import locked
from speakerlab.data.tables import read_table

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("fork")
# Two utterances of each speaker, without the suffix .wav.
FILES = [
    "train/1/1/1-1-0000",
    "train/1/1/1-1-0001",
    "train/2/1/2-1-0000",
    "train/2/1/2-1-0001",
    "test-a/3/1/3-1-0000",
    "test-a/3/1/3-1-0001",
    "test-a/4/1/4-1-0000",
    "test-a/4/1/4-1-0001",
]
KEPT = "already prepared with the same options and scripts, kept"


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_short(tmp_path / "corpora/libri", [f"{name}.wav" for name in FILES])


@pytest.fixture
def once(recipe, corpus, tmp_path, capsys):
    """once(*options, code=0) -> what librispeech's prepare.py writes about `tmp_path/data`."""

    def run(*options: object, code: int = 0, data: Path = tmp_path / "data") -> str:
        arguments = ["--corpus", corpus, "--data", data, *options]
        arguments = [str(argument) for argument in arguments]
        assert recipe("librispeech").main(arguments) == code
        written = capsys.readouterr()
        return written.err if code else written.out

    return run


def test_a_closed_pipe_is_silent(corpus, tmp_path):
    """As after `| head`: a program whose output nobody reads ends without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    finished = subprocess.run(
        [sys.executable, ROOT / "egs/librispeech/prepare.py"]
        + ["--corpus", corpus, "--data", tmp_path / "data", "--num-jobs", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert finished.stderr == ""
    assert finished.returncode == 128 + signal.SIGPIPE


def state(data: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in data.rglob("*")}


def test_the_second_call_writes_nothing(once, corpus, tmp_path):
    data = tmp_path / "data"
    assert KEPT not in once("--num-jobs", 1)
    before = state(data)
    record = data / ".prepared"
    line = f"{data}: {KEPT}; to prepare it again, remove {record}\n"
    assert once("--num-jobs", 2) == line
    assert state(data) == before
    lines = record.read_text().splitlines()
    assert f"corpus={corpus}" in lines
    assert "noise=" in lines
    assert "seed=1" in lines
    assert any(line.startswith("sha256=") for line in lines)
    record.unlink()
    assert KEPT not in once()
    assert state(data) != before


def test_relative_paths_mean_the_same_from_any_folder(
    once, recipe, corpus, tmp_path, monkeypatch
):
    once()
    monkeypatch.chdir(corpus)
    arguments = ["--corpus", ".", "--data", os.path.relpath(tmp_path / "data")]
    before = state(tmp_path / "data")
    assert recipe("librispeech").main(arguments) == 0
    assert state(tmp_path / "data") == before


def test_other_options_scripts_and_missing_tables_prepare_again(
    once, musan, tmp_path, monkeypatch, recipe
):
    data = tmp_path / "data"
    once()
    # Other options.
    assert KEPT not in once("--noise", musan)
    assert KEPT in once("--noise", musan)
    assert (data / "noise/wav.scp").exists()
    assert KEPT not in once("--noise", "none")
    assert not (data / "noise").exists()
    assert KEPT not in once("--seed", 2)

    # A table that is gone; a table of the user that is gone does not count.
    shutil.rmtree(data / "test")
    assert KEPT not in once("--seed", 2)
    assert KEPT in once("--seed", 2)
    (data / "by_hand").mkdir()
    (data / "by_hand/wav.scp").touch()
    shutil.rmtree(data / "by_hand")
    assert KEPT in once("--seed", 2)

    # Other scripts: of the recipe, beside it, and common ones.
    from egs.common.corpus import once as module

    egs = tmp_path / "egs"
    shutil.copytree(module.EGS / "common", egs / "common")
    script = egs / "librispeech/prepare.py"
    script.parent.mkdir()
    script.touch()
    monkeypatch.setattr(module, "EGS", egs)
    monkeypatch.setattr(module, "__file__", str(egs / "common/corpus/once.py"))
    parser = recipe("librispeech").make_parser("", corpus=egs)
    args = parser.parse_args([])
    digests = set()
    for path in (
        script,
        script.with_name("layout.py"),
        egs / "common/corpus/trials.py",
    ):
        path.write_text("# changed\n")
        digests.add(module.inputs_of(script, args)["sha256"])
    assert len(digests) == 3


def test_a_refused_or_killed_preparation_is_not_done(
    once, corpus, tmp_path, monkeypatch
):
    once()
    stray = corpus / "train/1/1/9-1-0000.wav"
    shutil.copy(corpus / f"{FILES[0]}.wav", stray)
    once("--seed", 2, code=1)
    assert not (tmp_path / "data/.prepared").exists()
    stray.unlink()
    assert KEPT not in once("--seed", 2)


PREPARING = [
    "3dspeaker",
    "voxceleb",
    "cnceleb",
    "voxblink2",
    "own",
    "voxconverse/diar",
    "ami/diar",
    "alimeeting/diar",
    "aishell4/diar",
]


def test_a_corpus_that_does_not_exist_is_one_line(
    once, recipe, corpus, tmp_path, capsys
):
    once()
    gone = tmp_path / "gone"
    arguments = ["--corpus", str(gone), "--data", str(tmp_path / "other")]
    for name in PREPARING:
        assert recipe(name).main(arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert refused(line, gone, "no such folder", "--corpus"), line

    # Finished data need no corpus.
    shutil.rmtree(corpus)
    assert KEPT in once()


def test_data_of_another_user_that_is_done_needs_no_lock(once, tmp_path):
    data = tmp_path / "data"
    once()
    # Opening a folder fails, as opening a file without permission does.
    (data / ".lock").unlink()
    (data / ".lock").mkdir()
    assert KEPT in once()
    assert "nothing to download" in once("--download-noise")
    (line,) = once("--seed", 2, code=1).splitlines()
    assert refused(line, data, "cannot be written")

    file = tmp_path / "file"
    file.touch()
    (line,) = once(code=1, data=file / "data").splitlines()
    assert refused(line, file / "data", "cannot be written")


def prepare(recipe, arguments: list[str], seconds: float, count) -> None:
    """Prepare slowly, and count how often."""
    module = recipe("librispeech")
    whole = module.prepare

    def slowly(*args, **options) -> None:
        with count.get_lock():
            count.value += 1
        time.sleep(seconds)
        whole(*args, **options)

    module.prepare = slowly
    os._exit(module.main(arguments))


@pytest.fixture
def start(recipe, corpus, tmp_path):
    """start(seconds, count) -> a process that prepares `tmp_path/data`."""
    processes = []
    arguments = ["--corpus", str(corpus), "--data", str(tmp_path / "data")]

    def run(seconds: float, count):
        args = (recipe, arguments, seconds, count)
        process = FORK.Process(target=prepare, args=args)
        process.start()
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.join()


def test_of_several_processes_one_prepares(start, tmp_path):
    count = FORK.Value("i", 0)
    processes = [start(1.0, count) for _ in range(3)]
    for process in processes:
        process.join(60)
    for process in processes:
        assert process.exitcode == 0
    assert count.value == 1
    assert len(read_table(tmp_path / "data/train/wav.scp")) == 4


def test_a_killed_process_lets_the_next_one_prepare(start, tmp_path):
    count = FORK.Value("i", 0)
    first = start(60.0, count)
    while count.value == 0:
        time.sleep(0.01)
    second = start(0.0, count)
    second.join(0.5)
    assert second.is_alive()
    assert count.value == 1
    os.kill(first.pid, signal.SIGKILL)
    second.join(60)
    assert second.exitcode == 0
    assert count.value == 2
    assert (tmp_path / "data/.prepared").exists()


def test_preparing_and_downloading_wait_for_a_check(start, once, tmp_path):
    (tmp_path / "data").mkdir()
    count = FORK.Value("i", 0)
    lock = tmp_path / "data/.lock"
    with locked(lock, shared=True):
        process = start(0.0, count)
        process.join(0.5)
        assert process.is_alive()
        assert count.value == 0
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("beside", [False, True])
def test_auto_is_the_archive_in_or_beside_the_corpus(once, corpus, tmp_path, beside):
    place = corpus.parent if beside else corpus
    write_short(place / "musan", ["noise/free-sound/a.wav"])
    write_short(place / "RIRS_NOISES", ["simulated_rirs/small/b.wav"])
    subsets = ["--train-subsets", "train", "--test-subsets", "test-a"]
    auto = ["--noise", "auto", "--rirs", "auto"]
    once(*auto, "--subsets", "x", *subsets)
    for name, folder in (("noise", "musan"), ("rirs", "RIRS_NOISES")):
        table = read_table(tmp_path / "data" / name / "wav.scp")
        assert table
        for path in table.values():
            assert Path(path).is_relative_to(place / folder)

    (line,) = once(*auto, "--download-noise").splitlines()
    assert "nothing to download" in line
    assert str(place / "musan") in line


def test_auto_without_archives_names_the_places_and_the_remedies(
    once, corpus, tmp_path
):
    auto = ("--noise", "auto", "--rirs", "auto")
    (line,) = once(*auto, code=1).splitlines()
    assert refused(line, "--noise auto --rirs auto", "musan, RIRS_NOISES")
    assert f"in {corpus} or {corpus.parent};" in line
    for remedy in (
        "--noise FOLDER",
        "FOLDER/musan (11 GB)",
        "FOLDER/RIRS_NOISES (1.3 GB)",
    ):
        assert remedy in line
    assert "--noise none --rirs none" in line

    auto = ("--noise", "auto", "--rirs", "none")
    (line,) = once(*auto, code=1).splitlines()
    assert refused(line, "--noise auto", "musan")
    assert "RIRS" not in line
    assert "--rirs" not in line
    assert not (tmp_path / "data").exists()


def test_auto_in_the_default_corpus_is_downloaded(
    recipe, tmp_path, monkeypatch, capsys
):
    module = recipe("librispeech")
    monkeypatch.setattr(module, "HERE", tmp_path)
    from egs.common.corpus import prepare as shared

    downloads = []

    def download(**folders) -> bool:
        downloads.append(folders)
        return True

    monkeypatch.setattr(shared, "download_noise_and_rooms", download)
    arguments = ["--data", str(tmp_path / "data"), "--noise", "auto", "--rirs", "auto"]
    assert module.main([*arguments, "--download-noise"]) == 0
    corpus = tmp_path / "corpus"
    assert downloads == [
        {"noise": corpus / "musan", "rirs": corpus / "RIRS_NOISES"},
    ]

    # Without its archives, stage 1 names the download.
    write_short(corpus, [f"{name}.wav" for name in FILES])
    assert module.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert refused(line, corpus / "musan", "--download-noise", "--noise none")


def test_another_corpus_never_replaces_the_data_of_the_first(
    once, recipe, corpus, tmp_path, capsys
):
    once()
    data = tmp_path / "data"
    before = state(data)
    other = tmp_path / "corpora/others"
    shutil.copytree(corpus, other)
    for option in ((), ("--download-noise",)):
        error = once("--corpus", other, *option, code=1)
        places = (corpus, f"--data {data}_others", "--exp", data / ".prepared")
        assert refused(error, "--corpus", other, *places), error
        assert error.count("\n") == 1
        assert state(data) == before

    # Both choices: folders of its own, or the record of the first is removed.
    once("--corpus", other, data=tmp_path / "data_others")
    assert state(data) == before
    (data / ".prepared").unlink()
    once("--corpus", other)
    assert str(other) in (data / "train/wav.scp").read_text()
