"""The benchmarks, on inputs so small that their figures mean nothing.

SPEAKERLAB_3DSPEAKER=DIR gives a checkout of 3D-Speaker to compare with.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from voices import RATE, make_noise, make_wave

from benchmarks.stopwatch import Stopwatch
from speakerlab.data import audio

ROOT = Path(__file__).parents[2]
PEER = os.environ.get("SPEAKERLAB_3DSPEAKER", "")
QUICK = ["--device=cpu", "--threads=1", "--micro-batch=2", "--frames=40", "--seconds=0.1"]
FP32 = ["--precisions", "fp32"]
ALWAYS = ["name", "ours", "peer", "ratio", "unit"]


def run(*words: str, script: str = "models.py") -> subprocess.CompletedProcess[str]:
    quick = QUICK if script == "models.py" else []
    command = [sys.executable, f"benchmarks/{script}", *quick, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def read_rows(
    done: subprocess.CompletedProcess[str], path: Path, unit: str = "utt/s"
) -> dict[str, dict]:
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert all(list(row)[:5] == ALWAYS for row in rows)
    assert all(row["ours"] > 0 and row["unit"] == unit for row in rows)
    assert all(row["name"] in done.stdout for row in rows)
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("model", ["campplus", pytest.param("eres2net", marks=pytest.mark.slow)])
def test_ours_alone(tmp_path, model):
    path = tmp_path / "rows.json"
    less = ["--no-share"] if model == "campplus" else []  # whose layers take seconds
    rows = read_rows(run("--models", model, *FP32, *less, "--json", str(path)), path)
    assert list(rows) == [f"infer.{model}.fp32", f"train.{model}.fp32"]
    assert all(row["peer"] is None and row["ratio"] is None for row in rows.values())
    for row in rows.values():
        assert ("share" not in row) if less else 0 < row["share"] < 2  # of few turns, each a moment
    if sys.platform == "linux":  # weights, gradients, momentum; weights alone
        megabytes = 4 * (7.2 if model == "campplus" else 6.6)
        infer, train = (row["peak_mib"] for row in rows.values())
        assert 3 * megabytes < train < 500 and megabytes < infer < train


@pytest.mark.parametrize("script", ["models.py", "data.py"])
def test_a_peer_that_is_none_is_refused(tmp_path, script):
    done = run("--peer", str(tmp_path), script=script)
    assert done.returncode != 0
    assert "--peer: must be a checkout of 3D-Speaker" in done.stderr
    assert f", got {tmp_path}" in done.stderr


# A package of the peer's layout whose model is ours, its embeddings multiplied by FACTOR.
APPENDED = "__path__.append({path!r})\n"
IMITATION = """
import importlib.util
spec = importlib.util.spec_from_file_location("ours", {path!r})
ours = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ours)

class CAMPPlus(ours.CAMPPlus):
    def __init__(self, feat_dim, embedding_size):
        super().__init__(feat_dim=feat_dim, embed_dim=embedding_size)

    def forward(self, feats_BTF):
        return {factor} * super().forward(feats_BTF)
"""


@pytest.mark.parametrize("factor", [1, 1.00001])
def test_only_sides_that_are_equal_are_timed(tmp_path, factor):
    package = ROOT / "speakerlab"
    models = tmp_path / "speakerlab/models"
    (models / "campplus").mkdir(parents=True)
    (tmp_path / "speakerlab/__init__.py").write_text(APPENDED.format(path=str(package)))
    (models / "__init__.py").write_text(APPENDED.format(path=str(package / "models")))
    source = IMITATION.format(path=str(package / "models/campplus.py"), factor=factor)
    (models / "campplus/__init__.py").touch()
    (models / "campplus/DTDNN.py").write_text(source)
    path = tmp_path / "rows.json"
    words = ["--models", "campplus", "--work", "infer", "--no-share", "--json", str(path)]
    done = run("--peer", str(tmp_path), *words)
    if factor == 1:
        rows = read_rows(done, path)
        beside = [f"infer.campplus.{kind}" for kind in ("fp32", "bf16", "bf16.peer_bf16")]
        assert list(rows) == beside
        for row in rows.values():
            assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
            assert row["quartiles"][0] <= row["quartiles"][1]
    else:
        assert done.returncode != 0 and not path.exists()
        assert "embeddings are not equal; nothing was timed" in done.stderr


@pytest.mark.skipif(not PEER, reason="SPEAKERLAB_3DSPEAKER is not set")
def test_beside_3dspeaker(tmp_path):
    path = tmp_path / "rows.json"
    words = ["--models", "campplus", "eres2net", *FP32, "--no-share", "--json", str(path)]
    rows = read_rows(run("--peer", PEER, *words), path)
    assert "train.campplus.fp32.peer_stores" in rows
    assert len(rows) == 5
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])


@pytest.fixture
def data_words(tmp_path) -> list[str]:
    """Options of data.py: six recordings, a noise, a room, and little work."""
    for speaker in range(3):
        (tmp_path / f"audio/{speaker}").mkdir(parents=True)
        for take in range(2):
            path = tmp_path / f"audio/{speaker}/{take}.flac"
            audio.write(path, make_wave(speaker, take, 1.5), RATE)
    for name in ("noise", "rirs"):
        (tmp_path / name).mkdir()
    audio.write(tmp_path / "noise/hiss.wav", audio.to_int16(make_noise(2.0)[0].numpy()), RATE)
    room_S = make_noise(0.1)[0].numpy()
    room_S[0] = 0.9
    audio.write(tmp_path / "rirs/hall.wav", audio.to_int16(room_S), RATE)
    folders = [f"--{name}={tmp_path / name}" for name in ("audio", "noise", "rirs")]
    small = ["--crop-seconds=1", "--micro-batch=4", "--seconds=0.1", "--hop-steps=8"]
    return [*folders, *small, f"--json={tmp_path / 'rows.json'}"]


def numbers(done: subprocess.CompletedProcess[str], name: str) -> list[float]:
    """What stands in a line of the table of hops: where there are times, no shares."""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{name}  ")]
    without_shares = re.sub(r"\([^)]*\)", "", line.removeprefix(name))
    return [float(number) for number in re.findall(r"\d+", without_shares)]


def test_data_of_every_source_alone(tmp_path, data_words):
    done = run(*data_words, script="data.py")
    rows = read_rows(done, tmp_path / "rows.json", unit="crops/s")
    works = ("data.to_device", "data.full_cpu")
    assert list(rows) == [work + source for source in (".flac", ".wav", "") for work in works]
    assert all(row["peer"] is None and row["ratio"] is None for row in rows.values())
    for source in (".flac", ".wav", ""):
        assert rows[f"data.to_device{source}"]["ours"] > rows[f"data.full_cpu{source}"]["ours"]
    for hop in ("read", "draw", "collate", "speed", "room", "noise", "fbank"):
        micros = numbers(done, hop)
        assert len(micros) == 3 and min(micros) > 0, hop
    for draw in ("speed", "room", "noise"):  # 2/3 and 0.55 of 32 crops
        shares = numbers(done, f"{draw} drawn")
        assert len(shares) == 3 and min(shares) > 25 and max(shares) < 95, draw
    if sys.platform == "linux":  # 0.9 to 1.1 s of 32 kB; from shards whole seconds
        flac, wav, shard = numbers(done, "kB read a crop")
        assert 20 < flac < 100 and 20 < wav < shard < 100


# The parts of 3D-Speaker that data.py uses, doing nothing but reading; features as it makes them.
PEER_PROCESSOR = """
import torchaudio
from torchaudio.compliance import kaldi

class WavReader:
    def __init__(self, sample_rate, duration, speed_pertub):
        self.num_samples = int(duration * sample_rate)

    def __call__(self, path):
        return torchaudio.load(path)[0][0, : self.num_samples], 0

class SpkLabelEncoder:
    def __init__(self, data_file):
        pass

class SpkVeriAug:
    def __init__(self, prob, noise_file, reverb_file):
        self.prob = prob

    def __call__(self, wave_S):
        return wave_S

class FBank:
    def __init__(self, num_bins, sample_rate, mean_nor):
        self.num_bins = num_bins

    def __call__(self, wave_S):
        feats_TF = kaldi.fbank(wave_S[None], num_mel_bins=self.num_bins, dither=0.0)
        return {factor} * (feats_TF - feats_TF.mean(0))
"""
PEER_DATASET = """
import csv

class WavSVDataset:
    def __init__(self, data_file, parts):
        with open(data_file) as file:
            self.data_points = {{row.pop("ID"): row for row in csv.DictReader(file)}}
        self.rows, self.parts = list(self.data_points.values()), parts

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        wave_S, _ = self.parts["wav_reader"](self.rows[index]["path"])
        return self.parts["feature_extractor"](self.parts["augmentations"](wave_S)), 0
"""


@pytest.mark.parametrize("factor", [1, 1.1])
def test_only_chains_of_equal_features_are_timed(tmp_path, data_words, factor):
    package = tmp_path / "peer/speakerlab"
    sources = {
        "process/processor.py": PEER_PROCESSOR,
        "process/augmentation.py": "def addreverb(): ...\ndef addnoise(): ...\n",
        "dataset/dataset.py": PEER_DATASET,
    }
    for name, source in sources.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source.format(factor=factor))
    done = run(*data_words, "--source=wav", f"--peer={tmp_path / 'peer'}", script="data.py")
    if factor == 1:
        rows = read_rows(done, tmp_path / "rows.json", unit="crops/s")
        assert list(rows) == ["data.to_device.wav", "data.full_cpu.wav"]
        for row in rows.values():
            assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
    else:
        assert done.returncode != 0 and not (tmp_path / "rows.json").exists()
        assert "the features are not equal; nothing was timed" in done.stderr


@pytest.mark.skipif(not PEER, reason="SPEAKERLAB_3DSPEAKER is not set")
def test_data_beside_3dspeaker(tmp_path, data_words):
    done = run(*data_words, f"--peer={PEER}", script="data.py")
    rows = read_rows(done, tmp_path / "rows.json", unit="crops/s")
    assert len(rows) == 6
    assert min(row["ratio"] for row in rows.values()) > 0
    assert len(numbers(done, "speed drawn")) == 4 and min(numbers(done, "fbank")) > 0


def test_audio_that_is_not_there_is_refused(tmp_path):
    done = run(f"--audio={tmp_path / 'none'}", script="data.py")
    assert f"--audio: must be a folder, got {tmp_path / 'none'}" in done.stderr
    assert done.returncode != 0


def test_synthetic_audio_where_there_is_none(tmp_path):
    words = [f"--folder={tmp_path}", "--crop-seconds=3"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/data_corpus.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts == {"utterances": 40, "seconds": 8.0, "speakers": 10}
    assert len((tmp_path / "clips/wav.scp").read_text().splitlines()) == 8
    wavs, flacs = (
        (tmp_path / name / "wav.scp").read_text().splitlines() for name in ("wav", "flac")
    )
    paths = [line.split()[1] for line in (wavs[7], flacs[7])]
    assert Path(paths[0]).suffix == ".wav" and Path(paths[1]).suffix == ".flac"
    assert (audio.read(paths[0]) == audio.read(paths[1])).all()


class Works:
    def inner(self) -> None:
        time.sleep(0.05)

    def outer(self) -> str:
        self.inner()
        time.sleep(0.02)
        return "done"


def test_a_hop_is_timed_without_the_hops_within():
    watch, plain = Stopwatch(), Works.inner
    with watch.watching([("outer", Works, "outer"), ("inner", Works, "inner")]):
        assert Works().outer() == "done"
    assert Works.inner is plain
    assert watch.calls == {"outer": 1, "inner": 1}
    assert watch.seconds["inner"] >= 0.05
    assert 0.02 <= watch.seconds["outer"] < watch.seconds["inner"]
