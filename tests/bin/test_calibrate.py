"""A model trained here knows its threshold, and another data directory can teach it anew."""

import json

import pytest


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run, train_command):
    exp = tmp_path_factory.mktemp("calibrated") / "exp"
    done = run(*train_command(exp, 1, "training.num_epochs=1"))
    assert done.returncode == 0, done.stderr
    return exp


def test_training_leaves_a_calibration_of_its_validation_speakers(trained):
    learned = json.loads((trained / "model" / "calibration.json").read_text())
    assert learned["source"] == "validation speakers: 2 speakers, 6 recordings"
    assert (learned["num_target"], learned["num_nontarget"]) == (6, 9)
    assert -1 < learned["threshold"] < 1


def test_another_data_directory_teaches_it_anew(trained, data, run):
    command = ["-m", "speakerlab", "calibrate", "--model", trained, "--data"]
    done = run(*command, data / "test", "--far", "0.05")
    assert done.returncode == 0, done.stderr
    assert "at the EER, " in done.stdout and "at 5 % false alarms" in done.stdout
    learned = json.loads((trained / "model" / "calibration.json").read_text())
    assert learned["source"] == "test: 4 speakers, 12 recordings"
    assert (learned["num_target"], learned["num_nontarget"]) == (12, 54)
    assert "0.05" in learned["threshold_at_far"]


def test_noise_has_no_speakers_to_learn_from(trained, data, run):
    done = run("-m", "speakerlab", "calibrate", "--model", trained, "--data", data / "noise")
    assert done.returncode == 1 and "calibration needs speakers" in done.stderr
    assert "Traceback" not in done.stderr
