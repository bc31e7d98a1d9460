"""Ten files are enough: four ranks train on them, though they fill no batch."""

import json

import pytest
from test_train import losses
from voices import RATE, make_wave

from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.tables import write_data_dir


@pytest.fixture
def ten_files(tmp_path):
    """Five speakers with two files of a second and a half each: 15 s in all, 25 crops."""
    wavs, owners = {}, {}
    for number in range(10):
        name = f"s{number // 2}-{number}"
        wavs[name], owners[name] = tmp_path / f"{name}.wav", f"s{number // 2}"
        audio.write(wavs[name], make_wave(number // 2, number, 1.5), RATE)
    write_data_dir(tmp_path / "data" / "train", wavs=wavs, speakers=owners)
    check_data_dirs([tmp_path / "data" / "train"])
    return tmp_path / "data"


@pytest.mark.slow
def test_ten_files_train_on_four_ranks_of_eight_workers(ten_files, tmp_path, run, train_command):
    """A global batch of 64 (the least for four ranks) repeats the 15 crops of three speakers."""
    more = ["training.global_batch=64", "data.valid_speakers=2", "training.num_epochs=2"]
    more += ["runtime.num_workers=8", f"data.dir={ten_files}"]
    done = run(*train_command(tmp_path / "exp", 4, *more))
    assert done.returncode == 0, done.stderr
    text = "the corpus is shorter than a global batch: each epoch repeats it 4.3 times"
    assert text in done.stderr
    assert sorted(losses(tmp_path / "exp")) == [1, 2]
    card = json.loads((tmp_path / "exp" / "model" / "card.json").read_text())
    assert (card["steps"], card["steps_per_epoch"], card["crops_dropped_per_epoch"]) == (2, 1, 0)
