"""Calibration: learned in training from validation speakers, and again from other recordings."""

import json
import shutil

import pytest

from speakerlab.bin import calibrate


def learned(exp):
    return json.loads((exp / "model/calibration.json").read_text())


def test_training_calibrates_on_its_validation_speakers(trained):
    found = learned(trained)
    assert found["source"] == "validation speakers: 2 speakers, 6 recordings"
    assert (found["num_target"], found["num_nontarget"]) == (6, 9)
    assert -1 < found["threshold"] < 1


def test_another_data_directory_replaces_the_calibration(trained, data, tmp_path, capsys):
    exp = shutil.copytree(trained, tmp_path / "exp")
    calibrate.main(["--model", str(exp), "--data", str(data / "test"), "--far", "0.05"])
    text = capsys.readouterr().out
    assert "EER" in text and "5 % false alarms" in text
    found = learned(exp)
    assert found["source"] == "test: 4 speakers, 12 recordings"
    assert (found["num_target"], found["num_nontarget"]) == (12, 54)
    assert "0.05" in found["threshold_at_far"]


def test_recordings_without_speakers_are_refused(trained, data):
    with pytest.raises(FileNotFoundError, match=f"{data}/noise/utt2spk: "):
        calibrate.main(["--model", str(trained), "--data", str(data / "noise")])
