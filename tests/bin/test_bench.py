"""`speakerlab bench`: its table and file; crops to listen to, the same each time."""

import csv
import re

import numpy as np
import pytest
import torch
from tiny import read_json

from speakerlab.bin import bench
from speakerlab.data import audio
from speakerlab.data.manifest import read_manifest

CHANNEL = [
    "augment.reencode_prob=0.5",
    "augment.codec_prob=0.5",
    "augment.telephone_prob=0.5",
    "augment.noise_prob=0.5",
]
PLAIN = ["augment.speeds=[1.0]", "augment.room_prob=0", "augment.noise_prob=0"]


def read_table(path):
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


@pytest.fixture
def bench_data(run, settings):
    """bench_data(*more) -> what `speakerlab bench data` on the tiny corpus printed."""

    def bench(*options):
        done = run("-m", "speakerlab", "bench", "data", *settings, *options)
        return done.stdout

    return bench


@pytest.mark.slow
def test_crops_are_the_same_each_time_and_listed_with_their_augmentation(
    bench_data, tmp_path
):
    first = tmp_path / "a"
    second = tmp_path / "b"
    for folder in (first, second):
        text = bench_data(*CHANNEL, "--seconds", "0", "--listen", folder)
        assert "10 crops" in text
        assert "crops/s" not in text
    for path in sorted(first.iterdir()):
        expected = (second / path.name).read_bytes()
        assert path.read_bytes() == expected

    rows = read_table(first / "crops.tsv")
    names = [row["file"] for row in rows]
    assert names == [f"crop-{number:02d}.wav" for number in range(10)]
    for row in rows:
        info = audio.read_info(first / row["file"])
        assert info.num_samples == 9600
        assert info.sample_rate == 16000
        if row["noises"] == "-":
            assert row["snr_db"] == "-"
            assert row["noise_kind"] == "-"
        else:
            assert row["snr_db"] != "-"
            assert row["noise_kind"] != "-"
            assert row["noises"].startswith("noise from ")

    values = {}
    for column in rows[0]:
        values[column] = {row[column] for row in rows}
    assert {"-", "mp3:16k"} <= values["reencoded_by"]
    assert "reencode" not in values
    assert values["codec"] == {"-", "mu-law", "A-law"}
    assert values["telephone_band"] == {"-", "yes"}
    assert values["speed"] == {"1", "0.9", "1.1"}
    assert values["noise_kind"] == {"-", "noise"}


def test_a_crop_without_augmentation_is_where_the_table_says(
    bench_data, data, tmp_path
):
    settings = (*PLAIN, "data.valid_speakers=0")
    bench_data(*settings, "--seconds", "0", "--listen", tmp_path)
    row = read_table(tmp_path / "crops.tsv")[3]
    wave_S = audio.read(tmp_path / row["file"])

    manifest = read_manifest([data / "train"], sample_rate=16000)
    utterance = list(manifest.ids).index(row["utterance"])
    source_S = audio.read(manifest.paths[utterance])
    # The table rounds the second: the crop begins within 80 samples of it.
    near = round(16000 * float(row["from_second"]))
    is_found = False
    for start in range(max(0, near - 80), near + 81):
        stretch_S = source_S[start : start + len(wave_S)]
        is_found = is_found or np.array_equal(stretch_S, wave_S)
    assert is_found


def test_every_hop_of_the_data_path_is_timed(bench_data):
    first, *lines, last = bench_data("--seconds", "0.1").splitlines()
    assert first.startswith(f"torch {torch.__version__}, cpu, ")
    names = [line.split()[0] for line in lines]
    hops = ["draw", "read", "collate", "to_device", "speed", "room", "noise", "fbank"]
    assert names[:2] == ["data.loader", "data.one_process"]
    expected = [f"data.hop.{hop}" for hop in hops]
    assert names[2:] == expected
    assert "crops/s 1 workers, batches of 8" in " ".join(lines[0].split())
    # The shares of the hops are the fourth column from the right.
    shares = [float(line.split()[-4].rstrip("%")) for line in lines[2:]]
    assert abs(sum(shares) - 100) < 1
    assert min(shares) >= 0


@pytest.mark.slow
def test_machine_model_and_made_up_data_are_measured(
    settings, tmp_path, capsys, monkeypatch
):
    # A quick measurement: small matrices and copies.
    monkeypatch.setattr("speakerlab.bench.machine.LARGEST_MATRIX", {"cpu": 128})
    monkeypatch.setattr("speakerlab.bench.machine.COPIED_BYTES", 1 << 20)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "rows.json"
    options = ["--model", "campplus_tiny", "--seconds", "0.02", "--json", str(path)]
    precision = ["runtime.micro_batch=4", "runtime.precision=fp32"]
    bench.main([*options, "--set", *settings[4:], *precision])

    rows = {row["name"]: row for row in read_json(path)}
    _, *lines, _ = capsys.readouterr().out.splitlines()
    assert list(rows) == [line.split()[0] for line in lines]
    for name in (
        "machine.copy",
        "machine.matmul.bf16",
        "machine.decode.flac",
        "data.loader",
        "data.one_process",
        "data.hop.read",
    ):
        assert name in rows
    for name, note in (
        ("train", r"batch 4, [\d.]+% waiting for data"),
        ("infer", "batch 4"),
    ):
        row = rows[f"{name}.campplus_tiny.fp32"]
        assert row["unit"] == "utt/s"
        assert row["ours"] > 0
        assert re.fullmatch(note, row["note"])
    assert not list(tmp_path.glob("speakerlab-*"))


@pytest.mark.parametrize(
    ("arguments", "error", "values"),
    [
        (["speed"], SystemExit, ["speed"]),
        (["train", "--profile"], SystemExit, ["--profile: "]),
        (["--seconds", "-1"], SystemExit, ["--seconds: ", "-1"]),
        (["--steps", "0"], SystemExit, ["--steps: ", "0"]),
        (["machine", "--model", "campluss"], OSError, ["campluss: ", "campplus"]),
    ],
)
def test_refusals(arguments, error, values, capsys):
    with pytest.raises(error) as caught:
        bench.main(arguments)
    text = f"{caught.value}{capsys.readouterr().err}"
    for value in values:
        assert value in text
