"""`speakerlab diarize`: files written, regions read, broken recordings, exit codes, kills."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models_on_disk import CALIBRATION
from refusals import refused, refuses
from toy_segmentation import write_segmentation
from voices import RATE, make_wave, write_voices

from speakerlab.bin import calibrate, diarize, enroll
from speakerlab.core.atomic import write_json
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir
from speakerlab.diarization.regions import Turn, read_rttm, write_rttm, write_uem


@pytest.fixture
def exp(make_exp) -> Path:
    return make_exp("exp")


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """6 s of one voice, 2 s of silence, 6 s of another."""
    quiet = np.zeros(2 * RATE, dtype=np.int16)
    path = tmp_path / "talk.flac"
    audio.write(path, np.concatenate([make_wave(0, 0, 6), quiet, make_wave(4, 0, 6)]), RATE)
    return path


def diarized(exp: Path, *words: object) -> None:
    diarize.main([*map(str, words), "--model", str(exp), "--device", "cpu"])


def test_rttm_and_json_are_written(exp, talk, tmp_path):
    diarized(exp, talk, "--speakers", 1, "--out", tmp_path / "out")
    turns = read_rttm(tmp_path / "out/talk.rttm")["talk"]
    np.testing.assert_allclose([turn[:2] for turn in turns], [(0, 6), (8, 14)], atol=0.1)
    values = json.loads((tmp_path / "out/talk.json").read_text())
    assert values["recording"] == "talk" and values["method"] == "spectral"
    assert len(values["model_sha256"]) == 64
    segments = [(s["start"], s["end"], s["speaker"], s["confidence"]) for s in values["segments"]]
    assert segments == [(*turn, 1.0) for turn in turns]
    assert len(values["speakers"]["speaker1"]["embedding"]) == 16
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("talk.rttm", "talk.json", "talk.html")
    }


def test_overlapping_turns(exp, tmp_path):
    wave_S = np.zeros(12 * RATE, dtype=np.int16)  # one voice, both from 5 to 7 s, another
    wave_S[: 7 * RATE] = make_wave(0, 0, 7)
    wave_S[5 * RATE :] += make_wave(4, 0, 7)
    audio.write(tmp_path / "both.wav", wave_S, RATE)
    segmentation = write_segmentation(tmp_path / "segmentation.onnx")
    out = tmp_path / "out"
    words = ["--speakers", 2, "--overlap", segmentation, "--out", out]
    diarized(exp, tmp_path / "both.wav", *words)
    turns = read_rttm(out / "both.rttm")["both"]
    for time, count in ((0.1, 1), (4.9, 1), (5.1, 2), (6.9, 2), (7.1, 1), (11.9, 1)):
        assert len({turn.speaker for turn in turns if turn.start <= time < turn.end}) == count
    segments = json.loads((out / "both.json").read_text())["segments"]
    assert [(s["start"], s["end"], s["speaker"]) for s in segments] == turns
    assert (out / "both.html").read_text().count("data-start=") == len(turns)
    wrong = tmp_path / "both.wav"
    with refuses(str(wrong), "ONNX"):
        diarized(exp, wrong, "--overlap", wrong)


def test_known_speakers_get_their_names(make_exp, talk, tmp_path, capsys, caplog):
    exp = make_exp("exp", calibration=CALIBRATION)
    team = tmp_path / "team.safetensors"
    enroll.main(["ann lee", str(talk), "--model", str(exp), "--speakers", str(team)])
    out = tmp_path / "out"
    with caplog.at_level("INFO"):
        diarized(exp, talk, "--speakers", 1, "--known", team, "--out", out)
    line = next(line for line in caplog.messages if "ann lee is known" in line)
    assert line.startswith("talk: ann lee is known, score 0.9") and "threshold 0.5000" in line
    assert {turn.speaker for turn in read_rttm(out / "talk.rttm")["talk"]} == {"ann_lee"}
    values = json.loads((out / "talk.json").read_text())
    assert {segment["speaker"] for segment in values["segments"]} == {"ann lee"}
    match = values["speakers"]["ann lee"]["match"]
    assert (match["name"], match["threshold"], match["is_known"]) == ("ann lee", 0.5, True)
    with caplog.at_level("INFO"):
        diarized(exp, talk, "--speakers", 1, "--known", team, "--far", 0.01)
    assert "speaker1 is unknown, nearest ann lee" in caplog.messages[-1]
    assert {line.split()[7] for line in capsys.readouterr().out.splitlines()} == {"speaker1"}


def test_the_page_plays_the_audio_or_links_to_it(exp, talk, tmp_path, monkeypatch):
    other = talk.rename(tmp_path / "a b#1.flac")
    out = tmp_path / "out"
    diarized(exp, other, "--speakers", 1, "--out", out)
    page = (out / "a_b#1.html").read_text()
    assert 'src="data:audio/mpeg;base64,' in page and "http:" not in page
    monkeypatch.setattr(diarize, "EMBEDDED_SECONDS", 13)
    diarized(exp, other, "--speakers", 1, "--out", out)
    page = (out / "a_b#1.html").read_text()
    assert 'src="../a%20b%231.flac"' in page and "data:audio" not in page


def test_without_calibration_nobody_is_known(exp, talk, tmp_path):
    team = tmp_path / "team.safetensors"
    with refuses(str(team), "no such file", error=FileNotFoundError):
        diarized(exp, talk, "--known", team)
    enroll.main(["ann", str(talk), "--model", str(exp), "--speakers", str(team)])
    with refuses("known", "calibrat"):
        diarized(exp, talk, "--known", team)


@pytest.mark.parametrize("name", ["speech.rttm", "speech.lab", "rttms/talk.rttm", "labs/talk.lab"])
def test_regions_from_a_file_or_a_folder(exp, talk, tmp_path, capsys, name):
    lines = {".rttm": "SPEAKER talk 1 1.0 2.5 <NA> <NA> x <NA> <NA>\n", ".lab": "1.0 3.5 speech\n"}
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(lines[path.suffix])
    given = path if path.parent == tmp_path else path.parent
    diarized(exp, talk, "--vad", given, "--speakers", 1)
    line = "SPEAKER talk 1 1.000 2.500 <NA> <NA> speaker1 <NA> <NA>\n"
    assert capsys.readouterr().out == line


def test_ahc_and_vbx(exp, talk, tmp_path, capsys):
    diarized(exp, talk, "--method", "ahc", "--threshold", -1)
    assert {line.split()[7] for line in capsys.readouterr().out.splitlines()} == {"speaker1"}
    folder = write_voices(tmp_path / "dev", speakers=range(2), seconds=(3.2, 6.1))
    with refuses("plda", 12, 16):  # windows and dimensions
        diarized(exp, talk, "--method", "vbx", "--development", folder)


def test_the_default_threshold_is_reported(exp, talk, capsys, caplog):
    diarized(exp, talk, "--method", "ahc", "--threshold", 0.4)
    with_threshold = capsys.readouterr().out
    assert "clustering" not in caplog.text
    caplog.set_level("INFO")
    diarized(exp, talk, "--method", "ahc")
    assert "clustering: ahc, threshold 0.4, the default; `speakerlab calibrate" in caplog.text
    assert capsys.readouterr().out == with_threshold
    diarized(exp, talk)
    assert "clustering: spectral, the default; `speakerlab calibrate" in caplog.text


def test_a_calibration_is_stored_with_the_model_and_used(make_exp, talk, tmp_path, caplog, capsys):
    exp, folder = make_exp("exp", calibration=CALIBRATION), tmp_path / "dev"
    write_data_dir(folder, wavs={"talk": talk})
    check_data_dirs([folder])
    turns = [Turn(0.0, 6.0, "ann"), Turn(8.0, 14.0, "bob")]
    write_rttm(folder / "ref.rttm", {"talk": turns})
    words = ["--for", "diarization", "--data", str(folder)]
    calibrate.main([*words, "--model", str(exp), "--out", str(tmp_path / "copy")])
    assert not (exp / "model/diarization.json").exists()
    copy = tmp_path / "copy/model"
    stored = json.loads((copy / "diarization.json").read_text())
    assert stored["source"] == "dev: 1 recordings" and (copy / "calibration.json").exists()
    shown = f"ahc, threshold {stored['threshold']:g}: DER {100 * stored['der']['ahc']:.2f} %"
    assert shown in capsys.readouterr().out
    with refuses(str(copy / "diarization.json"), "--force"):
        calibrate.main([*words, "--model", str(copy)])
    write_uem(folder / "ref.uem", {"talk": [(0.0, 6.0)]})
    calibrate.main([*words, "--model", str(copy), "--force"])
    scored = json.loads((copy / "diarization.json").read_text())
    assert max(scored["der"].values()) < 0.05  # where one speaks
    write_json(copy / "diarization.json", {**stored, "method": "ahc", "threshold": 0.15})
    caplog.set_level("INFO")
    diarized(copy, talk, "--out", tmp_path / "out")
    line = "clustering: ahc, threshold 0.15, calibrated on dev: 1 recordings"
    assert line in caplog.text
    assert json.loads((tmp_path / "out/talk.json").read_text())["method"] == "ahc"
    write_json(copy / "diarization.json", {"method": "sum"})
    with refuses(str(copy / "diarization.json"), "'ahc' or 'spectral'"):
        diarized(copy, talk)
    (folder / "ref.rttm").unlink()
    with pytest.raises(FileNotFoundError, match="ref.rttm"):
        calibrate.main([*words, "--model", str(exp)])


def test_broken_recordings_do_not_stop_the_others(run, exp, talk, tmp_path):
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("no audio")
    audio.write(tmp_path / "quiet.wav", np.zeros(RATE, dtype=np.int16), RATE)
    names = ("empty.wav", "text.wav", "missing.wav", "quiet.wav", "talk.flac")
    files = [tmp_path / name for name in names]
    out = tmp_path / "out"
    done = run("-m", "speakerlab", "diarize", *files, "--model", exp, "--out", out, code=1)
    for path in files[:3]:
        assert refused(done.stderr, str(path)), done.stderr
    assert (out / "quiet.rttm").read_text() == ""
    assert json.loads((out / "quiet.json").read_text())["segments"] == []
    assert (out / "talk.rttm").exists() and len(list(out.iterdir())) == 6


@pytest.mark.parametrize(
    ("words", "subject", "value"),
    [
        (["--vad", "webrtc"], "--vad", "webrtc"),
        (["--vad", "speech.rttm"], "--vad", "talk"),
        (["--vad", "broken.rttm"], "broken.rttm:1", -1),
        (["other.flac", "--vad", "speech.lab"], "--vad", 2),
    ],
)
def test_refusals(exp, talk, tmp_path, monkeypatch, words, subject, value):
    monkeypatch.chdir(tmp_path)
    Path("speech.rttm").write_text("SPEAKER else 1 0 1 <NA> <NA> x <NA> <NA>\n")
    Path("broken.rttm").write_text("SPEAKER talk 1 0 -1 <NA> <NA> x <NA> <NA>\n")
    with refuses(subject, value):
        diarized(exp, talk, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["--speakers", "2", "--max-speakers", "3"],
        ["--method", "vbx"],
        ["--development", "data"],
        ["--threshold", "0.5"],
        ["--speakers", "0"],
        ["--far", "0.01"],
    ],
)
def test_options_that_do_not_fit(exp, words, capsys):
    with pytest.raises(SystemExit):
        diarized(exp, "talk.wav", *words)
    assert words[0] in capsys.readouterr().err


KILLED = """
import os, signal, sys
from pathlib import Path
from speakerlab.bin import diarize
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
diarize.main(sys.argv[1:])
"""


def test_a_kill_while_writing_leaves_the_old_files(environment, exp, talk, tmp_path):
    out = tmp_path / "out"
    words = [talk, "--out", out, "--model", exp, "--device", "cpu", "--speakers"]
    diarized(exp, *words[:3], "--speakers", 1)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, words), "2"], env=environment, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    partial = files.keys() - before.keys()
    assert len(partial) == 1 and partial.pop().startswith(".talk.json.")
    assert {name: files[name] for name in before} == before
