"""Calibration: learned in training from validation speakers, and again from other recordings."""

import io
import shutil
import sys

from refusals import refuses
from tiny import read_json

from speakerlab.bin import calibrate


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


def learned(exp):
    return read_json(exp / "model/calibration.json")


def test_training_calibrates_on_its_validation_speakers(trained):
    calibration = learned(trained)
    assert calibration["source"] == "validation speakers: 2 speakers, 6 recordings"
    assert calibration["num_target"] == 6
    assert calibration["num_nontarget"] == 9
    assert -1 < calibration["threshold"] < 1


def test_another_data_directory_replaces_the_calibration(
    trained, data, tmp_path, capsys, monkeypatch
):
    exp = shutil.copytree(trained, tmp_path / "exp")
    arguments = ["--model", str(exp), "--data", str(data / "test"), "--far", "0.05"]
    with refuses(str(exp / "model/calibration.json"), "--force", "--out"):
        calibrate.main(arguments)
    assert learned(exp) == learned(trained)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    calibrate.main([*arguments, "--force"])
    assert "12/12" in terminal.getvalue()  # a progress bar
    text = capsys.readouterr().out
    assert "EER" in text
    assert "5 % false alarms" in text
    calibration = learned(exp)
    assert calibration["source"] == "test: 4 speakers, 12 recordings"
    assert calibration["num_target"] == 12
    assert calibration["num_nontarget"] == 54
    assert "0.05" in calibration["threshold_at_far"]


def test_recordings_without_speakers_are_refused(trained, data):
    noise = data / "noise"
    with refuses(f"{noise}/utt2spk", error=FileNotFoundError):
        calibrate.main(["--model", str(trained), "--data", str(noise)])
    nowhere = data / "nowhere"
    with refuses(str(nowhere), "does not exist", error=FileNotFoundError):
        calibrate.main(["--model", str(trained), "--data", str(nowhere)])


def test_copy_is_calibrated_again_and_the_model_kept(
    trained, data, tmp_path, monkeypatch
):
    exp = tmp_path / "exp"
    test_set = ["--data", str(data / "test")]
    arguments = ["--model", str(trained), *test_set, "--out", str(exp)]
    # The second time as in a recipe that is run again.
    calibrate.main(arguments)
    calibrate.main(arguments)
    assert learned(exp)["source"] == "test: 4 speakers, 12 recordings"
    assert learned(trained)["source"].startswith("validation")

    # The cache of published models is not changed.
    monkeypatch.setenv("SPEAKERLAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/iic/speech_campplus_sv_zh-cn_16k-common"
    shutil.copytree(trained / "model", folder)
    with refuses("--out", "hub:campplus-zh-200k"):
        calibrate.main(["--model", "hub:campplus-zh-200k", *test_set])
