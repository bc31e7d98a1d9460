"""Calibration: learned in training from validation speakers, and again from other recordings."""

import io
import shutil
import sys
from multiprocessing import get_context

from refusals import refuses
from tiny import read_json

from speakerlab.bin import calibrate
from speakerlab.core.atomic import locked


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

    # Recordings of another corpus never replace the threshold by accident.
    other = ["--model", str(trained), "--data", str(data / "train"), "--out", str(exp)]
    with refuses(f"{exp}/model", data / "test", "--out", "--exp", "--force"):
        calibrate.main(other)
    assert learned(exp)["source"].startswith("test: 4 speakers")
    calibrate.main([*other, "--force"])
    assert learned(exp)["source"].startswith("train: 8 speakers")
    # Nor does a copy of a calibrated model count as calibrated.
    copy = ["--model", str(exp), *test_set, "--out", str(tmp_path / "copy")]
    calibrate.main(copy)
    assert learned(tmp_path / "copy")["source"].startswith("test: 4 speakers")

    # The cache of published models is not changed.
    monkeypatch.setenv("SPEAKERLAB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/iic/speech_campplus_sv_zh-cn_16k-common"
    shutil.copytree(trained / "model", folder)
    with refuses("--out", "hub:campplus-zh-200k"):
        calibrate.main(["--model", "hub:campplus-zh-200k", *test_set])


def copy_and_store(barrier, source, exp_dir, name):
    barrier.wait()
    calibrate.copy_model(source, exp_dir)
    (exp_dir / "model" / name).touch()


def test_commands_that_copy_a_model_at_once_keep_what_each_stores(publish_to, tmp_path):
    """As for verification and for diarization, with the same --out."""
    source, _, _ = publish_to("source")
    names = {"calibration.json", "diarization.json", "a", "b"}
    forked = get_context("fork")
    barrier = forked.Barrier(len(names))
    processes = []
    for name in names:
        args = (barrier, source, tmp_path / "exp", name)
        processes.append(forked.Process(target=copy_and_store, args=args))
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    stored = {path.name for path in (tmp_path / "exp/model").iterdir()}
    assert stored >= {*names, "embedder.safetensors"}


def test_a_command_that_waited_does_not_replace_what_another_stored(
    publish_to, data, tmp_path
):
    folder, _, _ = publish_to("source")
    arguments = ["--model", str(folder), "--data", str(data / "test")]
    stored = folder / "calibration.json"
    forked = get_context("fork")
    second = forked.Process(target=calibrate.main, args=(arguments,))
    with locked(folder / calibrate.CALIBRATION_LOCK):
        second.start()
        # It checks the model, then waits for the lock.
        second.join(1)
        assert second.is_alive()
        stored.write_text("of the first command")
    second.join(60)
    assert second.exitcode == 1
    assert stored.read_text() == "of the first command"
    # A lock does not come with a copy.
    calibrate.copy_model(folder, tmp_path / "copy")
    assert not (tmp_path / "copy/model" / calibrate.CALIBRATION_LOCK).exists()
