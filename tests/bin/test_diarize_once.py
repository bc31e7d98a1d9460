"""Diarizations and tunings of the same inputs are kept, those of others made again; locks."""

import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from voices import RATE, make_wave

from speakerlab.bin import calibrate, diarize
from speakerlab.core import done
from speakerlab.core.atomic import locked, write_json
from speakerlab.data import audio
from speakerlab.data.tables import write_data_dir
from speakerlab.diarization.regions import Turn, write_rttm, write_uem


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


def diarized(exp: Path, *arguments: object) -> None:
    options = ("--model", exp, "--device", "cpu")
    diarize.main([str(argument) for argument in (*arguments, *options)])


@pytest.mark.slow
def test_an_interrupted_diarization_continues(
    exp, make_exp, talk, tmp_path, caplog, monkeypatch
):
    other = Path(shutil.copy(talk, tmp_path / "other.flac"))
    out = tmp_path / "out"
    caplog.set_level("INFO")

    def made(*arguments: object, model: Path = exp) -> list[str]:
        """Return the recordings that are diarized, not kept."""
        caplog.clear()
        diarized(model, talk, other, "--speakers", 1, "--out", out, *arguments)
        names = []
        for line in caplog.messages:
            if " speaker in " in line:
                names.append(line.partition(":")[0])
        # A line reports how many recordings are kept, if any.
        num_kept = 2 - len(names)
        beginning = f"{out}: {num_kept} of 2 recordings diarized already"
        is_reported = any(
            line.startswith(f"{beginning} with these inputs")
            for line in caplog.messages
        )
        assert is_reported == (num_kept > 0)
        return names

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in out.iterdir()}

    assert made() == ["talk", "other"]
    before = times()
    assert made() == []
    assert times() == before
    assert made("--force") == ["talk", "other"]
    # Files that are missing, empty or broken, as after a kill between two files.
    for name in ("talk.json", "talk.rttm", "talk.html"):
        (out / name).unlink()
        assert made() == ["talk"]
    (out / "talk.rttm").write_text("")
    assert made() == ["talk"]
    (out / "talk.json").write_text("{")
    assert made() == ["talk"]

    # Another recording of the same name.
    audio.write(other, make_wave(1, 0, 3), RATE)
    assert made() == ["other"]
    assert made() == []

    # Other regions, another method, another model, another version.
    path = tmp_path / "vad.rttm"
    turns_of_other = [Turn(0, 2, "x")]
    turns_of_talk = [Turn(0, 6, "x")]
    write_rttm(path, {"talk": turns_of_talk, "other": turns_of_other})
    vad = ("--vad", path)
    assert made(*vad) == ["talk", "other"]
    assert made(*vad) == []
    shorter_turns = [Turn(0, 5, "x")]
    write_rttm(path, {"talk": shorter_turns, "other": turns_of_other})
    assert made(*vad) == ["talk"]
    assert made(*vad, "--method", "ahc") == ["talk", "other"]
    other_model = make_exp("another", "seed=5")
    assert made(*vad, model=other_model) == ["talk", "other"]
    assert made(*vad) == ["talk", "other"]
    assert made(*vad) == []
    monkeypatch.setattr(done, "code_digest", lambda: "of another version")
    assert made(*vad) == ["talk", "other"]


def test_files_of_another_user_that_are_complete_need_no_lock(
    exp, talk, tmp_path, caplog
):
    out = tmp_path / "out"
    diarized(exp, talk, "--speakers", 1, "--out", out)
    # Opening a folder fails, as opening a file without permission does.
    (out / ".lock").unlink()
    (out / ".lock").mkdir()
    diarized(exp, talk, "--speakers", 1, "--out", out)
    with refuses(str(out), "cannot be written"):
        diarized(exp, talk, "--speakers", 2, "--out", out)


def test_of_two_diarizations_the_second_waits(exp, talk, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    fork = multiprocessing.get_context("fork")
    with locked(out / ".lock"):
        arguments = (exp, talk, "--speakers", 1, "--out", out)
        process = fork.Process(target=diarized, args=arguments)
        process.start()
        process.join(3)
        assert process.is_alive()
        assert not (out / "talk.rttm").exists()
    process.join(60)
    assert process.exitcode == 0
    assert (out / "talk.rttm").exists()


@pytest.mark.slow
def test_a_tuning_of_the_same_data_and_model_is_kept(
    make_exp, talk, tmp_path, caplog, capsys
):
    exp = make_exp("exp")
    folder = tmp_path / "dev"
    copy = tmp_path / "copy"
    path = copy / "model/diarization.json"
    write_data_dir(folder, wavs={"talk": talk})
    first = Turn(0.0, 6.0, "ann")
    second = Turn(8.0, 14.0, "bob")
    shorter = Turn(0.0, 5.0, "ann")
    write_rttm(folder / "ref.rttm", {"talk": [first, second]})
    inputs = ["--for", "diarization", "--data", str(folder), "--model", str(exp)]
    arguments = [*inputs, "--out", str(copy), "--force"]
    caplog.set_level("INFO")

    def is_kept() -> bool:
        caplog.clear()
        calibrate.main(arguments)
        return "already calibrated with this model and data, kept" in caplog.text

    assert not is_kept()
    printed = capsys.readouterr().out
    before = path.read_bytes()
    assert is_kept()
    assert capsys.readouterr().out == printed
    assert path.read_bytes() == before

    # Other turns, another scored region, other audio; a missing or damaged file.
    for change in (
        lambda: write_rttm(folder / "ref.rttm", {"talk": [shorter]}),
        lambda: write_uem(folder / "ref.uem", {"talk": [(0.0, 6.0)]}),
        lambda: audio.write(talk, make_wave(1, 0, 8), RATE),
        path.unlink,
        lambda: write_json(path, {"method": "ahc"}),
    ):
        change()
        assert not is_kept()
        assert is_kept()
