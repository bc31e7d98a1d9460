"""Columns from text and from the arrays of `speakerlab pack` are the same, or text is read."""

import os
import shutil

import numpy as np
import pytest
from voices import RATE

from speakerlab.data import columns as module
from speakerlab.data.columns import STORED, read_columns, store_columns
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.shards import Layout
from speakerlab.data.tables import read_table, write_table


@pytest.fixture
def folder(make_data_dir):
    return make_data_dir(speakers=range(3), seconds=[0.3, 0.7])


def assert_equal(ours, theirs):
    assert list(ours.ids) == list(theirs.ids)
    assert list(ours.paths) == list(theirs.paths)
    assert list(ours.speakers) == list(theirs.speakers)
    for name in module.ARRAYS:
        array = getattr(ours, name)
        expected = getattr(theirs, name)
        assert array.dtype == expected.dtype
        assert np.array_equal(array, expected)
    assert ours.sha256 == theirs.sha256


def test_packing_stores_what_the_text_says(folder, monkeypatch):
    text = read_columns(folder, sample_rate=RATE)
    pack_data_dir(folder, layout=Layout.of_waves("pcm", sample_rate=RATE))
    assert (folder / STORED).is_dir()
    monkeypatch.setattr(module, "_parse", None)
    assert_equal(read_columns(folder, sample_rate=RATE), text)
    manifest = read_manifest([folder], sample_rate=RATE)
    assert manifest.speakers == ("spk0", "spk1", "spk2")
    assert len(manifest.read(0, 0, 100)) == 100


def test_a_copy_is_recognised_by_its_content(folder, tmp_path, monkeypatch):
    store_columns(folder, sample_rate=RATE)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for table in copy.glob("*"):
        os.utime(table, ns=(0, 0))
    monkeypatch.setattr(module, "_parse", None)
    read_columns(copy, sample_rate=RATE)


@pytest.mark.parametrize("name", ["utt2spk", "wav.scp", "utt2dur"])
def test_after_a_change_of_a_table_the_text_is_read(folder, name):
    store_columns(folder, sample_rate=RATE)
    table = read_table(folder / name)
    first = min(table)
    if name == "utt2dur":
        table[first] = "0.2"
    else:
        table[first] = table[max(table)]
    write_table(folder / name, table)
    changed = read_columns(folder, sample_rate=RATE)
    row = list(changed.ids).index(first)
    values = {
        "utt2spk": changed.speakers[changed.speaker_N[row]],
        "wav.scp": changed.paths[row],
        "utt2dur": f"{changed.num_samples_N[row] / RATE:g}",
    }
    assert values[name] == table[first]

    # Storing again makes them current.
    store_columns(folder, sample_rate=RATE)
    assert_equal(read_columns(folder, sample_rate=RATE), changed)


@pytest.mark.parametrize("name", ["facts.json", "ids.blob.npy", "hash_N.npy"])
@pytest.mark.parametrize("harm", ["cut", "missing", "other"])
def test_damaged_arrays_are_ignored_with_a_warning(folder, name, harm, caplog):
    text = read_columns(folder, sample_rate=RATE)
    store_columns(folder, sample_rate=RATE)
    file = folder / STORED / name
    content = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if harm == "cut" else b"[1, 2]")
    assert_equal(read_columns(folder, sample_rate=RATE), text)
    if (name, harm) != ("facts.json", "missing"):
        assert "reading the text tables" in caplog.text


def test_arrays_of_another_rate_are_ignored(folder):
    """A directory without a record of its check has no rate of its own."""
    at_8_kHz = read_columns(folder, sample_rate=8000)
    store_columns(folder, sample_rate=RATE)
    assert_equal(read_columns(folder, sample_rate=8000), at_8_kHz)
