"""Calibration: learned in training from validation speakers, and again from other recordings."""

import io
import json
import shutil
import sys
from dataclasses import asdict
from multiprocessing import get_context

from full_disk import cannot_write
from refusals import refused, refuses
from tiny import read_json

import speakerlab
from speakerlab.bin import calibrate
from speakerlab.checkpoints.model_files import write_tuning
from speakerlab.core.atomic import locked
from speakerlab.core.tuning import Tuning
from speakerlab.data.tables import read_table


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


def test_the_calibration_of_another_model_is_refused(publish_to, data, tmp_path):
    first, _, _ = publish_to("first")
    second, _, _ = publish_to("second", "seed=1")
    test_set = ["--data", str(data / "test")]
    calibrate.main(["--model", str(first), *test_set])
    content = read_json(first / "calibration.json")
    sha256 = read_json(first / "card.json")["sha256"]
    assert content["model_sha256"] == sha256
    stored = second / "calibration.json"
    shutil.copy(first / "calibration.json", stored)
    with refuses(str(stored), sha256[:12], "speakerlab calibrate --force"):
        speakerlab.load(second)
    # What the message says helps.
    calibrate.main(["--model", str(second), *test_set, "--force"])
    calibration = speakerlab.load(second).calibration
    assert calibration is not None
    assert calibration.model_sha256 == read_json(second / "card.json")["sha256"]

    # A file of an earlier version names no model.
    del content["model_sha256"]
    stored.write_text(json.dumps(content))
    calibration = speakerlab.load(second).calibration
    assert calibration is not None
    assert calibration.threshold == content["threshold"]


def test_the_clustering_of_another_model_is_refused(publish_to):
    first, _, _ = publish_to("first")
    second, _, _ = publish_to("second", "seed=1")
    tuning = Tuning("ahc", 0.25, {"ahc": 0.125}, "made up")
    write_tuning(first, tuning)
    assert speakerlab.load(first).tuning.threshold == tuning.threshold
    stored = second / "diarization.json"
    shutil.copy(first / "diarization.json", stored)
    with refuses(str(stored), "is of model", "--for diarization"):
        speakerlab.load(second)
    # A file of an earlier version names no model.
    stored.write_text(json.dumps(asdict(tuning)))
    assert speakerlab.load(second).tuning == tuning


def test_speakers_of_the_training_are_warned_of(publish_to, data, caplog):
    speakers = sorted(set(read_table(data / "test/utt2spk").values()))
    classes = [*speakers[:2], f"{speakers[2]}#0.9", "x"]
    folder, _, _ = publish_to("model", classes=classes)
    arguments = ["--model", str(folder), "--data", str(data / "test"), "--force"]
    calibrate.main(arguments)
    warnings = "\n".join(caplog.messages)
    assert refused(warnings, str(data / "test"), "on 2 of its 4 speakers")
    # A model may come without the names of its speakers.
    caplog.clear()
    (folder / "speakers.txt").unlink()
    calibrate.main(arguments)
    assert "trained on" not in caplog.text


def test_a_full_disk_is_an_error_of_the_copy(publish_to, data, tmp_path):
    folder, _, _ = publish_to("source")
    exp = tmp_path / "copy"
    size = (folder / "embedder.safetensors").stat().st_size
    arguments = ["--model", str(folder), "--data", str(data / "test")]
    weights = exp / "model/embedder.safetensors"
    with cannot_write(weights, num_bytes=size - 1):
        calibrate.main([*arguments, "--out", str(exp)])
    calibrate.main([*arguments, "--out", str(exp)])
    assert (exp / "config.yaml").exists()
