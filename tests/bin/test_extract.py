"""Extraction in chunks: killed and restarted, in several processes and jobs, of one model."""

import json
import logging
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import children_of, wait_for, wait_until_gone
from refusals import refuses
from voices import RATE

from speakerlab.bin import extract, score
from speakerlab.data import audio
from speakerlab.data.arrays import stable_hash
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir
from speakerlab.scoring.embeddings import EmbeddingTable

NUM_CHUNKS = 5  # of 4 utterances of 16 s each, which share a batch


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """20 utterances of 16 s by 4 speakers."""
    root = tmp_path_factory.mktemp("long")
    noise_S = np.random.default_rng(0).normal(0, 3000, 20 * RATE).astype(np.int16)
    wavs = {f"u{i:02d}": root / "wav" / f"u{i:02d}.wav" for i in range(20)}
    (root / "wav").mkdir()
    for i, path in enumerate(wavs.values()):
        audio.write(path, np.roll(noise_S, 4321 * i)[: 16 * RATE], RATE)
    speakers = {name: f"s{int(name[1:]) % 4}" for name in wavs}
    write_data_dir(root / "test", wavs=wavs, speakers=speakers)
    check_data_dirs([root / "test"])
    return root / "test"


def words(exp: Path, data: Path, *more: str) -> list[str]:
    return ["--exp", str(exp), "--data", str(data), *more]


def files(exp: Path) -> list[bytes]:
    """The finished table; nothing else but a lock may be left beside it."""
    folder = exp / "embeddings/test"
    names = ["trained.ids", "trained.json", "trained.npy"]
    assert sorted(path.name for path in folder.iterdir()) == [".trained.lock", *names]
    return [(folder / name).read_bytes() for name in names]


def parts(exp: Path) -> list[Path]:
    """The tables of finished chunks."""
    return sorted((exp / "embeddings/test/.trained.parts").glob("*.json"))


@pytest.fixture
def whole(make_exp, data) -> list[bytes]:
    """The table that one undisturbed process writes."""
    exp = make_exp("whole")
    extract.main(words(exp, data))
    return files(exp)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_extraction_is_resumed_with_another_nproc(make_exp, data, whole, caplog, nproc):
    exp = make_exp("killed")
    context = multiprocessing.get_context("fork")
    command = context.Process(target=extract.main, args=[words(exp, data, "--nproc", str(nproc))])
    command.start()
    wait_for(lambda: parts(exp))
    assert command.pid
    workers = children_of(command.pid)
    command.kill()
    command.join()
    assert len(workers) == (0 if nproc == 1 else 2)
    wait_until_gone(workers, seconds=5)
    num_kept = len(parts(exp))
    assert 1 <= num_kept < NUM_CHUNKS
    assert not (exp / "embeddings/test/trained.json").exists()
    with caplog.at_level(logging.INFO):
        extract.main(words(exp, data, "--nproc", str(3 - nproc)))
    assert f"{num_kept} of {NUM_CHUNKS} chunks are finished, kept" in caplog.text
    assert files(exp) == whole


def test_jobs_give_the_bits_of_one_process(make_exp, data, whole, caplog):
    exp = make_exp("jobs")
    torch.set_num_threads(2)  # as another host may have them
    with caplog.at_level(logging.INFO):
        extract.main(words(exp, data, "--job", "3/4"))
        extract.main(words(exp, data, "--job", "1/4", "--nproc", "2"))
    assert "trained: 4 of 5 chunks remain, of jobs 1, 2 and 4 of 4" in caplog.text
    assert "trained: 2 of 5 chunks remain, of jobs 2 and 4 of 4" in caplog.text
    extract.main(words(exp, data, "--job", "4/4"))
    made_at = [path.stat().st_mtime_ns for path in parts(exp)]
    extract.main(words(exp, data, "--job", "1/4"))  # once more: it keeps what it did
    assert [path.stat().st_mtime_ns for path in parts(exp)] == made_at
    extract.main(words(exp, data, "--job", "2/4"))
    assert files(exp) == whole
    extract.main(words(exp, data, "--job", "1/4"))
    assert files(exp) == whole


def test_the_first_job_waits_and_names_those_that_do_not_come(make_exp, data, whole, caplog):
    exp = make_exp("waits")
    with refuses(f"{exp}/embeddings/test/trained", "0.001", "3 of 5 chunks of jobs 2 and 3 of 3"):
        extract.main(words(exp, data, "--job", "1/3", "--wait-minutes", "0.001"))
    context = multiprocessing.get_context("fork")
    others = [
        context.Process(target=extract.main, args=[words(exp, data, "--job", f"{i}/3")])
        for i in (2, 3)
    ]
    for other in others:
        other.start()
    extract.main(words(exp, data, "--job", "1/3", "--wait-minutes", "1"))
    for other in others:
        other.join()
        assert other.exitcode == 0
    assert files(exp) == whole


def test_another_models_chunks_are_never_joined(make_exp, data):
    exp = make_exp("model")
    extract.main(words(exp, data, "--job", "1/2"))
    make_exp("model", "seed=1")
    extract.main(words(exp, data, "--job", "2/2"))
    assert len(parts(exp)) == NUM_CHUNKS
    assert not (exp / "embeddings/test/trained.json").exists()
    extract.main(words(exp, data, "--job", "1/2"))
    fresh = make_exp("fresh", "seed=1")
    extract.main(words(fresh, data))
    assert files(exp) == files(fresh)
    make_exp("model", "seed=0")  # a finished table of another model goes when the next begins
    extract.main(words(exp, data, "--job", "5/5"))
    assert not (exp / "embeddings/test/trained.json").exists()


def drop_first(part: Path) -> None:
    """A chunk without one of its utterances, whole otherwise."""
    table = EmbeddingTable.load(part.with_suffix(""))
    kept = (table.ids[1:], table.emb_ND[1:], table.model_sha256, table.facts)
    EmbeddingTable(*kept).save(part.with_suffix(""))


def test_harmed_chunks_are_done_again(make_exp, data, whole, caplog):
    exp = make_exp("harmed")
    for job in range(1, 5):
        extract.main(words(exp, data, "--job", f"{job}/5"))
    os.truncate(parts(exp)[0].with_suffix(".npy"), 200)
    os.truncate(parts(exp)[1].with_suffix(".ids"), 5)
    drop_first(parts(exp)[2])
    with caplog.at_level(logging.INFO):
        extract.main(words(exp, data))
    assert "1 of 5 chunks are finished, kept" in caplog.text
    assert files(exp) == whole


def test_a_killed_process_ends_the_command_in_one_line(make_exp, data):
    exp = make_exp("worker")

    def kill_one() -> None:
        wait_for(lambda: parts(exp))
        os.kill(children_of(os.getpid())[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with refuses("extract", "one of 2 processes was killed"):
        extract.main(words(exp, data, "--nproc", "2"))
    killer.join()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("nproc", [1, 2])
def test_audio_that_is_gone_is_named(make_exp, data, tmp_path, nproc):
    exp = make_exp("gone")
    wavs = {f"u{i}": tmp_path / f"u{i}.wav" for i in range(6)}
    for path in wavs.values():
        audio.write(path, np.full(16 * RATE, 1000, np.int16), RATE)
    write_data_dir(tmp_path / "test", wavs=wavs, speakers={u: u for u in wavs})
    check_data_dirs([tmp_path / "test"])
    (tmp_path / "u4.wav").unlink()
    with pytest.raises(FileNotFoundError, match=r"u4\.wav: "):
        extract.main(words(exp, tmp_path / "test", "--nproc", str(nproc)))


def test_at_most_so_many_of_a_speaker(make_exp, data, whole):
    exp = make_exp("few")
    extract.main(words(exp, data, "--per-speaker", "2"))
    table = EmbeddingTable.load(exp / "embeddings/test/trained")
    ids = sorted((f"u{i:02d}" for i in range(20)), key=stable_hash)
    of_speakers = [[name for name in ids if int(name[1:]) % 4 == s] for s in range(4)]
    assert sorted(table.ids) == sorted(name for group in of_speakers for name in group[:2])
    assert table.facts["per_speaker"] == 2
    extract.main(words(exp, data))  # all of them is another table
    assert files(exp) == whole


def test_score_extracts_what_it_is_asked_for(make_exp, data, caplog):
    exp = make_exp("cut")
    ids = [f"u{i:02d}" for i in range(20)]
    lines = [
        f"{a} {b} {'target' if i % 4 == j % 4 else 'nontarget'}\n"
        for i, a in enumerate(ids)
        for j, b in enumerate(ids[:i])
    ]
    (data / "trials").write_text("".join(lines))
    extract.main(words(exp, data))
    asked = ["--durations", "2", "full", "--codecs", "none", "gsm"]
    score.main(["--exp", str(exp), "--trials", str(data / "trials"), *asked])
    whole, cut, coded = (
        EmbeddingTable.load(exp / f"embeddings/test/trained{end}") for end in ("", "_2s", "_gsm")
    )
    for table in (cut, coded):
        assert whole.ids == table.ids and not np.allclose(whole.emb_ND, table.emb_ND)
    assert [table.facts.get("treatment") for table in (whole, cut, coded)] == [None, "2s", "gsm"]
    (row,) = json.loads((exp / "results.json").read_text())
    parts = {p["value"]: p["eer"] for p in row["conditions"]}
    assert parts["full"] == parts["none"] == row["eer"] and row["eer"] not in (
        parts["2 s"],
        parts["gsm"],
    )
    page = (exp / "report.html").read_text()
    assert all(word in page for word in ("duration of the test side", "2 s", "codec of", "gsm"))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        score.main(["--exp", str(exp), "--trials", str(data / "trials"), "--durations", "2"])
    assert caplog.text.count("already extracted") == 2
