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
    copied = copy_data(data, tmp_path / "data")
    pack_data_dir(copied / "train", layout=PCM)
    packed = tmp_path / "packed"
    mixed = tmp_path / "mixed"
    train(packed, f"data.dir={copied}")
    assert weights(packed) == weights(trained)
    exp = cut(packed, mixed)
    shutil.rmtree(copied / "train/shards")
    done = train(exp, f"data.dir={copied}")
    assert "resuming from step" in done.stderr
    assert weights(mixed) == weights(trained)


def write_ten_files(folder):
    """Five speakers with two files of a second and a half each: 15 s in all, 25 crops."""
    data = folder / "data"
    write_voices(data / "train", speakers=range(5), seconds=(1.5, 1.5))
    return data


def test_ten_files_train_on_four_ranks(tmp_path, train):
    """A global batch of 64 (the least for four ranks) repeats the 15 crops of three speakers."""
    exp = tmp_path / "exp"
    overrides = ["training.global_batch=64", "training.num_epochs=2", *BARE]
    data = write_ten_files(tmp_path)
    finished = train(exp, *overrides, f"data.dir={data}", ranks=4)
    assert "each epoch repeats it 4.3 times" in finished.stderr
    steps = list(losses(exp))
    assert steps == [1, 2]
    counts = card(exp)
    assert counts["steps"] == 2
    assert counts["steps_per_epoch"] == 1
    assert counts["crops_dropped_per_epoch"] == 0


@pytest.mark.parametrize(("value", "rows"), [("auto", 9), ("off", 3)])
def test_speeds_make_speakers_unless_configured(value, rows, tmp_path, train):
    folder = tmp_path / "data/train"
    exp = tmp_path / "exp"
    write_voices(folder, speakers=range(3), seconds=(1.5, 1.5))
    overrides = [
        f"data.dir={folder.parent}",
        "data.valid_speakers=0",
        "training.num_epochs=1",
        *BARE,
    ]
    text = train(exp, f"augment.speed_classes={value}", *overrides).stderr
    assert f"{rows} classes: speeds " in text
    speakers = (exp / "speakers.txt").read_text().splitlines()
    assert len(speakers) == rows
    head_CD = load_file(exp / "model/head.safetensors")["weight_CD"]
    assert head_CD.shape[0] == rows
    assert card(exp)["classes"] == rows


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts, so needs root"
)
@pytest.mark.slow
def test_a_corpus_on_a_read_only_file_system_trains(
    tmp_path, environment, train_command
):
    """Recordings, tables and shards are mounted read-only; the experiment is elsewhere."""
    corpus = tmp_path / "corpus"
    data = write_ten_files(corpus)
    pack_data_dir(data / "train", layout=PCM)
    overrides = [
        f"data.dir={data}",
        "training.num_epochs=1",
        "data.valid_speakers=0",
        *BARE,
    ]
    # The script ends if the corpus can still be written.
    mount = f'mount --bind "{corpus}" "{corpus}"'
    remount = f'mount -o remount,bind,ro "{corpus}"'
    is_read_only = f'! touch "{data}/train/written" 2>/dev/null'
    script = f'{mount} && {remount} && {is_read_only} && exec "$@"'
    command = ["unshare", "-m", "bash", "-c", script, "bash"]
    command += train_command(tmp_path / "exp", 1, *overrides)
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine does not let tests mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    manifest = read_manifest([data / "train"], sample_rate=RATE)
    assert manifest.parts[0].waves is not None
    assert card(tmp_path / "exp")["steps"] >= 1


def test_stored_features_train_a_model_that_takes_waves(data, tmp_path, run):
    copied = copy_data(data, tmp_path / "data")
    exp = tmp_path / "exp"
    layers = ["--config", CONFIG, ROOT / "conf/features/fbank.yaml"]
    pack = ["pack", copied / "train", "--features", "fbank", *layers]
    run("-m", "speakerlab", *pack)

    # Training reads nothing but the features.
    shutil.rmtree(copied / "noise")
    settings = ["--set", f"data.dir={copied}", *TINY]
    run("-m", "speakerlab", "train", "--exp", exp, *layers, *settings)
    wav = read_table(copied / "test/wav.scp")["spk8-0"]
    emb_D = speakerlab.load(exp, device="cpu").embed(wav)
    assert emb_D.shape == (32,)
    assert np.isfinite(emb_D).all()
