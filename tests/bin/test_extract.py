"""Extraction in chunks: killed and restarted, in several processes and jobs, of one model."""

import logging
import multiprocessing
import os
import shutil
import threading
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import children_of, wait_for, wait_until_gone
from refusals import refuses
from tiny import names_in, read_json
from voices import RATE

from speakerlab.bin import extract, score
from speakerlab.data import audio
from speakerlab.data.arrays import stable_hash
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir
from speakerlab.experiments.embedded import read_embedded
from speakerlab.inference import workers
from speakerlab.scoring.embeddings import EmbeddingTable

# Each has 4 utterances of 16 s, which share a batch.
NUM_CHUNKS = 5
NAMES = [f"u{number:02d}" for number in range(20)]
SPEAKERS = {name: f"s{number % 4}" for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """20 utterances of 16 s by 4 speakers."""
    root = tmp_path_factory.mktemp("long")
    rng = np.random.default_rng(0)
    noise_S = rng.normal(0, 3000, 20 * RATE).astype(np.int16)
    wavs = {name: root / f"wav/{name}.wav" for name in NAMES}
    (root / "wav").mkdir()
    for number, path in enumerate(wavs.values()):
        rolled_S = np.roll(noise_S, 4321 * number)
        audio.write(path, rolled_S[: 16 * RATE], RATE)
    write_data_dir(root / "test", wavs=wavs, speakers=SPEAKERS)
    check_data_dirs([root / "test"])
    return root / "test"


def arguments_for(exp: Path, data: Path, *options: str) -> list[str]:
    return ["--exp", str(exp), "--data", str(data), *options]


def run_extract(exp: Path, data: Path, *options: str) -> None:
    extract.main(arguments_for(exp, data, *options))


def files(exp: Path) -> list[bytes]:
    """The finished table; nothing else but a lock may be left beside it."""
    folder = exp / "embeddings/test"
    names = ["trained.ids", "trained.json", "trained.npy"]
    left = names_in(folder)
    assert left == [".trained.lock", *names]
    return [(folder / name).read_bytes() for name in names]


def parts(exp: Path) -> list[Path]:
    """The tables of finished chunks."""
    return sorted((exp / "embeddings/test/.trained.parts").glob("*.json"))


@pytest.fixture
def whole(make_exp, data) -> list[bytes]:
    """The table that one undisturbed process writes."""
    exp = make_exp("whole")
    run_extract(exp, data)
    return files(exp)


@pytest.mark.parametrize("nproc", [1, 2])
def test_what_may_be_no_speech_is_counted_in_one_line(make_exp, data, nproc, caplog):
    exp = make_exp("exp", "model.max_seconds=9")
    treatments = ["--durations", "2"]
    run_extract(exp, data, "--nproc", str(nproc), *treatments)
    # All are noise, and have two windows.
    (line,) = [text for text in caplog.messages if "noise" in text]
    assert "(silent, clipped, noise, tone): 20 utterances;" in line
    # Nothing is read again.
    caplog.clear()
    run_extract(exp, data, *treatments)
    assert [text for text in caplog.messages if "noise" in text] == []


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_extraction_is_resumed_with_another_nproc(
    make_exp, data, whole, caplog, nproc
):
    exp = make_exp("killed")
    context = multiprocessing.get_context("fork")
    options = arguments_for(exp, data, "--nproc", str(nproc))
    command = context.Process(target=extract.main, args=[options])
    command.start()
    wait_for(lambda: parts(exp))
    assert command.pid
    workers = children_of(command.pid)
    command.kill()
    command.join()

    # One process does its work itself.
    assert len(workers) == (0 if nproc == 1 else 2)
    wait_until_gone(workers, seconds=5)
    num_finished = len(parts(exp))
    assert 1 <= num_finished < NUM_CHUNKS
    assert not (exp / "embeddings/test/trained.json").exists()

    other_nproc = 3 - nproc
    with caplog.at_level(logging.INFO):
        run_extract(exp, data, "--nproc", str(other_nproc))
    line = f"{num_finished} of {NUM_CHUNKS} chunks are finished, kept"
    assert line in caplog.text
    assert files(exp) == whole


def test_jobs_give_the_bits_of_one_process(make_exp, data, whole, caplog):
    exp = make_exp("jobs")
    # Another host may use another number of threads.
    torch.set_num_threads(2)
    with caplog.at_level(logging.INFO):
        run_extract(exp, data, "--job", "3/4")
        run_extract(exp, data, "--job", "1/4", "--nproc", "2")
    assert "trained: 4 of 5 chunks remain, of jobs 1, 2 and 4 of 4" in caplog.text
    assert "trained: 2 of 5 chunks remain, of jobs 2 and 4 of 4" in caplog.text
    run_extract(exp, data, "--job", "4/4")
    # The first job does not do its chunks twice.
    made_at = [path.stat().st_mtime_ns for path in parts(exp)]
    run_extract(exp, data, "--job", "1/4")
    assert [path.stat().st_mtime_ns for path in parts(exp)] == made_at

    run_extract(exp, data, "--job", "2/4")
    assert files(exp) == whole
    run_extract(exp, data, "--job", "1/4")
    assert files(exp) == whole


def test_the_first_job_waits_and_names_those_that_do_not_come(
    make_exp, data, whole, caplog
):
    exp = make_exp("waits")
    stem = f"{exp}/embeddings/test/trained"
    missing = "3 of 5 chunks of jobs 2 and 3 of 3"
    with refuses(stem, "0.001", missing):
        extract.main(
            arguments_for(exp, data, "--job", "1/3", "--wait-minutes", "0.001")
        )

    context = multiprocessing.get_context("fork")
    others = []
    for number in (2, 3):
        options = arguments_for(exp, data, "--job", f"{number}/3")
        others.append(context.Process(target=extract.main, args=[options]))
    for other in others:
        other.start()
    run_extract(exp, data, "--job", "1/3", "--wait-minutes", "1")
    for other in others:
        other.join()
        assert other.exitcode == 0
    assert files(exp) == whole


def test_another_models_chunks_are_never_joined(make_exp, data):
    exp = make_exp("model")
    run_extract(exp, data, "--job", "1/2")
    make_exp("model", "seed=1")
    run_extract(exp, data, "--job", "2/2")
    assert len(parts(exp)) == NUM_CHUNKS
    assert not (exp / "embeddings/test/trained.json").exists()
    run_extract(exp, data, "--job", "1/2")
    fresh = make_exp("fresh", "seed=1")
    run_extract(fresh, data)
    assert files(exp) == files(fresh)
    # A finished table of another model is removed when the next extraction begins.
    make_exp("model", "seed=0")
    run_extract(exp, data, "--job", "5/5")
    assert not (exp / "embeddings/test/trained.json").exists()


def drop_first(part: Path) -> None:
    """A chunk without one of its utterances, whole otherwise."""
    table = EmbeddingTable.load(part.with_suffix(""))
    remaining = EmbeddingTable(
        table.ids[1:],
        table.emb_ND[1:],
        table.model_sha256,
        table.facts,
    )
    remaining.save(part.with_suffix(""))


def test_harmed_chunks_are_done_again(make_exp, data, whole, caplog):
    exp = make_exp("harmed")
    for job in range(1, 5):
        run_extract(exp, data, "--job", f"{job}/5")
    cut_table, cut_ids, incomplete, _ = parts(exp)
    os.truncate(cut_table.with_suffix(".npy"), 200)
    os.truncate(cut_ids.with_suffix(".ids"), 5)
    drop_first(incomplete)
    with caplog.at_level(logging.INFO):
        run_extract(exp, data)
    assert "1 of 5 chunks are finished, kept" in caplog.text
    assert files(exp) == whole


def test_a_killed_process_ends_the_command_in_one_line(make_exp, data):
    exp = make_exp("worker")

    def kill_one() -> None:
        # As soon as it exists: later, it may have finished its chunks.
        wait_for(multiprocessing.active_children)
        multiprocessing.active_children()[0].kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    with refuses("extract", "one of 2 processes was killed"):
        run_extract(exp, data, "--nproc", "2")
    killer.join()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("nproc", [1, 2])
def test_audio_that_is_gone_is_named(make_exp, data, tmp_path, nproc):
    exp = make_exp("gone")
    wavs = {f"u{number}": tmp_path / f"u{number}.wav" for number in range(6)}
    wave_S = np.full(16 * RATE, 1000, np.int16)
    for path in wavs.values():
        audio.write(path, wave_S, RATE)
    speakers = {name: name for name in wavs}
    write_data_dir(tmp_path / "test", wavs=wavs, speakers=speakers)
    check_data_dirs([tmp_path / "test"])
    wavs["u4"].unlink()
    with pytest.raises(FileNotFoundError, match=r"u4\.wav: "):
        run_extract(exp, tmp_path / "test", "--nproc", str(nproc))


def test_at_most_so_many_of_a_speaker(make_exp, data, whole):
    exp = make_exp("few")
    run_extract(exp, data, "--per-speaker", "2")
    table = EmbeddingTable.load(exp / "embeddings/test/trained")
    # The first two of each speaker, in the order of their hashes.
    expected = []
    for speaker in set(SPEAKERS.values()):
        names = [name for name in NAMES if SPEAKERS[name] == speaker]
        names.sort(key=stable_hash)
        expected += names[:2]
    assert sorted(table.ids) == sorted(expected)
    assert table.facts["per_speaker"] == 2

    # All utterances are another table.
    run_extract(exp, data)
    assert files(exp) == whole


def write_all_trials(path: Path) -> None:
    """Write a trial for each pair of utterances."""
    lines = []
    for test, enrol in combinations(NAMES, 2):
        is_target = SPEAKERS[enrol] == SPEAKERS[test]
        label = "target" if is_target else "nontarget"
        lines.append(f"{enrol} {test} {label}\n")
    path.write_text("".join(lines))


@pytest.mark.slow
def test_score_extracts_what_it_is_asked_for(make_exp, data, caplog):
    exp = make_exp("cut")
    trials = data / "trials"
    write_all_trials(trials)
    run_extract(exp, data)
    arguments = ["--exp", str(exp), "--trials", str(trials)]
    treatments = ["--durations", "2", "full", "--codecs", "none", "gsm"]
    score.main([*arguments, *treatments])

    stem = exp / "embeddings/test/trained"
    whole = EmbeddingTable.load(stem)
    assert whole.facts.get("treatment") is None
    for treatment in ("2s", "gsm"):
        table = EmbeddingTable.load(Path(f"{stem}_{treatment}"))
        assert table.ids == whole.ids
        assert not np.allclose(whole.emb_ND, table.emb_ND)
        assert table.facts["treatment"] == treatment

    (row,) = read_json(exp / "results.json")
    eers = {part["value"]: part["eer"] for part in row["conditions"]}
    assert eers["full"] == row["eer"]
    assert eers["none"] == row["eer"]
    assert eers["2 s"] != row["eer"]
    assert eers["gsm"] != row["eer"]
    page = (exp / "report.html").read_text()
    for text in ("duration of the test side", "2 s", "codec of", "gsm"):
        assert text in page

    # The whole utterances and those of 2 s.
    caplog.clear()
    with caplog.at_level(logging.INFO):
        score.main([*arguments, "--durations", "2"])
    assert caplog.text.count("already extracted") == 2


def test_a_finished_table_needs_no_right_to_write(make_exp, data, caplog, monkeypatch):
    exp = make_exp("a")
    run_extract(exp, data)
    before = files(exp)

    def refuse(path: Path) -> None:
        raise ValueError(f"{path}: cannot be written")

    # Root may write everywhere: the check is replaced, and the lock cannot be opened.
    monkeypatch.setattr(extract, "check_writable", refuse)
    lock = exp / "embeddings/test/.trained.lock"
    lock.unlink()
    lock.mkdir()
    with caplog.at_level(logging.INFO):
        run_extract(exp, data)
    assert "already extracted" in caplog.text
    assert files(exp) == before
    table = f"{exp}/embeddings/test/trained.json"
    with refuses(table, "cannot be written"):
        run_extract(exp, data, "--per-speaker", "1")


def test_another_directory_of_the_same_name_replaces_nothing(make_exp, data, tmp_path):
    exp = make_exp("a")
    run_extract(exp, data)
    before = files(exp)

    folder = tmp_path / "other" / "test"
    wavs = {f"x{name}": data.parent / f"wav/{name}.wav" for name in NAMES[:4]}
    write_data_dir(folder, wavs=wavs, speakers={x: x[-1] for x in wavs})
    check_data_dirs([folder])
    stem = f"{exp}/embeddings/test/trained"
    with refuses(stem, "test", folder):
        run_extract(exp, folder)
    with refuses(stem, "test", folder):
        read_embedded(exp, folder)
    assert files(exp) == before


def test_what_is_missing_names_the_command_that_makes_it(make_exp, data, tmp_path):
    exp = tmp_path / "untrained exp"
    command = f"speakerlab train --exp {exp}"
    # Without a folder, and with an empty one.
    for _ in range(2):
        with refuses(str(exp), command, error=FileNotFoundError):
            run_extract(exp, data)
        exp.mkdir(exist_ok=True)

    # Other forms of a model, which commands for recordings take.
    onnx = tmp_path / "m.onnx"
    onnx.touch()
    with refuses(str(onnx), "folder of the model", error=FileNotFoundError):
        run_extract(onnx, data)
    published = Path("hub:campplus-zh-200k")
    command = f"speakerlab import {published} --out DIR"
    with refuses(str(published), command, error=FileNotFoundError):
        run_extract(published, data)
    with refuses(str(published), command, error=FileNotFoundError):
        score.main(["--exp", str(published), "--trials", str(data / "trials")])

    exp = make_exp("a")
    fresh = Path(shutil.copytree(data, tmp_path / "fresh"))
    (fresh / "utt2dur").unlink()
    command = f"speakerlab check {fresh}"
    with refuses(str(fresh), command, error=FileNotFoundError):
        run_extract(exp, fresh)

    trials = data / "trials"
    trials.write_text("u00 u04 target\nu00 u01 nontarget\n")
    stem = exp / "embeddings/test/trained"
    command = f"speakerlab extract --exp {exp} --data {data}`"
    with refuses(str(stem), command, error=FileNotFoundError):
        score.main(["--exp", str(exp), "--trials", str(trials)])
    trials.unlink()


@pytest.mark.parametrize(
    ("setting", "nproc", "expected"),
    [("auto", 1, 2), (1, 1, 1), (3, 1, 3), (3, 2, 2), (99, 1, 4)],
)
def test_a_process_computes_as_many_batches_at_a_time_as_configured(
    monkeypatch, setting, nproc, expected
):
    monkeypatch.setattr(workers.system, "available_cpus", lambda: 4)
    torch.set_num_threads(2)
    assert workers.share_threads(nproc, setting) == expected
    # Each batch has one thread, so that the bits stay the same.
    assert torch.get_num_threads() == 1


def test_the_model_configures_the_threads_and_a_log_has_no_bar(
    make_exp, data, whole, monkeypatch, capfd
):
    exp = make_exp("threads")
    config = exp / "model/config.yaml"
    text = config.read_text()
    assert "num_threads: auto" in text
    config.write_text(text.replace("num_threads: auto", "num_threads: 3"))
    wanted = []
    share_threads = workers.share_threads

    def note(nproc, number):
        wanted.append(number)
        return share_threads(nproc, number)

    monkeypatch.setattr(workers, "share_threads", note)
    run_extract(exp, data)
    assert wanted == [3]
    assert files(exp) == whole
    written = capfd.readouterr()
    assert "\r" not in written.err
    assert "%|" not in written.err


def test_other_recordings_of_the_same_names_are_embedded_again(
    make_exp, data, tmp_path, whole
):
    """Replaced ones, and those of another folder of the same name; copies are the same."""
    exp = make_exp("exp")
    run_extract(exp, data)
    copy = tmp_path / "copy/test"
    shutil.copytree(data.parent / "wav", tmp_path / "wav")
    wavs = {name: tmp_path / f"wav/{name}.wav" for name in NAMES}
    write_data_dir(copy, wavs=wavs, speakers=SPEAKERS)
    check_data_dirs([copy])
    run_extract(exp, copy)
    assert files(exp) == whole

    # The same length, played backwards.
    wave_S = audio.read(wavs["u03"])
    audio.write(wavs["u03"], wave_S[::-1].copy(), RATE)
    check_data_dirs([copy])
    with refuses(str(exp / "embeddings/test/trained"), "of other recordings"):
        read_embedded(exp, copy)
    run_extract(exp, copy)
    assert files(exp) != whole
    with refuses(str(exp / "embeddings/test/trained"), "of other recordings"):
        read_embedded(exp, data)

    # Where recordings are missing, the embeddings can be used all the same.
    wavs["u04"].unlink()
    assert read_embedded(exp, copy).ids
