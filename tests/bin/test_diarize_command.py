"""`speakerlab diarize`: files written, regions read, broken recordings, exit codes, kills."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from models_on_disk import CALIBRATION
from refusals import refused, refuses
from tiny import names_in, read_json
from toy_segmentation import write_segmentation
from voices import RATE, make_noise, make_wave, write_voices

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
    first_S = make_wave(0, 0, 6)
    quiet_S = np.zeros(2 * RATE, dtype=np.int16)
    second_S = make_wave(4, 0, 6)
    path = tmp_path / "talk.flac"
    audio.write(path, np.concatenate([first_S, quiet_S, second_S]), RATE)
    return path


def speakers_of(rttm: str) -> set[str]:
    """Return the speakers of the lines of an RTTM, in their eighth column."""
    return {line.split()[7] for line in rttm.splitlines()}


def diarized(exp: Path, *arguments: object) -> None:
    options = ("--model", exp, "--device", "cpu")
    diarize.main([str(argument) for argument in (*arguments, *options)])


def test_rttm_and_json_are_written(exp, talk, tmp_path):
    out = tmp_path / "out"
    diarized(exp, talk, "--speakers", 1, "--out", out)
    assert names_in(out) == [".lock", "talk.html", "talk.json", "talk.rttm"]

    turns = read_rttm(out / "talk.rttm")["talk"]
    first, second = turns
    assert first[:2] == pytest.approx((0, 6), rel=0, abs=0.1)
    assert second[:2] == pytest.approx((8, 14), rel=0, abs=0.1)

    values = read_json(out / "talk.json")
    assert values["recording"] == "talk"
    assert values["method"] == "spectral"
    assert len(values["model_sha256"]) == 64
    speaker = values["speakers"]["speaker1"]
    assert len(speaker["embedding"]) == 16
    assert len(values["segments"]) == len(turns)
    for segment, turn in zip(values["segments"], turns):
        assert segment["start"] == turn.start
        assert segment["end"] == turn.end
        assert segment["speaker"] == turn.speaker
        assert segment["confidence"] == 1.0


def test_turns_that_were_corrected_by_hand_are_kept(exp, talk, tmp_path, caplog):
    out = tmp_path / "out"
    rttm = out / "talk.rttm"
    diarized(exp, talk, "--out", out, "--speakers", 1)
    corrected = rttm.read_text().replace("speaker1", "Ann")
    rttm.write_text(corrected)
    diarized(exp, talk, "--out", out, "--speakers", 1)
    assert rttm.read_text() == corrected
    assert "was changed after the diarization" in caplog.text

    # Other options write other turns, and the corrected ones remain beside them.
    for option in (["--speakers", 2], ["--speakers", 2, "--force"]):
        diarized(exp, talk, "--out", out, *option)
        assert speakers_of(rttm.read_text()) == {"speaker1", "speaker2"}
        assert (out / "talk.rttm.bak").read_text() == corrected


def test_words_of_a_transcript_get_speakers(exp, talk, tmp_path, monkeypatch):
    out = tmp_path / "out"
    path = tmp_path / "asr.srt"
    path.write_text("1\n00:00:01,000 --> 00:00:02,000\nHello\n")
    options = ("--speakers", 1, "--words", path, "--out", out)
    diarized(exp, talk, *options)
    text = (out / "talk.words.srt").read_text(encoding="utf-8")
    assert text.splitlines()[2] == "speaker1: Hello"
    # Also of a recording that is diarized already.
    path.write_text("1\n00:00:04,500 --> 00:00:05,000\nAgain\n")
    diarized(exp, talk, *options)
    text = (out / "talk.words.srt").read_text(encoding="utf-8")
    assert text.splitlines()[2] == "speaker1: Again"
    # The turns of an earlier run are not those of a recording that cannot be read now.
    (out / "talk.words.srt").unlink()
    talk.write_bytes(b"damaged")
    codes: list[int] = []
    # It ends the process.
    monkeypatch.setattr(diarize.process, "leave", codes.append)
    diarized(exp, talk, *options)
    assert codes == [1]
    assert not (out / "talk.words.srt").exists()


def test_a_recording_without_speech_has_words_of_nobody(exp, tmp_path):
    audio.write(tmp_path / "a.wav", np.zeros(2 * RATE, dtype=np.int16), RATE)
    path = tmp_path / "a.srt"
    path.write_text("1\n00:00:00,500 --> 00:00:01,000\nHello\n")
    diarized(exp, tmp_path / "a.wav", "--words", path, "--out", tmp_path / "out")
    text = (tmp_path / "out" / "a.words.srt").read_text(encoding="utf-8")
    assert text.splitlines()[2] == "Hello"


def test_a_wrong_transcript_is_refused_before_the_work(exp, talk, tmp_path):
    path = tmp_path / "asr.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no list `segments`"):
        diarized(exp, talk, "--words", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["n" * 251, "录" * 83])
def test_the_files_of_a_long_name_have_a_shorter_one(exp, talk, tmp_path, name, caplog):
    out = tmp_path / "out"
    long = tmp_path / f"{name}.wav"
    talk.rename(long)
    with caplog.at_level("INFO"):
        diarized(exp, long, "--speakers", 1, "--out", out)
        (rttm,) = out.glob("*.rttm")
        assert len(list(out.glob(f"{name[:40]}~*"))) == 3
        assert list(read_rttm(rttm)) == [name]
        diarized(exp, long, "--speakers", 1, "--out", out)
    assert "1 of 1 recording diarized already" in caplog.messages[-1]


def test_overlapping_turns(exp, tmp_path):
    # One voice, both from 5 to 7 s, another one.
    wave_S = np.zeros(12 * RATE, dtype=np.int16)
    wave_S[: 7 * RATE] = make_wave(0, 0, 7)
    wave_S[5 * RATE :] += make_wave(4, 0, 7)
    path = tmp_path / "both.wav"
    audio.write(path, wave_S, RATE)
    audio.write(tmp_path / "both.wav", wave_S, RATE)
    segmentation = write_segmentation(tmp_path / "segmentation.onnx")
    out = tmp_path / "out"
    options = ["--speakers", 2, "--overlap", segmentation]
    diarized(exp, path, *options, "--out", out)

    turns = read_rttm(out / "both.rttm")["both"]
    for seconds in (0.1, 4.9, 5.1, 6.9, 7.1, 11.9):
        speakers = set()
        for turn in turns:
            if turn.start <= seconds < turn.end:
                speakers.add(turn.speaker)
        is_overlap = 5 < seconds < 7
        assert len(speakers) == (2 if is_overlap else 1)

    segments = read_json(out / "both.json")["segments"]
    assert len(segments) == len(turns)
    for segment, turn in zip(segments, turns):
        assert segment["start"] == turn.start
        assert segment["end"] == turn.end
        assert segment["speaker"] == turn.speaker
    page = (out / "both.html").read_text()
    assert page.count("data-start=") == len(turns)

    # A recording is not a segmentation model.
    with refuses(str(path), "ONNX"):
        diarized(exp, path, "--overlap", path)


def test_known_speakers_get_their_names(make_exp, talk, tmp_path, capsys, caplog):
    exp = make_exp("exp", calibration=CALIBRATION)
    team = tmp_path / "team.safetensors"
    arguments = ["--model", str(exp), "--speakers", str(team)]
    enroll.main(["ann lee", str(talk), *arguments])
    out = tmp_path / "out"
    one_speaker = ("--speakers", 1, "--known", team)
    with caplog.at_level("INFO"):
        diarized(exp, talk, *one_speaker, "--out", out)
    (line,) = [line for line in caplog.messages if "ann lee is known" in line]
    assert line.startswith("talk: ann lee is known, score 0.9")
    assert "threshold 0.5000" in line
    # A name in an RTTM has no blanks.
    rttm = (out / "talk.rttm").read_text()
    assert speakers_of(rttm) == {"ann_lee"}
    values = read_json(out / "talk.json")
    names = {segment["speaker"] for segment in values["segments"]}
    assert names == {"ann lee"}
    match = values["speakers"]["ann lee"]["match"]
    assert match["name"] == "ann lee"
    assert match["threshold"] == 0.5
    assert match["is_known"] is True

    # A lower rate of false acceptances needs a higher threshold.
    with caplog.at_level("INFO"):
        diarized(exp, talk, *one_speaker, "--far", 0.01)
    assert "speaker1 is unknown, nearest ann lee" in caplog.messages[-1]
    assert speakers_of(capsys.readouterr().out) == {"speaker1"}


def test_folders_of_recordings(exp, talk, tmp_path, capsys, caplog):
    calls = tmp_path / "calls"
    later = calls / "later"
    later.mkdir(parents=True)
    (calls / "notes.txt").write_text("no recording")
    recording = talk.read_bytes()
    (calls / "one.flac").write_bytes(recording)
    (later / "two.flac").write_bytes(recording)
    out = tmp_path / "out"
    with caplog.at_level("INFO"):
        diarized(exp, calls, talk, "--speakers", 1, "--out", out)
    rttms = [path.stem for path in out.glob("*.rttm")]
    assert sorted(rttms) == ["one", "talk", "two"]
    assert "1 (1 .txt)" in caplog.text

    # Two recordings of the same name are named by their folders, too.
    (later / "two.flac").rename(later / "one.flac")
    diarized(exp, calls, "--speakers", 1, "--out", out)
    (turn, _) = read_rttm(out / "later/one.rttm")["later/one"]
    assert turn.start == pytest.approx(0, abs=0.1)

    empty = tmp_path / "empty"
    empty.mkdir()
    with refuses(str(empty), "empty"):
        diarized(exp, empty)


def test_noise_has_no_turns_but_in_given_regions(exp, tmp_path, caplog):
    noise = tmp_path / "noise.wav"
    soundfile.write(noise, make_noise(5.0)[0].numpy(), RATE)
    out = tmp_path / "out"
    diarized(exp, noise, "--out", out)
    assert (out / "noise.rttm").read_text() == ""
    assert f"{noise}: is white noise" in caplog.text
    regions = tmp_path / "noise.lab"
    regions.write_text("1.0 3.0 speech\n")
    diarized(exp, noise, "--out", out, "--vad", regions)
    ((start, end, _),) = read_rttm(out / "noise.rttm")["noise"]
    assert (start, end) == (1.0, 3.0)


def test_the_page_plays_the_audio_or_links_to_it(exp, talk, tmp_path, monkeypatch):
    other = talk.rename(tmp_path / "a b#1.flac")
    out = tmp_path / "out"
    diarized(exp, other, "--speakers", 1, "--out", out)
    page = (out / "a_b#1.html").read_text()
    assert 'src="data:audio/mpeg;base64,' in page
    assert "http:" not in page
    # The audio is longer than 13 s: the page links to it.
    monkeypatch.setattr(diarize, "EMBEDDED_SECONDS", 13)
    diarized(exp, other, "--speakers", 1, "--out", out, "--force")
    page = (out / "a_b#1.html").read_text()
    assert 'src="../a%20b%231.flac"' in page
    assert "data:audio" not in page


def test_channels_of_a_call(exp, tmp_path, capsys, caplog):
    turn_S = make_wave(0, 0, 3)
    other_S = make_wave(4, 0, 3)
    wave_SC = np.zeros((7 * RATE, 2), dtype=np.int16)
    wave_SC[: 3 * RATE, 0] = turn_S
    wave_SC[4 * RATE :, 1] = other_S
    path = tmp_path / "call.flac"
    audio.write(path, wave_SC, RATE)
    out = tmp_path / "out"

    # By default the first channel, with a line; the page reads the recording again without one.
    diarized(exp, path, "--speakers", 1, "--out", out)
    lines = [line for line in caplog.messages if "channel" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{path}: has 2 channels")
    (turn,) = read_rttm(out / "call.rttm")["call"]
    assert turn[:2] == pytest.approx((0, 3), rel=0, abs=0.1)

    # Another channel is another result, not one that is there already.
    caplog.clear()
    for channel, count in (("2", 1), ("mix", 2), ("each", 2)):
        diarized(exp, path, "--speakers", 1, "--out", out, "--channel", channel)
        turns = read_rttm(out / "call.rttm")["call"]
        assert len(turns) == count
        assert turns[-1][:2] == pytest.approx((4, 7), rel=0, abs=0.1)
    assert caplog.messages == []
    names = [turn.speaker for turn in turns]
    assert names == ["channel1", "channel2"]
    page = (out / "call.html").read_text()
    assert "channel2" in page

    for value in ("0", "left"):
        with pytest.raises(SystemExit):
            diarized(exp, path, "--channel", value)
        assert value in capsys.readouterr().err


def test_without_calibration_nobody_is_known(exp, talk, tmp_path):
    team = tmp_path / "team.safetensors"
    with refuses(str(team), "no such file", error=FileNotFoundError):
        diarized(exp, talk, "--known", team)
    arguments = ["--model", str(exp), "--speakers", str(team)]
    enroll.main(["ann", str(talk), *arguments])
    with refuses("known", "calibrat"):
        diarized(exp, talk, "--known", team)


REGIONS = ["speech.rttm", "speech.lab", "rttms/talk.rttm", "labs/talk.lab"]


@pytest.mark.parametrize("name", REGIONS)
def test_regions_from_a_file_or_a_folder(exp, talk, tmp_path, capsys, name):
    lines = {
        ".rttm": "SPEAKER talk 1 1.0 2.5 <NA> <NA> x <NA> <NA>\n",
        ".lab": "1.0 3.5 speech\n",
    }
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(lines[path.suffix])
    is_file = path.parent == tmp_path
    given = path if is_file else path.parent
    diarized(exp, talk, "--vad", given, "--speakers", 1)
    line = "SPEAKER talk 1 1.000 2.500 <NA> <NA> speaker1 <NA> <NA>\n"
    assert capsys.readouterr().out == line


def test_ahc_and_vbx(exp, talk, tmp_path, capsys):
    diarized(exp, talk, "--method", "ahc", "--threshold", -1)
    assert speakers_of(capsys.readouterr().out) == {"speaker1"}

    # 12 windows are too few for a PLDA of 16 dimensions.
    folder = write_voices(tmp_path / "dev", speakers=range(2), seconds=(3.2, 6.1))
    with refuses("plda", 12, 16):
        diarized(exp, talk, "--method", "vbx", "--development", folder)


def test_the_default_threshold_is_reported(exp, talk, capsys, caplog):
    diarized(exp, talk, "--method", "ahc", "--threshold", 0.4)
    with_threshold = capsys.readouterr().out
    assert "clustering" not in caplog.text
    caplog.set_level("INFO")
    diarized(exp, talk, "--method", "ahc")
    advice = "the default; `speakerlab calibrate"
    assert f"clustering: ahc, threshold 0.4, {advice}" in caplog.text
    assert capsys.readouterr().out == with_threshold
    diarized(exp, talk)
    assert f"clustering: spectral, {advice}" in caplog.text


def test_a_calibration_is_stored_with_the_model_and_used(
    make_exp, talk, tmp_path, caplog, capsys
):
    exp = make_exp("exp", calibration=CALIBRATION)
    folder = tmp_path / "dev"
    write_data_dir(folder, wavs={"talk": talk})
    check_data_dirs([folder])
    turns = [Turn(0.0, 6.0, "ann"), Turn(8.0, 14.0, "bob")]
    write_rttm(folder / "ref.rttm", {"talk": turns})
    arguments = ["--for", "diarization", "--data", str(folder), "--model"]
    copy = tmp_path / "copy/model"
    path = copy / "diarization.json"

    # It is stored with a copy of the model.
    calibrate.main([*arguments, str(exp), "--out", str(tmp_path / "copy")])
    assert not (exp / "model/diarization.json").exists()
    stored = read_json(path)
    assert stored["source"] == "dev: 1 recording"
    assert (copy / "calibration.json").exists()
    der = 100 * stored["der"]["ahc"]
    shown = f"ahc, threshold {stored['threshold']:g}: DER {der:.2f} %"
    assert shown in capsys.readouterr().out

    # It is replaced only with --force; the scored region has one speaker only.
    with refuses(str(path), "--force"):
        calibrate.main([*arguments, str(copy)])
    write_uem(folder / "ref.uem", {"talk": [(0.0, 6.0)]})
    calibrate.main([*arguments, str(copy), "--force"])
    rates = read_json(path)["der"]
    assert max(rates.values()) < 0.05

    # It is used.
    values = stored | {"method": "ahc", "threshold": 0.15}
    write_json(path, values)
    caplog.set_level("INFO")
    diarized(copy, talk, "--out", tmp_path / "out")
    line = "clustering: ahc, threshold 0.15, calibrated on dev: 1 recording"
    assert line in caplog.text
    assert read_json(tmp_path / "out/talk.json")["method"] == "ahc"

    # Without its values or without the truth, it is refused.
    write_json(path, {"method": "sum"})
    with refuses(str(path), "'spectral' or 'vbx'"):
        diarized(copy, talk)
    (folder / "ref.rttm").unlink()
    with pytest.raises(FileNotFoundError, match="ref.rttm"):
        calibrate.main([*arguments, str(exp)])


def test_broken_recordings_do_not_stop_the_others(run, exp, talk, tmp_path):
    broken = ["empty.wav", "text.wav", "missing.wav"]
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("no audio")
    quiet = tmp_path / "quiet.wav"
    quiet_S = np.zeros(RATE, dtype=np.int16)
    audio.write(quiet, quiet_S, RATE)
    files = [tmp_path / name for name in broken]
    files += [quiet, talk]
    out = tmp_path / "out"
    options = ("--model", exp, "--out", out)
    done = run("-m", "speakerlab", "diarize", *files, *options, code=1)

    for path in files[:3]:
        assert refused(done.stderr, str(path)), done.stderr
    assert (out / "quiet.rttm").read_text() == ""
    assert read_json(out / "quiet.json")["segments"] == []
    assert (out / "talk.rttm").exists()
    # Three files of each of the two good recordings, beside the lock.
    assert len(list(out.glob("[!.]*"))) == 6


@pytest.mark.parametrize(
    ("arguments", "subject", "value"),
    [
        (["--vad", "webrtc"], "--vad", "webrtc"),
        (["--vad", "speech.rttm"], "--vad", "talk"),
        (["--vad", "broken.rttm"], "broken.rttm:1", -1),
        (["other.flac", "--vad", "speech.lab"], "--vad", 2),
    ],
)
def test_refusals(exp, talk, tmp_path, monkeypatch, arguments, subject, value):
    monkeypatch.chdir(tmp_path)
    Path("speech.rttm").write_text("SPEAKER else 1 0 1 <NA> <NA> x <NA> <NA>\n")
    Path("broken.rttm").write_text("SPEAKER talk 1 0 -1 <NA> <NA> x <NA> <NA>\n")
    with refuses(subject, value):
        diarized(exp, talk, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speakers", "2", "--max-speakers", "3"],
        ["--development", "data"],
        ["--threshold", "0.5"],
        ["--speakers", "0"],
        ["--far", "0.01"],
        ["--max-speakers", "2", "--min-speakers", "5"],
    ],
)
def test_options_that_do_not_fit(exp, arguments, capsys):
    with pytest.raises(SystemExit):
        diarized(exp, "talk.wav", *arguments)
    assert arguments[0] in capsys.readouterr().err


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


KILLED = """
import os, signal, sys
from pathlib import Path
from speakerlab.bin import diarize
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
diarize.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_kill_while_writing_leaves_the_old_files(environment, exp, talk, tmp_path):
    out = tmp_path / "out"
    diarized(exp, talk, "--out", out, "--speakers", 1)
    before = contents(out)

    options = ["--out", out, "--model", exp, "--device", "cpu", "--speakers", 2]
    arguments = [str(argument) for argument in (talk, *options)]
    command = [sys.executable, "-c", KILLED, *arguments]
    killed = subprocess.run(command, env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    after = contents(out)
    (partial,) = after.keys() - before.keys()
    assert partial.startswith(".talk.rttm.")
    del after[partial]
    assert after == before
