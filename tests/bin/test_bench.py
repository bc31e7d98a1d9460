"""`speakerlab bench data`: crops to listen to, the same each time, and rates with every hop."""

import csv

import numpy as np
import pytest

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
    lines = bench("--seconds", "0.2").splitlines()
    assert "1 loader workers, model on" in lines[0] and lines[0].endswith("noise on the device")
    assert lines[1].startswith("loader alone: ") and lines[1].endswith(" crops/s")
    assert lines[2].startswith("campplus training: ") and lines[2].endswith("waiting for data")
    hops = ["draw", "read", "collate", "to device", "speed", "room", "noise", "telephone", "fbank"]
    assert [line.split("  ")[1].strip() for line in lines[4:]] == hops
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[4:]]
    assert abs(sum(shares) - 100) < 1 and min(shares) >= 0


def test_what_is_no_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["model", "--config", "x.yaml"])
    assert "invalid choice: 'model'" in capsys.readouterr().err
