"""Trainings on the data that users have: packed, parts of one long file, read-only, stored."""

import os
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny import BARE, CONFIG, ROOT, TINY, card, copy_data, cut, losses, weights
from voices import RATE, write_voices

import speakerlab
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout
from speakerlab.data.tables import read_table

PCM = Layout.of_waves("pcm", sample_rate=RATE)


def test_packed_audio_trains_the_same_weights_and_may_come_in_the_middle(
    trained, data, tmp_path, train
):
    """A run begun on loose files, of which `trained` is one, resumes on shards."""
    own = copy_data(data, tmp_path / "data")
    pack_data_dir(own / "train", layout=PCM)
    packed, mixed = tmp_path / "packed", tmp_path / "mixed"
    train(packed, f"data.dir={own}")
    assert weights(packed) == weights(trained)
    exp = cut(packed, mixed)
    shutil.rmtree(own / "train/shards")
    assert "resuming from step" in train(exp, f"data.dir={own}").stderr
    assert weights(mixed) == weights(trained)


def write_ten_files(folder):
    """Five speakers with two files of a second and a half each: 15 s in all, 25 crops."""
    return write_voices(folder / "data/train", speakers=range(5), seconds=(1.5, 1.5)).parent


def test_ten_files_train_on_four_ranks(tmp_path, train):
    """A global batch of 64 (the least for four ranks) repeats the 15 crops of three speakers."""
    more = ["training.global_batch=64", "training.num_epochs=2"]
    found = train(tmp_path / "exp", *more, f"data.dir={write_ten_files(tmp_path)}", *BARE, ranks=4)
    assert "each epoch repeats it 4.3 times" in found.stderr
    assert list(losses(tmp_path / "exp")) == [1, 2]
    found = card(tmp_path / "exp")
    counts = [found[key] for key in ("steps", "steps_per_epoch", "crops_dropped_per_epoch")]
    assert counts == [2, 1, 0]


@pytest.mark.parametrize(("value", "rows"), [("auto", 9), ("off", 3)])
def test_speeds_make_speakers_unless_configured(value, rows, tmp_path, train):
    folder, exp = tmp_path / "data/train", tmp_path / "exp"
    write_voices(folder, speakers=range(3), seconds=(1.5, 1.5))
    more = [f"data.dir={folder.parent}", "data.valid_speakers=0", "training.num_epochs=1", *BARE]
    text = train(exp, f"augment.speed_classes={value}", *more).stderr
    assert f"{rows} classes: speeds " in text
    assert len((exp / "speakers.txt").read_text().splitlines()) == rows
    assert load_file(exp / "model/head.safetensors")["weight_CD"].shape[0] == rows
    assert card(exp)["classes"] == rows


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts, so needs root"
)
def test_a_corpus_on_a_read_only_file_system_trains(tmp_path, environment, train_command):
    """Recordings, tables and shards are mounted read-only; the experiment is elsewhere."""
    corpus = tmp_path / "corpus"
    data = write_ten_files(corpus)
    pack_data_dir(data / "train", layout=PCM)
    more = [f"data.dir={data}", "training.num_epochs=1", "data.valid_speakers=0", *BARE]
    script = (
        f'mount --bind "{corpus}" "{corpus}" && mount -o remount,bind,ro "{corpus}" && '
        f'! touch "{data}/train/written" 2>/dev/null && exec "$@"'
    )
    command = ["unshare", "-m", "bash", "-c", script, "bash"]
    command += train_command(tmp_path / "exp", 1, *more)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine does not let tests mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert read_manifest([data / "train"], sample_rate=RATE).parts[0].waves is not None
    assert card(tmp_path / "exp")["steps"] >= 1


def test_stored_features_train_a_model_that_takes_waves(data, tmp_path, run):
    own, exp = copy_data(data, tmp_path / "data"), tmp_path / "exp"
    layers = [CONFIG, ROOT / "conf/features/fbank.yaml"]
    pack = ["pack", own / "train", "--features", "fbank", "--config", *layers]
    run("-m", "speakerlab", *pack)
    shutil.rmtree(own / "noise")  # nothing but the features is read to train
    words = ["train", "--exp", exp, "--config", *layers, "--set", f"data.dir={own}", *TINY]
    run("-m", "speakerlab", *words)
    emb_D = speakerlab.load(exp, device="cpu").embed(read_table(own / "test/wav.scp")["spk8-0"])
    assert emb_D.shape == (32,) and np.isfinite(emb_D).all()
