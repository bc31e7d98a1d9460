"""`speakerlab identify` of several recordings: a line each, JSON, channels, errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from models_on_disk import CALIBRATION
from refusals import refused, refuses
from voices import RATE, make_noise, make_wave

from speakerlab.bin import enroll, identify
from speakerlab.data import audio

FIELDS = [
    "file",
    "name",
    "known",
    "score",
    "threshold",
    "speech_seconds",
    "ranking",
    "warnings",
]


@pytest.fixture
def exp(make_exp) -> Path:
    return make_exp("exp", calibration=CALIBRATION)


@pytest.fixture
def calls(tmp_path: Path) -> list[Path]:
    """Ann, and a call of Bob on channel 1 with Ann on channel 2."""
    ann_S = make_wave(0, 0, 1.0)
    bob_S = make_wave(3, 0, 1.0)
    calls = tmp_path / "calls"
    calls.mkdir()
    paths = [calls / "ann.wav", calls / "call.wav"]
    audio.write(paths[0], ann_S, RATE)
    audio.write(paths[1], np.stack([bob_S, ann_S], axis=1), RATE)
    return paths


@pytest.fixture
def printed(exp, calls, tmp_path, capsys):
    """printed(*files and options) -> lines; Ann is the only enrolled speaker."""
    model = ["--model", exp, "--speakers", tmp_path / "team", "--device", "cpu"]
    enroll.main([str(word) for word in ("ann", calls[0], *model)])

    def run(*arguments: object) -> list[str]:
        capsys.readouterr()
        identify.main([str(word) for word in (*arguments, *model)])
        return capsys.readouterr().out.splitlines()

    return run


def test_several_files_are_a_line_each(printed, calls, exp):
    (calls[0].parent / "notes.txt").touch()
    options = ["--far", "0.01"]
    lines = printed(*calls, *options)
    assert printed(calls[0].parent, *options) == lines
    known, unknown = lines
    assert known == (
        f"{calls[0]}: ann (score 1.000000, threshold 0.999900, 1.00 s of speech)"
    )
    assert unknown.startswith(f"{calls[1]}: unknown speaker (best: ann, score 0.")
    (exp / "model/calibration.json").unlink()
    for line in printed(*calls):
        assert "no decision (no calibration; run `speakerlab calibrate`, or" in line


def test_a_threshold_decides_without_a_calibration(printed, calls, exp):
    (exp / "model/calibration.json").unlink()
    rows = [json.loads(line) for line in printed(*calls, "--json")]
    best, other = (row["ranking"]["ann"] for row in rows)
    between = (best + other) / 2
    for threshold, are_known in ((-1.0, [True, True]), (between, [True, False])):
        options = ["--threshold", str(threshold)]
        lines = printed(*calls, *options)
        assert [": ann (" in line for line in lines] == are_known
        rows = [json.loads(line) for line in printed(*calls, *options, "--json")]
        assert [row["known"] for row in rows] == are_known
        assert [row["threshold"] for row in rows] == pytest.approx([threshold] * 2)


def test_json_and_channel(printed, calls):
    lines = printed(*calls, "--json", "--channel", "1", "--far", "0.01")
    known, unknown = (json.loads(line) for line in lines)
    assert list(known) == FIELDS
    assert known["file"] == str(calls[0])
    assert known["name"] == "ann"
    assert known["known"] is True
    assert known["score"] == pytest.approx(1)
    assert known["ranking"] == {"ann": known["score"]}
    assert known["threshold"] == 0.9999
    assert known["speech_seconds"] == pytest.approx(1.0, abs=0.02)
    assert known["warnings"] == []
    assert unknown["name"] is None
    assert unknown["known"] is False

    (line,) = printed(calls[1], "--json", "--channel", "2", "--top", "0")
    result = json.loads(line)
    assert result["name"] == "ann"
    assert result["score"] == pytest.approx(1, abs=1e-6)
    assert result["ranking"] == {}

    # Each line has the warnings of its recording.
    lines = printed(*calls, "--json")
    known, unknown = (json.loads(line) for line in lines)
    assert known["warnings"] == []
    (warning,) = unknown["warnings"]
    assert refused(warning, str(calls[1]), "2 channels")


def test_noise_is_nobody(printed, calls, tmp_path):
    noise = tmp_path / "noise.wav"
    audio.write(noise, audio.to_int16(make_noise(2.0)[0].numpy()), RATE)
    assert printed(noise)[-1] == "decision: none (the recording has no speech)"
    known, undecided = printed(calls[0], noise)
    assert known.startswith(f"{calls[0]}: ann (")
    assert undecided.startswith(f"{noise}: no decision without speech (best: ann, ")
    (line,) = printed(noise, "--json")
    result = json.loads(line)
    assert result["name"] is None
    assert result["known"] is None
    assert result["speech_seconds"] == 0.0
    (warning,) = result["warnings"]
    assert refused(warning, str(noise), "noise")


def test_a_broken_file_does_not_stop_the_others(exp, calls, printed, tmp_path, run):
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF")
    model = ["--model", exp, "--speakers", tmp_path / "team", "--device", "cpu"]
    command = ["-m", "speakerlab", "identify", broken, calls[0], *model]
    finished = run(*command, code=1)
    assert refused(finished.stderr, str(broken), "readable audio")
    assert "1 of 2 recordings" in finished.stderr
    assert finished.stdout.startswith(f"{calls[0]}: ann (")

    # In JSON, it has a line like the others.
    finished = run(*command, "--json", code=1)
    broken_line, other_line = map(json.loads, finished.stdout.splitlines())
    assert list(broken_line) == ["file", "error"]
    assert refused(broken_line["error"], str(broken), "readable audio")
    assert other_line["name"] == "ann"


def test_an_error_of_the_model_is_a_single_one(exp, calls, printed):
    (exp / "model/calibration.json").unlink()
    with refuses("model", "no calibration"):
        printed(*calls, "--far", "0.01")
