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
    wavs = {}
    for name, wave in waves.items():
        path = tmp_path / f"{name}.wav"
        audio.write(path, wave.astype(np.int16), RATE)
        wavs[name] = path
    write_data_dir(tmp_path / "noise", wavs=wavs)
    return tmp_path / "noise"


def test_recordings_are_in_the_order_of_their_ids_and_are_read_when_sliced(folder):
    recordings = find_recordings(folder, sample_rate=RATE)
    facts = []
    for recording in recordings:
        facts.append((recording.id, recording.kind, len(recording)))
    assert facts == [
        ("a", "noise", 50),
        ("b", "noise", 1000),
        ("c", "noise", 3000),
    ]
    for recording in recordings:
        path = folder.parent / f"{recording.id}.wav"
        assert np.array_equal(recording[:], audio.read(path))
    first, second, third = recordings
    # a slice ends with the recording
    assert third[2990:3005].tolist() == list(range(2990, 3000))
    assert len(first[60:70]) == 0

    # a recording is read when it is sliced, not before
    path = folder.parent / "b.wav"
    path.unlink()
    with refuses(str(path), error=FileNotFoundError):
        second[:5]
        recordings[1][:5]


def test_what_is_not_there_or_rejected_is_left_out(folder, tmp_path):
    missing = tmp_path / "none"
    assert find_recordings(missing, sample_rate=RATE) == ()
    (folder / "rejected.tsv").write_text("b\tb.wav\tis cut short\n")
    recordings = find_recordings(folder, sample_rate=RATE)
    assert [recording.id for recording in recordings] == ["a", "c"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"a": "music", "b": "speech"},
            "utt2kind: c must be noise, music .* got no line; correct",
        ),
        (
            {"a": "noise", "b": "hum", "c": "music"},
            "utt2kind: b must be .*, got hum; correct it",
        ),
    ],
)
def test_kinds_that_are_not_clear_are_refused(folder, table, message):
    write_table(folder / "utt2kind", table)
    with pytest.raises(ValueError, match=message):
        find_recordings(folder, sample_rate=RATE)


def test_another_rate_no_samples_and_no_file_are_refused(folder):
    path = folder.parent / "a.wav"
    with refuses(f"{folder}/wav.scp: a: {path}", "8000 Hz, got 16000"):
        find_recordings(folder, sample_rate=8000)

    path = folder.parent / "b.wav"
    no_samples = np.zeros(0, dtype=np.int16)
    audio.write(path, no_samples, RATE)
    with refuses(f"{folder}/wav.scp: b: {path}", "0 samples"):
        find_recordings(folder, sample_rate=RATE)
    path.unlink()
    with refuses(f"{folder}/wav.scp: b: {path}", "no such file"):
        find_recordings(folder, sample_rate=RATE)
