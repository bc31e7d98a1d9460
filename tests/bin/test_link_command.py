"""`speakerlab link`: files, kept names, damaged results, refusals, exit codes, kills."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from models_on_disk import CALIBRATION
from refusals import refused, refuses
from tiny import names_in, read_json
from voices import RATE, make_wave

from speakerlab.bin import diarize, enroll, link
from speakerlab.checkpoints.model_files import read_card
from speakerlab.core.atomic import write_json, write_text
from speakerlab.data import audio
from speakerlab.diarization.regions import read_rttm
from speakerlab.experiments import linking
from speakerlab.inference.diarize import Diarization, Segment

DIM = 32  # of the tiny model
TABLES = ["identities.html", "identities.json", "identities.tsv"]


@pytest.fixture
def exp(make_exp) -> Path:
    return make_exp("exp", calibration=CALIBRATION)


@pytest.fixture
def results(exp, tmp_path) -> Path:
    """Ann (0) and Bob (1) in `a`, Bob and Carol (2) in `b`, nobody in `c`."""
    folder = tmp_path / "diarized"
    write_result(folder, exp, "a", [0, 1])
    write_result(folder, exp, "b", [1, 2])
    write_result(folder, exp, "c", [])
    return folder


def write_result(folder: Path, exp: Path, name: str, people: list[int]) -> None:
    """Write the result of a recording, in which each person speaks for 4 s."""
    rng = np.random.default_rng(len(name) + sum(name.encode()))
    segments: list[Segment] = []
    speakers: dict[str, np.ndarray] = {}
    for number, person in enumerate(people):
        speaker = f"speaker{number + 1}"
        segments.append(Segment(5.0 * number, 5.0 * number + 4, speaker, 1.0))
        noise_D = 0.05 * rng.standard_normal(DIM)
        speakers[speaker] = (np.eye(DIM)[person] + noise_D).astype("f4")
    diarization = Diarization(name, 5.0 * len(people), segments, speakers)
    facts = {"model_sha256": read_card(exp)["sha256"]}
    write_json(folder / f"{name}.json", {**diarization.to_dict(), **facts})
    write_text(folder / f"{name}.rttm", diarization.to_rttm())


def linked(exp: Path, *arguments: object) -> None:
    link.main([str(argument) for argument in (*arguments, "--model", exp)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_turns_get_the_names_of_people(exp, results, tmp_path, capsys, caplog):
    out = tmp_path / "linked"
    before = contents(results)
    with caplog.at_level("INFO"):
        linked(exp, results, "--out", out)
    assert contents(results) == before
    assert names_in(out) == [".linked", "a.rttm", "b.rttm", "c.rttm", *TABLES]
    # Three people are found: 2.5 % false alarms, between the rates of the calibration.
    facts = read_json(out / "identities.json")
    assert facts["far"] == pytest.approx(0.05 / 2)
    expected = 0.9999 + (0.4 - 0.9999) * np.log10(0.025 / 0.01)
    assert facts["threshold"] == pytest.approx(expected)
    assert f"threshold {expected:.4f}, calibrated, 2.5 % false alarms" in caplog.text

    turns_of = read_rttm(out)
    names = {name: [turn.speaker for turn in turns] for name, turns in turns_of.items()}
    assert names["a"] == ["identity1", "identity2"]
    bob = names["b"][0]
    assert bob == "identity2"
    assert names["b"][1] not in names["a"]
    assert names["c"] == []
    original = read_rttm(results)
    for name, turns in turns_of.items():
        assert [turn[:2] for turn in turns] == [turn[:2] for turn in original[name]]

    row = facts["identities"]["identity2"]
    assert row["num_recordings"] == 2
    assert row["seconds"] == 8.0
    assert [member["recording"] for member in row["members"]] == ["a", "b"]
    header, *lines = (out / "identities.tsv").read_text(encoding="utf-8").splitlines()
    assert header == "identity\trecording\tspeaker\tseconds\tcloseness"
    assert lines[0] == "identity1\ta\tspeaker1\t4.000\t-"
    assert lines[1].startswith("identity2\ta\tspeaker2\t4.000\t0.")
    assert len(lines) == 4
    assert "identity2: 2 recordings, 8.0 s" in capsys.readouterr().out
    page = (out / "identities.html").read_text(encoding="utf-8")
    assert "identity2" in page


def test_a_repeated_linking_does_nothing(exp, results, tmp_path, caplog):
    out = tmp_path / "linked"
    options = ("--out", out, "--threshold", 0.5)
    linked(exp, results, *options)
    before = contents(out)
    stamp = (out / "a.rttm").stat().st_mtime_ns
    with caplog.at_level("INFO"):
        linked(exp, results, *options)
    assert "already linked" in caplog.messages[-1]
    assert (out / "a.rttm").stat().st_mtime_ns == stamp
    linked(exp, results, *options, "--force")
    assert contents(out) == before


def test_new_recordings_keep_the_names(exp, results, tmp_path):
    out = tmp_path / "linked"
    options = ("--out", out, "--threshold", 0.5)
    linked(exp, results, *options)
    before = contents(out)
    # It comes before the others in order; Carol was the third person.
    write_result(results, exp, "0", [3, 2])
    linked(exp, results, *options)
    turns_of = read_rttm(out)
    assert [turn.speaker for turn in turns_of["0"]] == ["identity4", "identity3"]
    for name in ("a.rttm", "b.rttm"):
        assert (out / name).read_bytes() == before[name]
    # A recording that is gone leaves no turns behind.
    for path in results.glob("a.*"):
        path.unlink()
    linked(exp, results, *options)
    assert not (out / "a.rttm").exists()
    assert (out / "b.rttm").read_bytes() == before["b.rttm"]


def test_a_run_that_dies_leaves_the_earlier_result(exp, results, tmp_path, monkeypatch):
    out = tmp_path / "linked"
    linked(exp, results, "--out", out, "--threshold", 0.5)
    before = contents(out)
    write_result(results, exp, "0", [3])

    def die(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(linking, "write_page", die)
        with pytest.raises(KeyboardInterrupt):
            linked(exp, results, "--out", out, "--threshold", 0.5)
    assert contents(out) == before
    linked(exp, results, "--out", out, "--threshold", 0.5)
    assert (out / "0.rttm").exists()
    assert names_in(tmp_path) == [".linked.lock", "diarized", "exp", "linked"]


KILLED = """
import os, signal, sys
from speakerlab.bin import link
from speakerlab.experiments import linking
linking.write_page = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
link.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_kill_while_writing_leaves_the_earlier_result(
    environment, exp, results, tmp_path
):
    # Beside the results, which the next run reads.
    out = results / "linked"
    options = ["--out", out, "--threshold", 0.5]
    linked(exp, results, *options)
    before = contents(out)
    write_result(results, exp, "0", [3])

    arguments = [str(argument) for argument in (results, *options, "--model", exp)]
    command = [sys.executable, "-c", KILLED, *arguments]
    killed = subprocess.run(command, env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(results.glob(".linked.*/new/a.rttm"))
    assert contents(out) == before

    # The lock of the killed process is free, and what it has left is no result.
    linked(exp, results, *options)
    names = read_rttm(out)
    assert sorted(names) == ["0", "a", "b", "c"]
    assert names["0"][0].speaker == "identity4"
    assert (out / "a.rttm").read_bytes() == before["a.rttm"]


HOLDER = """
import sys
from pathlib import Path
from speakerlab.core.atomic import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_of_two_runs_at_once_the_second_waits(
    environment, exp, results, tmp_path, monkeypatch, caplog
):
    out = tmp_path / "linked"
    second = tmp_path / "second"
    write_result(second, exp, "d", [3])
    options = ("--out", out, "--threshold", 0.5)
    caplog.set_level("INFO")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / ".linked.lock")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waiting = threading.Thread(target=linked, args=(exp, second, *options))
        waiting.start()
        deadline = time.monotonic() + 30
        while "locked by another process" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not out.exists()
        # What the first of the two writes while it has the lock.
        monkeypatch.setattr(link, "locked", lambda _: nullcontext())
        linked(exp, results, *options)
        holder.communicate()
    waiting.join(30)
    # Three people have numbers already.
    assert list(read_json(out / "identities.json")["identities"]) == ["identity4"]


def test_the_second_of_two_equal_runs_has_nothing_to_do(
    exp, results, tmp_path, monkeypatch, caplog
):
    out = tmp_path / "linked"
    options = ("--out", out, "--threshold", 0.5)

    def wait(_lock: Path):
        with monkeypatch.context() as patch:
            patch.setattr(link, "locked", lambda _: nullcontext())
            linked(exp, results, *options)
        return nullcontext()

    caplog.set_level("INFO")
    with monkeypatch.context() as patch:
        patch.setattr(link, "locked", wait)
        linked(exp, results, *options)
    assert "already linked" in caplog.messages[-1]


def test_several_folders_are_linked(exp, results, tmp_path):
    second = tmp_path / "second"
    write_result(second, exp, "d", [0])
    linked(exp, results, second, "--out", tmp_path / "out", "--threshold", 0.5)
    turns_of = read_rttm(tmp_path / "out")
    assert turns_of["d"][0].speaker == turns_of["a"][0].speaker


def test_results_are_in_subfolders_and_beside_what_is_written(exp, results, tmp_path):
    # As `diarize` writes recordings of one name.
    write_result(results, exp, "x/e", [0])
    write_result(results, exp, "y/e", [1])
    out = results / "linked"
    linked(exp, results, "--out", out, "--threshold", 0.5)
    linked(exp, results, "--out", out, "--threshold", 0.6)
    (first,) = read_rttm(out / "x/e.rttm")["x/e"]
    (second,) = read_rttm(out / "y/e.rttm")["y/e"]
    assert first.speaker == read_rttm(out)["a"][0].speaker
    assert second.speaker == read_rttm(out)["b"][0].speaker


def test_one_recording_in_two_folders_is_refused(exp, results, tmp_path):
    second = tmp_path / "second"
    write_result(second, exp, "a", [0])
    with refuses(second / "a.json", results / "a.json"):
        linked(exp, results, second, "--out", tmp_path / "out", "--threshold", 0.5)
    # Under another name, too.
    for ending in (".json", ".rttm"):
        (second / f"a{ending}").rename(second / f"z{ending}")
    with refuses(second / "z.json", "recording a", results / "a.json"):
        linked(exp, results, second, "--out", tmp_path / "out", "--threshold", 0.5)
    assert not (tmp_path / "out").exists()


def test_damaged_results_are_reported_and_the_others_linked(
    exp, results, tmp_path, monkeypatch, capsys
):
    write_text(results / "b.json", "{")
    codes: list[int] = []
    # It ends the process.
    monkeypatch.setattr(link.process, "leave", codes.append)
    monkeypatch.setattr(link.done, "record", lambda *_, **__: None)
    out = tmp_path / "out"
    linked(exp, results, "--out", out, "--threshold", 0.5)
    assert codes == [1]
    assert refused(capsys.readouterr().err, str(results / "b.json"))
    assert names_in(out) == ["a.rttm", "c.rttm", *TABLES]
    # Nothing is left to link.
    for name in ("a", "c"):
        write_text(results / f"{name}.json", "[]")
    with refuses(results, "no result"):
        linked(exp, results, "--out", out, "--threshold", 0.5)


def test_embeddings_of_other_dimensions_are_refused(exp, results, tmp_path):
    facts = read_json(results / "b.json")
    facts["speakers"]["speaker1"]["embedding"] = [1.0, 2.0]
    write_json(results / "b.json", facts)
    with refuses("b: speaker1", "2 dimensions", DIM):
        linked(exp, results, "--out", tmp_path / "out", "--threshold", 0.5)


def test_another_model_is_refused(exp, results, tmp_path, make_exp):
    other = make_exp("other", "seed=2", calibration=CALIBRATION)
    with refuses(results / "a.json", read_card(exp)["sha256"][:12]):
        linked(other, results, "--out", tmp_path / "out")


def test_numbers_go_on_after_a_change_of_the_model(exp, tmp_path, make_exp, caplog):
    out = tmp_path / "out"
    other = make_exp("other", "seed=2", calibration=CALIBRATION)
    for model, people in ((exp, [0, 1]), (other, [2])):
        folder = tmp_path / model.name
        write_result(folder / "results", model, "a", people)
        linked(model, folder / "results", "--out", out, "--threshold", 0.5)
    assert "of another model" in caplog.text
    assert list(read_json(out / "identities.json")["identities"]) == ["identity3"]


def test_without_a_calibration_a_threshold_or_a_number_is_needed(
    make_exp, results, tmp_path
):
    uncalibrated = make_exp("uncalibrated")
    out = tmp_path / "out"
    with refuses(uncalibrated, "speakerlab calibrate", "--threshold"):
        linked(uncalibrated, results, "--out", out)
    linked(uncalibrated, results, "--out", out, "--speakers", 3)
    assert len(read_json(out / "identities.json")["identities"]) == 3
    # Kept are the names, and the threshold is the user's.
    linked(uncalibrated, results, "--out", out, "--threshold", 0.5)


def test_the_rate_is_the_user_s(exp, results, tmp_path):
    linked(exp, results, "--out", tmp_path / "out", "--far", 0.1)
    written = read_json(tmp_path / "out/identities.json")
    assert (written["threshold"], written["far"]) == (0.4, 0.1)
    assert written["threshold_from"] == "calibrated, 10 % false alarms"
    with refuses("calibration", 0.2):
        linked(exp, results, "--out", tmp_path / "out", "--far", 0.2)


def test_wrong_places_are_refused(exp, results, tmp_path):
    options = ("--threshold", 0.5)
    for out in (results, tmp_path):
        with refuses("--out", out):
            linked(exp, results, "--out", out, *options)
    other = tmp_path / "other"
    write_text(other / "notes.txt", "mine")
    with refuses("--out", other, "speakerlab link"):
        linked(exp, results, "--out", other, *options)
    assert (other / "notes.txt").exists()
    with refuses(other, "no results"):
        linked(exp, other, "--out", tmp_path / "out", *options)
    with refuses(tmp_path / "missing", "does not exist"):
        linked(exp, tmp_path / "missing", "--out", tmp_path / "out", *options)
    with refuses(other / "notes.txt", "is a file"):
        linked(exp, other / "notes.txt", "--out", tmp_path / "out", *options)


def test_other_json_files_are_no_results(exp, results, tmp_path):
    options = ("--threshold", 0.5)
    write_json(results / "a.words.json", {"segments": []})
    # Another linking, and what one that was killed has left.
    linked(exp, results, "--out", results / "first", *options)
    for name in ("a.rttm", "identities.json"):
        content = (results / "first" / name).read_text(encoding="utf-8")
        write_text(results / ".first.x1" / "new" / name, content)
    write_result(results / ".snapshot", exp, "a", [0])
    linked(exp, results, "--out", tmp_path / "out", *options)
    assert sorted(read_rttm(tmp_path / "out")) == ["a", "b", "c"]
    # A recording may have any name.
    write_result(results, exp, "identities", [1])
    linked(exp, results, "--out", tmp_path / "out", *options)
    assert "identities" in read_rttm(tmp_path / "out")


def test_a_damaged_earlier_result_is_refused(exp, results, tmp_path):
    out = tmp_path / "out"
    linked(exp, results, "--out", out, "--threshold", 0.5)
    write_text(out / "identities.json", "{")
    with refuses(out / "identities.json", "remove"):
        linked(exp, results, "--out", out, "--threshold", 0.6)


def test_recordings_of_an_enrolled_voice(exp, tmp_path):
    for name, speaker in (("one", 0), ("two", 0), ("ann", 0)):
        wave_S = make_wave(speaker, len(name), 6)
        audio.write(tmp_path / f"{name}.wav", wave_S, RATE)
    base = ["--model", str(exp), "--device", "cpu"]
    known = tmp_path / "speakers.safetensors"
    speech = str(tmp_path / "ann.wav")
    enroll.main(["Ann B", speech, "--speakers", str(known), *base])
    recordings = [str(tmp_path / "one.wav"), str(tmp_path / "two.wav")]
    options = ["--speakers", "1", "--out", str(tmp_path / "diarized")]
    diarize.main([*recordings, *options, *base])
    out = tmp_path / "out"
    options = ("--out", out, "--known", known, "--threshold", 0.5)
    linked(exp, tmp_path / "diarized", *options)
    assert list(read_json(out / "identities.json")["identities"]) == ["Ann_B"]
    # The page leads to those of the recordings.
    page = (out / "identities.html").read_text(encoding="utf-8")
    assert 'href="../diarized/one.html"' in page
