"""Recordings of noise: what is listed, read and refused."""

import numpy as np
import pytest
from refusals import refuses

from speakerlab.data import audio
from speakerlab.data.banks import find_recordings
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


def test_recordings_are_in_the_order_of_their_ids_and_are_read_when_sliced(folder):
    found = find_recordings(folder, sample_rate=RATE)
    assert [(one.id, one.kind, len(one)) for one in found] == [
        ("a", "noise", 50),
        ("b", "noise", 1000),
        ("c", "noise", 3000),
    ]
    for one in found:
        assert np.array_equal(one[:], audio.read(folder.parent / f"{one.id}.wav"))
    assert found[2][2990:3005].tolist() == [*range(2990, 3000)]
    assert not len(found[0][60:70])
    (folder.parent / "b.wav").unlink()
    with refuses(str(folder.parent / "b.wav"), error=FileNotFoundError):
        found[1][:5]


def test_what_is_not_there_or_rejected_is_left_out(folder, tmp_path):
    assert find_recordings(tmp_path / "none", sample_rate=RATE) == ()
    (folder / "rejected.tsv").write_text("b\tb.wav\tis cut short\n")
    assert [one.id for one in find_recordings(folder, sample_rate=RATE)] == ["a", "c"]


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
        find_recordings(folder, sample_rate=RATE)


def test_another_rate_no_samples_and_no_file_are_refused(folder):
    with refuses(f"{folder}/wav.scp: a: {folder.parent}/a.wav", "8000 Hz, got 16000"):
        find_recordings(folder, sample_rate=8000)
    audio.write(folder.parent / "b.wav", np.zeros(0, dtype=np.int16), RATE)
    with refuses(f"{folder}/wav.scp: b: {folder.parent}/b.wav", "0 samples"):
        find_recordings(folder, sample_rate=RATE)
    (folder.parent / "b.wav").unlink()
    with refuses(f"{folder}/wav.scp: b: {folder.parent}/b.wav", "no such file"):
        find_recordings(folder, sample_rate=RATE)
