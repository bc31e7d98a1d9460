"""Banks of noise: what is refused, and the mapped file that processes share."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses

from speakerlab.data import audio
from speakerlab.data.banks import Bank, find_recordings, map_bank, read_bank
from speakerlab.data.tables import write_data_dir, write_table

RATE = 16000


@pytest.fixture
def folder(tmp_path):
    """A data directory of three noises of 50, 1,000 and 3,000 samples; the last counts up."""
    rng = np.random.default_rng(1)
    waves = {
        "a": rng.integers(-9000, 9000, 50),
        "b": rng.integers(-9000, 9000, 1000),
        "c": np.arange(3000),
    }
    for name, wave in waves.items():
        audio.write(tmp_path / f"{name}.wav", wave.astype(np.int16), RATE)
    write_data_dir(tmp_path / "noise", wavs={name: tmp_path / f"{name}.wav" for name in waves})
    return tmp_path / "noise"


def found(folder: Path):
    recordings = find_recordings(folder, sample_rate=RATE)
    assert recordings is not None
    return recordings


def same(a: Bank, b: Bank) -> bool:
    return (a.ids, a.kinds) == (b.ids, b.kinds) and all(map(np.array_equal, a, b))


def test_recordings_are_in_the_order_of_their_ids(folder):
    bank = read_bank(found(folder))
    assert bank.ids == ("a", "b", "c") and bank.kinds == ("noise",) * 3
    assert [len(wave) for wave in bank] == [50, 1000, 3000]
    assert all(
        np.array_equal(bank[i], audio.read(folder.parent / f"{n}.wav")) for i, n in enumerate("abc")
    )
    with pytest.raises(IndexError):
        bank[3]


def test_what_is_not_there_or_rejected_is_left_out(folder, tmp_path):
    assert find_recordings(tmp_path / "none", sample_rate=RATE) is None
    (folder / "rejected.tsv").write_text("b\tb.wav\tis cut short\n")
    assert found(folder).ids == ("a", "c")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": "music", "b": "speech"}, "utt2kind: c must be noise, music .* got no line; correct"),
        ({"a": "noise", "b": "hum", "c": "music"}, "utt2kind: b must be .*, got hum; correct it"),
    ],
)
def test_kinds_that_are_not_clear_are_refused(folder, table, message):
    write_table(folder / "utt2kind", table)
    with pytest.raises(ValueError, match=message):
        found(folder)


def test_another_rate_and_no_samples_are_refused(folder):
    with refuses(f"{folder.parent}/a.wav", "8000 Hz, got 16000"):
        find_recordings(folder, sample_rate=8000)
    audio.write(folder.parent / "b.wav", np.zeros(0, dtype=np.int16), RATE)
    with refuses(f"{folder.parent}/b.wav", "0 samples"):
        found(folder)


def test_a_mapped_bank_is_the_one_in_memory_and_pickles_as_its_path(folder):
    mapped = map_bank(found(folder))
    assert same(mapped, read_bank(found(folder)))
    assert mapped.path is not None and mapped.path.parent == folder
    data = pickle.dumps(mapped)
    assert len(data) < 1500 < mapped.wave_S.nbytes
    assert same(pickle.loads(data), mapped)
    assert same(pickle.loads(pickle.dumps(read_bank(found(folder)))), mapped)


def test_a_mapped_bank_is_written_once_and_again_when_a_recording_changes(folder):
    first = map_bank(found(folder))
    assert first.path is not None
    before = first.path.stat().st_mtime_ns
    assert map_bank(found(folder)).path == first.path
    assert first.path.stat().st_mtime_ns == before
    (folder / ".bank.x.npy.1.partial").write_bytes(b"left by a process that was killed")
    audio.write(folder.parent / "c.wav", np.arange(3000, dtype=np.int16) + 7, RATE)
    second = map_bank(found(folder))
    assert second.path is not None and second.path != first.path and second[2][0] == 7
    assert [path.name for path in folder.glob("*bank.*.npy*")] == [second.path.name]
    assert first[2][0] == 0  # a process that has the old one open keeps it


def map_path(folder: Path) -> str:
    return str(map_bank(found(folder)).path)


def test_processes_that_start_together_make_one_file(folder):
    with ProcessPoolExecutor(3, get_context("fork")) as pool:
        assert len(set(pool.map(map_path, [folder] * 6))) == 1
    assert len(list(folder.glob("bank.*"))) == 1


def test_a_file_that_cannot_be_made_is_read_into_memory(folder, caplog):
    (folder / ".bank.lock").mkdir()  # opening it fails as on a read-only file system
    bank = map_bank(found(folder))
    assert bank.path is None and same(bank, read_bank(found(folder)))
    assert "cannot hold a file of 0.0 GB (Is a directory); every rank" in caplog.text
