"""`speakerlab diarize --live`: what is read, printed and refused, and how the stream ends."""

import io
import os
import signal
import subprocess
import sys
import wave

import numpy as np
import pytest
from models_on_disk import CALIBRATION
from refusals import refused, refuses
from toy_segmentation import write_segmentation
from voices import RATE, make_wave

from speakerlab.bin import diarize, enroll
from speakerlab.data import audio


def talk() -> np.ndarray:
    """4 s of one voice, 1 s of silence, 3 s of another one."""
    silence_S = np.zeros(RATE, np.int16)
    return np.concatenate([make_wave(0, 0, 4), silence_S, make_wave(4, 0, 3)])


def wav_bytes(wave_SC: np.ndarray, *, rate: int = RATE, width: int = 2) -> bytes:
    """Return a WAV file of these integers."""
    file = io.BytesIO()
    num_channels = 1 if wave_SC.ndim == 1 else wave_SC.shape[1]
    with wave.open(file, "wb") as output:
        output.setnchannels(num_channels)
        output.setsampwidth(width)
        output.setframerate(rate)
        output.writeframes(wave_SC.tobytes())
    return file.getvalue()


@pytest.fixture
def live(make_exp, tmp_path, monkeypatch):
    """live(data, *options): run the command on these bytes."""
    exp = make_exp("exp", calibration=CALIBRATION)

    def run(data: bytes, *options: object) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(data)
        arguments = ["--live", "--model", exp, "--device", "cpu", *options]
        with path.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            diarize.main([str(argument) for argument in arguments])

    run.exp = exp
    return run


def turns_of(text: str) -> list[tuple[float, float]]:
    """Return the start and the end of each line of RTTM."""
    turns = []
    for line in text.splitlines():
        kind, recording, channel, start, duration, *_ = line.split()
        assert (kind, recording, channel) == ("SPEAKER", "stream", "1")
        turns.append((float(start), float(start) + float(duration)))
    return turns


def bounds_of(text: str) -> list[float]:
    """Return the bounds of the speech, from the turns."""
    turns = turns_of(text)
    bounds = [turns[0][0]]
    for (_, end), (start, _) in zip(turns, turns[1:]):
        if start > end + 0.01:
            bounds += [end, start]
    return [*bounds, turns[-1][1]]


def test_wav_and_raw_samples_have_the_same_turns(live, capsys):
    wave_S = talk()
    plain = wav_bytes(wave_S)
    at = plain.index(b"data") + 4
    # As of programs that cannot know the length, with another chunk before the samples.
    endless = (
        plain[: at - 4] + b"LIST\x03\0\0\0abc\0data" + b"\xff" * 4 + plain[at + 4 :]
    )
    stereo_SC = np.stack([wave_S, -wave_S], axis=1)
    inputs = [
        (plain, ()),
        (endless, ()),
        (plain + b"LIST\x04\0\0\0abcd", ()),
        (wave_S.tobytes(), ("--sample-rate", RATE)),
        (wav_bytes(stereo_SC), ("--channel", 1)),
    ]
    outputs = []
    for data, options in inputs:
        live(data, *options)
        outputs.append(capsys.readouterr().out)
    assert bounds_of(outputs[0]) == pytest.approx([0.0, 4.0, 5.0, 8.0], abs=0.1)
    assert set(outputs) == {outputs[0]}


def test_enrolled_speakers_are_named(live, tmp_path, capsys):
    path = tmp_path / "ann.wav"
    audio.write(path, make_wave(0, 0, 4), RATE)
    speakers = tmp_path / "speakers.safetensors"
    options = ("--speakers", speakers, "--model", live.exp, "--device", "cpu")
    enroll.main([str(value) for value in ("Ann Lee", path, *options)])
    capsys.readouterr()
    # An untrained model hears the same voice everywhere.
    live(wav_bytes(talk()), "--known", speakers, "--far", 0.1)
    assert {line.split()[7] for line in capsys.readouterr().out.splitlines()} == {
        "Ann_Lee"
    }


def test_an_incomplete_end(live, capsys, caplog):
    data = talk().tobytes()
    # Half a sample.
    live(data + b"\0", "--sample-rate", RATE)
    assert bounds_of(capsys.readouterr().out)[-1] == pytest.approx(8.0, abs=0.1)
    assert [text for text in caplog.messages if "part of a sample" in text]
    # A file that was cut: what there is of it is printed.
    with refuses("standard input", "96001 of the 256000 bytes"):
        live(wav_bytes(talk())[: 44 + 96001])
    assert turns_of(capsys.readouterr().out)[-1][1] == pytest.approx(3.0, abs=0.1)
    with refuses("standard input", "within the header"):
        live(wav_bytes(talk())[:20])


def test_a_segmentation_model_finds_the_turns(live, tmp_path, capsys):
    path = write_segmentation(tmp_path / "segmentation.onnx")
    live(wav_bytes(talk()), "--segmentation", path)
    assert bounds_of(capsys.readouterr().out) == pytest.approx(
        [0.0, 4.0, 5.0, 8.0], abs=0.1
    )


def test_streams_without_speech(live, capsys, caplog):
    with refuses("standard input", "0 bytes"):
        live(b"")
    with refuses("stream", "0 samples"):
        live(wav_bytes(np.zeros(0, np.int16)))
    live(bytes(2 * RATE), "--sample-rate", RATE)
    assert capsys.readouterr().out == ""
    assert "stream: no speech was found" in caplog.messages


def test_what_is_no_16_bit_pcm(live):
    with refuses("standard input", "--sample-rate"):
        live(talk().tobytes())
    for start, name in (
        (b"fLaC", "FLAC"),
        (b"OggS", "Ogg"),
        (b"\0\0\0 ftypM4A ", "MP4"),
    ):
        with refuses("standard input", name, "ffmpeg"):
            live(start + bytes(100), "--sample-rate", RATE)
    with refuses("standard input", "24 bits"):
        live(wav_bytes(np.zeros((100, 3), np.uint8)[:, 0], width=3))
    with refuses("--sample-rate", "16000 Hz", "8000"):
        live(wav_bytes(talk()), "--sample-rate", 8000)
    with refuses("stream", "channel 3"):
        live(wav_bytes(talk()), "--channel", 3)


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--live", "--live a.wav"),
        ("--speakers", "--live --speakers 2"),
        ("--min-speakers", "--live --min-speakers 2"),
        ("--vad", "--live --vad energy"),
        ("--method", "--live --method ahc"),
        ("--development", "--live --development DIR"),
        ("--out", "--live --out DIR"),
        ("--force", "--live --force"),
        ("--words", "--live --words FILE"),
        ("--channel", "--live --channel each"),
        ("--far", "--live --far 0.1"),
        ("--latency", "--live --latency 0.5"),
        ("--latency", "a.wav --latency 2"),
        ("--sample-rate", "a.wav --sample-rate 8000"),
        ("FILE", ""),
    ],
)
def test_options_that_do_not_fit(option, arguments, capsys):
    with pytest.raises(SystemExit) as request:
        diarize.main([*arguments.split(), "--model", "exp"])
    assert request.value.code == 1
    text = capsys.readouterr().err
    assert refused(text, f"speakerlab diarize: {option}")
    assert text.count("\n") == 1


def start(exp, environment) -> subprocess.Popen:
    """Start the command on a pipe of raw samples."""
    command = [sys.executable, "-m", "speakerlab", "diarize", "--live", "--model", exp]
    return subprocess.Popen(
        [*command, "--device", "cpu", "--sample-rate", str(RATE)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_turn_is_printed_before_the_stream_ends_and_ctrl_c_prints_the_rest(
    live, environment
):
    process = start(live.exp, environment)
    with process:
        process.stdin.write(talk()[: 7 * RATE].tobytes())
        process.stdin.flush()
        # The first voice ended 3 s ago, the second one goes on.
        line = process.stdout.readline().decode()
        assert turns_of(line) == [pytest.approx((0.0, 4.0), abs=0.1)]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().decode()
        error = process.stderr.read().decode()
    # The last bytes may not have been read yet.
    *bounds, end = bounds_of(line + rest)
    assert bounds == pytest.approx([0.0, 4.0, 5.0], abs=0.1)
    assert 5.5 < end <= 7.0
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in error
    assert error.endswith("stopped by Ctrl-C\n")


def test_the_command_ends_when_nobody_reads_its_turns(live, environment):
    process = start(live.exp, environment)
    with process:
        os.close(process.stdout.fileno())
        process.stdin.write(talk().tobytes())
        process.stdin.close()
        error = process.stderr.read().decode()
        process.stdin = process.stdout = None
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in error
