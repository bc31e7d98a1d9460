"""Ten inputs that users really have: nine are refused in one clear line, one is read and said."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from speakerlab.data import audio

ROOT = Path(__file__).parents[2]
WAVE = (np.random.default_rng(0).standard_normal(32000) * 3000).astype(np.int16)


@pytest.fixture
def copy(data, tmp_path) -> Path:
    """The tiny corpus in a place of its own, to be harmed."""
    root = tmp_path / "data"
    shutil.copytree(data, root)
    for table in root.glob("*/wav.scp"):
        table.write_text(table.read_text().replace(str(data), str(root)))
    return root


def swap(root: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Replace the audio of training utterance s0-u0 by a file called `name`."""
    path = root / "wav" / name
    write(path)
    table = root / "train" / "wav.scp"
    table.write_text(table.read_text().replace("s0-u0.wav", name))
    return path


def cut_flac(path: Path) -> None:
    audio.write(path, WAVE, 16000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def missing_wav(root):
    (root / "wav" / "s0-u0.wav").unlink()
    return f"{root}/wav/s0-u0.wav: no such file; correct wav.scp or restore it"


def truncated_flac(root):
    path = swap(root, "cut.flac", cut_flac)
    return f"{path}: cannot be decoded after "


def zero_length_wav(root):
    path = swap(root, "empty.wav", lambda path: audio.write(path, WAVE[:0], 16000))
    return f"{path}: is empty, got 0 samples; record it again or drop it"


def wrong_sample_rate(root):
    path = swap(root, "telephone.wav", lambda path: audio.write(path, WAVE, 8000))
    return f"{path}: must have 16000 Hz, got 8000; convert it: ffmpeg -i {path} -ar 16000 OUT.wav"


def duplicate_ids(root):
    table = root / "train" / "wav.scp"
    table.write_text(table.read_text() + table.read_text().splitlines()[0] + "\n")
    return f"{table}:25: duplicate id, got s0-u0; keep one line"


def unknown_trial(root):
    trials = root / "test" / "trials"
    trials.write_text(trials.read_text() + "s8-u0 nobody nontarget\n")
    return f"{trials}:67: names an unknown utterance, got nobody; add it to wav.scp or drop"


HARMS = [
    missing_wav,
    truncated_flac,
    zero_length_wav,
    wrong_sample_rate,
    duplicate_ids,
    unknown_trial,
]


@pytest.mark.parametrize("harm", HARMS)
def test_bad_data_is_refused_in_one_line(harm, copy, run):
    line = harm(copy)
    done = run("-m", "speakerlab", "check", copy / "train", copy / "test", "--decode")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr  # the fault, then the verdict
    assert lines[0].startswith(line)
    assert lines[1] == f"{copy}/train, {copy}/test: refused, no utt2dur was written"


def test_an_unknown_configuration_key_names_the_nearest(run, train_command, tmp_path):
    done = run(*train_command(tmp_path / "exp", 1, "training.num_epoch=3"))
    assert done.returncode == 1
    line = "--set training.num_epoch=3: unknown key; did you mean num_epochs?"
    assert done.stderr.splitlines() == [line, "configuration refused"]


def run_recipe(*words: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "egs" / "mini" / "run.sh"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_an_unknown_option_of_run_sh_names_the_nearest():
    done = run_recipe("--modle", "campplus")
    assert done.returncode == 1
    assert "unknown option --modle; did you mean --model?" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_stage_before_the_one_it_needs_names_that_one(tmp_path):
    done = run_recipe("--stage", "5", "--data", tmp_path / "data", "--exp", tmp_path / "exp")
    assert done.returncode == 1
    assert done.stderr.startswith("stage 5: missing ") and "--stage 3" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_stereo_file_is_read_by_its_first_channel_and_said(copy, run):
    other = np.zeros_like(WAVE)
    swap(copy, "two.wav", lambda path: audio.write(path, np.stack([WAVE, other], 1), 16000))
    done = run("-m", "speakerlab", "check", copy / "train", copy / "test", "--decode")
    assert done.returncode == 0
    line = f"{copy}/train: 1 recordings have several channels, got s0-u0; the first channel is read"
    assert line in done.stderr
    assert np.array_equal(audio.read(copy / "wav" / "two.wav"), WAVE)


def test_what_the_system_refuses_is_one_line(tmp_path, run):
    (tmp_path / "file").write_text("")
    done = run("-m", "speakerlab", "pack", tmp_path / "file" / "train")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and f"{tmp_path}/file/train" in done.stderr
