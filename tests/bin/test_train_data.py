"""Trainings on the data that users have: packed, parts of one long file, read-only, stored."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import ROOT, TINY
from voices import RATE, make_wave

import speakerlab
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout
from speakerlab.data.tables import read_table, write_data_dir

CONFIG = str(ROOT / "conf" / "campplus_tiny.yaml")
PCM = Layout.of_waves("pcm", sample_rate=RATE)


def weights(exp: Path) -> str:
    return hashlib.sha256((exp / "model" / "embedder.safetensors").read_bytes()).hexdigest()


def options(exp: Path, data: Path, *more: str) -> list[str]:
    return ["--exp", str(exp), "--config", CONFIG, "--set", f"data.dir={data}", *TINY, *more]


def num_steps(exp: Path) -> int:
    return json.loads((exp / "model" / "card.json").read_text())["steps"]


def write_ten_files(root: Path) -> Path:
    """5 speakers, 2 files each, of 1.5 s."""
    root.mkdir(exist_ok=True)
    wavs, speakers = {}, {}
    for number in range(10):
        name = f"s{number // 2}-{number}"
        wavs[name], speakers[name] = root / f"{name}.wav", f"s{number // 2}"
        audio.write(wavs[name], make_wave(number // 2, number, 1.5), RATE)
    write_data_dir(root / "data/train", wavs=wavs, speakers=speakers)
    check_data_dirs([root / "data/train"])
    return root / "data"


def test_packed_audio_trains_the_same_weights_and_may_come_in_the_middle(
    data, tmp_path, run, train_command
):
    """A run begun on loose files goes on from shards, bit for bit."""
    own = tmp_path / "data"
    shutil.copytree(data, own)
    loose, packed, mixed = (tmp_path / name for name in ("loose", "packed", "mixed"))
    for exp in (loose, packed):
        done = run("-m", "speakerlab", "train", *options(exp, own))
        assert done.returncode == 0, done.stderr
        if exp is loose:
            shutil.copytree(loose, mixed)
            pack_data_dir(own / "train", layout=PCM)
    assert weights(packed) == weights(loose)
    shutil.rmtree(mixed / "model")
    for path in sorted((mixed / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(path)
    done = run("-m", "speakerlab", "train", *options(mixed, own))
    assert "resuming from step" in done.stderr
    assert weights(mixed) == weights(loose)


@pytest.mark.slow
def test_half_an_hour_in_one_file_trains_by_its_segments(tmp_path, run):
    wave_S = np.concatenate([make_wave(minute % 6, 0, 60.0) for minute in range(30)])
    audio.write(tmp_path / "long.flac", wave_S, RATE)
    segments, speakers = {}, {}
    for minute in range(30):
        for number in range(4):
            name, start = f"s{minute % 6}-{minute:02d}-{number}", 60.0 * minute + 10 * number
            segments[name] = ("long", start, start + 4.0)
            speakers[name] = f"s{minute % 6}"
    folder = tmp_path / "data/train"
    wavs = {"long": tmp_path / "long.flac"}
    write_data_dir(folder, wavs=wavs, speakers=speakers, segments=segments)
    check_data_dirs([folder])
    short = ("training.num_epochs=1", "training.global_batch=64")
    done = run("-m", "speakerlab", "train", *options(tmp_path / "exp", tmp_path / "data", *short))
    assert done.returncode == 0, done.stderr
    assert num_steps(tmp_path / "exp") >= 5
    loose = read_manifest([folder], sample_rate=RATE)
    pack_data_dir(folder, layout=PCM)
    packed = read_manifest([folder], sample_rate=RATE)
    for row in range(len(loose)):
        assert np.array_equal(packed.read(row, 0, 4 * RATE), loose.read(row, 0, 4 * RATE))


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts, so needs root"
)
def test_a_corpus_on_a_read_only_file_system_trains(tmp_path, environment):
    """Recordings, tables and shards, all mounted read-only; the experiment is elsewhere."""
    data = write_ten_files(tmp_path / "corpus")
    pack_data_dir(data / "train", layout=PCM)
    words = options(tmp_path / "exp", data, "training.num_epochs=1", "data.valid_speakers=0")
    command = [sys.executable, "-m", "speakerlab", "train", *words]
    script = f'mount --bind "{tmp_path}/corpus" "{tmp_path}/corpus" && ' + (
        f'mount -o remount,bind,ro "{tmp_path}/corpus" && '
        f'! touch "{data}/train/written" 2>/dev/null && exec "$@"'
    )
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "bash", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine does not let tests mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert read_manifest([data / "train"], sample_rate=RATE).parts[0].waves is not None
    assert num_steps(tmp_path / "exp") >= 1


def test_stored_features_train_a_model_that_takes_waves(data, tmp_path, run):
    own = tmp_path / "data"
    shutil.copytree(data, own)
    layers = [CONFIG, str(ROOT / "conf/features/fbank.yaml")]
    done = run(
        "-m", "speakerlab", "pack", own / "train", "--features", "fbank", "--config", *layers
    )
    assert done.returncode == 0, done.stderr
    exp = tmp_path / "exp"
    words = ["--exp", str(exp), "--config", *layers, "--set", f"data.dir={own}", *TINY]
    shutil.rmtree(own / "noise")  # nothing but the features is read to train
    done = run("-m", "speakerlab", "train", *words)
    assert done.returncode == 0, done.stderr
    model = speakerlab.load(exp, device="cpu")
    emb_D = model.embed(read_table(own / "test/wav.scp")["s8-u0"])
    assert emb_D.shape == (32,) and np.isfinite(emb_D).all()
