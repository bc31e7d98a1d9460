"""`speakerlab bench`: its table and file; crops to listen to, the same each time."""

import csv
import json
import re

import numpy as np
import pytest
import torch

from speakerlab.bin import bench
from speakerlab.data import audio
from speakerlab.data.manifest import read_manifest

CHANNEL = [f"augment.{name}_prob=0.5" for name in ("reencode", "codec", "telephone", "noise")]
PLAIN = ["augment.speeds=[1.0]", "augment.room_prob=0", "augment.noise_prob=0"]


def read_table(path):
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


@pytest.fixture
def bench_data(run, settings):
    """bench_data(*more) -> what `speakerlab bench data` on the tiny corpus printed."""
    return lambda *more: run("-m", "speakerlab", "bench", "data", *settings, *more).stdout


def test_crops_are_the_same_each_time_and_listed_with_their_augmentation(bench_data, tmp_path):
    for name in ("a", "b"):
        text = bench_data(*CHANNEL, "--seconds", "0", "--listen", tmp_path / name)
        assert "10 crops" in text and "crops/s" not in text
    rows = read_table(tmp_path / "a/crops.tsv")
    assert [row["file"] for row in rows] == [f"crop-{i:02d}.wav" for i in range(10)]
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    for row in rows:
        info = audio.read_info(tmp_path / "a" / row["file"])
        assert (info.num_samples, info.sample_rate) == (9600, 16000)
        assert (row["noises"] == "-") == (row["snr_db"] == "-") == (row["noise_kind"] == "-")
        assert row["noises"] == "-" or row["noises"].startswith("noise from ")
    seen = {key: {row[key] for row in rows} for key in rows[0]}
    assert {"-", "mp3:16k"} <= seen["reencoded_by"] and "reencode" not in seen
    assert seen["codec"] == {"-", "mu-law", "A-law"} and seen["telephone_band"] == {"-", "yes"}
    assert seen["speed"] == {"1", "0.9", "1.1"} and seen["noise_kind"] == {"-", "noise"}


def test_a_crop_without_augmentation_is_where_the_table_says(bench_data, data, tmp_path):
    bench_data(*PLAIN, "data.valid_speakers=0", "--seconds", "0", "--listen", tmp_path)
    manifest = read_manifest([data / "train"], sample_rate=16000)
    row = read_table(tmp_path / "crops.tsv")[3]
    wave_S = audio.read(tmp_path / row["file"])
    source_S = audio.read(manifest.paths[list(manifest.ids).index(row["utterance"])])
    near = round(16000 * float(row["from_second"]))
    stretches = (source_S[max(0, near + shift) :][: len(wave_S)] for shift in range(-80, 81))
    assert any(np.array_equal(stretch, wave_S) for stretch in stretches)


def test_every_hop_of_the_data_path_is_timed(bench_data):
    first, *lines, last = bench_data("--seconds", "0.1").splitlines()
    assert first.startswith(f"torch {torch.__version__}, cpu, ")
    names = [line.split()[0] for line in lines]
    hops = ["draw", "read", "collate", "to_device", "speed", "room", "noise", "fbank"]
    assert names[:2] == ["data.loader", "data.one_process"]
    assert names[2:] == [f"data.hop.{hop}" for hop in hops]
    assert "crops/s 1 workers, batches of 8" in " ".join(lines[0].split())
    shares = [float(line.split()[-4].rstrip("%")) for line in lines[2:]]
    assert abs(sum(shares) - 100) < 1 and min(shares) >= 0


def test_machine_model_and_made_up_data_are_measured(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("speakerlab.bench.machine.MATRIX", {"cpu": 128})
    monkeypatch.setattr("speakerlab.bench.machine.COPIED_BYTES", 1 << 20)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ["--seconds", "0.02", "--json", str(tmp_path / "rows.json"), "--set", *settings[4:]]
    words += ["runtime.micro_batch=4", "runtime.precision=fp32"]
    bench.main(["--model", "campplus_tiny", *words])
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert list(rows) == printed
    assert {"machine.copy", "machine.matmul.bf16", "machine.decode.flac"} <= rows.keys()
    assert {"data.loader", "data.one_process", "data.hop.read"} <= rows.keys()
    for name, note in (("train", r"batch 4, [\d.]+% waiting for data"), ("infer", "batch 4")):
        row = rows[f"{name}.campplus_tiny.fp32"]
        assert row["unit"] == "utt/s" and row["ours"] > 0 and re.fullmatch(note, row["note"])
    assert not list(tmp_path.glob("speakerlab-*"))


@pytest.mark.parametrize(
    ("words", "error", "values"),
    [
        (["speed"], SystemExit, ["speed"]),
        (["train", "--profile"], SystemExit, ["--profile: "]),
        (["--seconds", "-1"], SystemExit, ["--seconds: ", "-1"]),
        (["--steps", "0"], SystemExit, ["--steps: ", "0"]),
        (["machine", "--model", "campluss"], OSError, ["campluss: ", "campplus"]),
    ],
)
def test_refusals(words, error, values, capsys):
    with pytest.raises(error) as caught:
        bench.main(words)
    text = f"{caught.value}{capsys.readouterr().err}"
    assert all(value in text for value in values)
