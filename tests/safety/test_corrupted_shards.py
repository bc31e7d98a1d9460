"""Damaged shards give one clear line or the right samples, never others."""

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from corrupted_audio import flip, splice
from refusals import refuses

from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import INDEX, Codec, Layout

RATE = 16000


def read_all(folder: Path) -> dict[str, np.ndarray]:
    manifest = read_manifest([folder], sample_rate=RATE)
    lengths = map(int, manifest.num_samples_N)
    return {
        manifest.ids[row]: manifest.read(row, 0, size)
        for row, size in enumerate(lengths)
    }


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip bits, replace bytes, or cut the end off."""
    kind = rng.integers(6)
    if kind == 0:
        return data[: rng.integers(len(data))]
    if kind == 1:
        return splice(data, rng)
    if kind == 2:
        at = int(rng.integers(min(len(data), 4000)))
        return data[:at] + rng.bytes(1) + data[at + 1 :]
    return flip(data, rng, 0, len(data) if kind < 5 else 4000)


@pytest.mark.parametrize("codec", ["pcm", "flac"])
@pytest.mark.parametrize("name", [f"shards/{INDEX}", "shards/shard-00000.tar"])
def test_damage_is_refused_or_harmless(make_data_dir, codec: Codec, name):
    folder: Path = make_data_dir(speakers=range(4), seconds=[0.25, 1.1, 4.3])
    truth = read_all(folder)
    pack_data_dir(folder, layout=Layout.of_waves(codec, sample_rate=RATE))
    path = folder / name
    whole = path.read_bytes()
    reasons = Counter[str]()
    for seed in range(150):
        path.write_bytes(damage(whole, np.random.default_rng(seed)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                contents = read_all(folder)
        except (ValueError, FileNotFoundError) as error:
            text = str(error)
            assert "\n" not in text and str(path) in text and "; " in text, (
                f"seed {seed}: {text}"
            )
            reasons[text.split(": ", 1)[1].partition(",")[0]] += 1
            continue
        assert contents.keys() == truth.keys(), f"seed {seed}"
        for utterance, wave_S in truth.items():
            assert np.array_equal(contents[utterance], wave_S), (
                f"seed {seed}: {utterance}"
            )
    # what a tar file has around its members is not read: damage there is harmless
    assert reasons.total() > (60 if path.suffix == ".tar" else 145), reasons
    path.write_bytes(whole)
    assert read_all(folder).keys() == truth.keys()


def test_a_missing_shard_is_named(make_data_dir):
    folder: Path = make_data_dir()
    pack_data_dir(folder, layout=Layout.of_waves("pcm", sample_rate=RATE))
    (folder / "shards/shard-00000.tar").unlink()
    with refuses(str(folder / "shards/shard-00000.tar"), error=FileNotFoundError):
        read_all(folder)
