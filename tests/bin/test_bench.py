"""`speakerlab bench`: its table and file; crops to listen to, the same each time."""

import csv
import json

import numpy as np
import pytest
import torch

from speakerlab.bin.bench import parse
from speakerlab.data import audio
from speakerlab.data.manifest import read_manifest

CHANNEL = ["augment.codec_prob=0.5", "augment.telephone_prob=0.5", "augment.noise_prob=0.5"]
PLAIN = [
    "augment.speeds=[1.0]",
    "augment.room_prob=0",
    "augment.noise_prob=0",
    "data.valid_speakers=0",
]


def read_table(path):
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines, delimiter="\t"))


@pytest.fixture
def bench(run, settings):
    """bench(*more) -> what `speakerlab bench data` on the tiny corpus printed."""

    def run_bench(*more) -> str:
        done = run("-m", "speakerlab", "bench", "data", *settings, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_bench


@pytest.mark.slow
def test_ten_crops_are_written_with_what_was_done_to_each(bench, tmp_path):
    text = bench(*CHANNEL, "--seconds", "0", "--listen", str(tmp_path / "a"))
    assert "10 crops, and crops.tsv says what was done to each" in text and "crops/s" not in text
    bench(*CHANNEL, "--seconds", "0", "--listen", str(tmp_path / "b"))
    rows = read_table(tmp_path / "a" / "crops.tsv")
    assert [row["file"] for row in rows] == [f"crop-{i:02d}.wav" for i in range(10)]
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    for row in rows:
        info = audio.read_info(tmp_path / "a" / row["file"])
        assert (info.num_samples, info.sample_rate) == (9600, 16000)
        assert (row["noises"] == "-") == (row["snr_db"] == "-") == (row["noise_kind"] == "-")
        assert row["noises"] == "-" or row["noises"].startswith("noise from ")
    seen = {key: {row[key] for row in rows} for key in rows[0]}
    assert seen["codec"] == {"-", "mu-law", "A-law"} and seen["telephone_band"] == {"-", "yes"}
    assert seen["speed"] == {"1", "0.9", "1.1"} and seen["noise_kind"] == {"-", "noise"}


def test_a_crop_nothing_was_done_to_is_where_the_table_says(bench, data, tmp_path):
    bench(*PLAIN, "--seconds", "0", "--listen", str(tmp_path))
    manifest = read_manifest([data / "train"], sample_rate=16000)
    row = read_table(tmp_path / "crops.tsv")[3]
    wave_S = audio.read(tmp_path / row["file"])
    source_S = audio.read(manifest.paths[list(manifest.ids).index(row["utterance"])])
    near = round(16000 * float(row["from_second"]))
    stretches = (source_S[max(0, near + shift) :][: len(wave_S)] for shift in range(-80, 81))
    assert any(np.array_equal(stretch, wave_S) for stretch in stretches)


def test_every_hop_and_both_rates_are_printed(bench):
    first, *lines, last = bench("--seconds", "0.2").splitlines()
    assert first.startswith(f"torch {torch.__version__}, cpu, 1 threads, ")
    names = [line.split()[0] for line in lines]
    hops = ["draw", "read", "collate", "to_device", "speed", "room", "noise", "fbank"]
    assert names[:3] == ["data.loader", "data.training.campplus", "data.one_process"]
    assert names[3:] == [f"data.hop.{hop}" for hop in hops]
    assert "crops/s 1 workers, batches of 8" in " ".join(lines[0].split())
    assert lines[1].endswith("of it waiting for data")
    shares = [float(line.split()[-4].rstrip("%")) for line in lines[3:]]
    assert abs(sum(shares) - 100) < 1 and min(shares) >= 0
    assert last.endswith(" s in all")


def test_a_model_is_set_beside_the_machine_and_its_own_convolutions(run, settings, tmp_path):
    """`all` without recordings: machine, model and data, the figures that the file has."""
    small = settings[settings.index("--set") + 1 :]
    words = ["--seconds", "0.05", "--json", tmp_path / "rows.json", "--set", *small[1:]]
    words += ["runtime.micro_batch=4", "runtime.precision=fp32"]
    done = run("-m", "speakerlab", "bench", "--model", "campplus_tiny", *words)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    printed = [line.split()[0] for line in done.stdout.splitlines()[1:-1]]
    assert list(rows) == printed
    assert {"machine.copy", "machine.matmul.bf16", "machine.decode.flac"} <= rows.keys()
    assert {"data.loader", "data.training.campplus_tiny", "data.hop.read"} <= rows.keys()
    for name in ("train.campplus_tiny.fp32", "infer.campplus_tiny.fp32"):
        row = rows[name]
        assert (row["unit"], row["peer"], row["ratio"]) == ("utt/s", None, None)
        assert row["ours"] > 0 and row["gflops"] > 0 and row["note"] == "batch 4"
        assert 0 < row["share"] < 1.5  # the rest of the model takes time as well


def test_what_is_no_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["speed"])
    assert "invalid choice: 'speed'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["train", "--profile"])
    assert "--profile: goes with train and --config" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--seconds: must not be below 0, got -1"):
        parse(["--seconds", "-1"])


def test_a_model_that_is_not_there_is_told_in_one_line(run):
    done = run("-m", "speakerlab", "bench", "machine", "--model", "campluss")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "--model: no conf/campluss.yaml" in done.stderr and "campplus" in done.stderr
