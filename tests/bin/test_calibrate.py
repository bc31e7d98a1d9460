"""Calibration: learned in training from validation speakers, and again from other recordings."""

import io
import json
import shutil
import sys

from refusals import refuses

from speakerlab.bin import calibrate


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


def learned(exp):
    return json.loads((exp / "model/calibration.json").read_text())


def test_training_calibrates_on_its_validation_speakers(trained):
    found = learned(trained)
    assert found["source"] == "validation speakers: 2 speakers, 6 recordings"
    assert (found["num_target"], found["num_nontarget"]) == (6, 9)
    assert -1 < found["threshold"] < 1


def test_another_data_directory_replaces_the_calibration(
    trained, data, tmp_path, capsys, monkeypatch
):
    exp = shutil.copytree(trained, tmp_path / "exp")
    words = ["--model", str(exp), "--data", str(data / "test"), "--far", "0.05"]
    with refuses(str(exp / "model/calibration.json"), "--force", "--out"):
        calibrate.main(words)
    assert learned(exp) == learned(trained)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    calibrate.main([*words, "--force"])
    assert "12/12" in terminal.getvalue()  # a progress bar
    text = capsys.readouterr().out
    assert "EER" in text and "5 % false alarms" in text
    found = learned(exp)
    assert found["source"] == "test: 4 speakers, 12 recordings"
    assert (found["num_target"], found["num_nontarget"]) == (12, 54)
    assert "0.05" in found["threshold_at_far"]


def test_recordings_without_speakers_are_refused(trained, data):
    with refuses(f"{data}/noise/utt2spk", error=FileNotFoundError):
        calibrate.main(["--model", str(trained), "--data", str(data / "noise")])
    with refuses(f"{data}/nowhere", "does not exist", error=FileNotFoundError):
        calibrate.main(["--model", str(trained), "--data", str(data / "nowhere")])


def test_copy_is_calibrated_again_and_the_model_kept(trained, data, tmp_path, monkeypatch):
    words = ["--model", str(trained), "--data", str(data / "test"), "--out", str(tmp_path / "exp")]
    calibrate.main(words)
    calibrate.main(words)  # as a recipe that is run again
    assert learned(tmp_path / "exp")["source"] == "test: 4 speakers, 12 recordings"
    assert learned(trained)["source"].startswith("validation")
    monkeypatch.setenv("SPEAKERLAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/iic/speech_campplus_sv_zh-cn_16k-common"
    shutil.copytree(trained / "model", folder)
    with refuses("--out", "hub:campplus-zh-200k"):
        calibrate.main(["--model", "hub:campplus-zh-200k", *words[2:4]])
