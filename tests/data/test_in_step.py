"""Tables read beside one another give, bit for bit, what dictionaries of them give."""

from pathlib import Path

import numpy as np
import pytest

from speakerlab.data.columns import compile_columns
from speakerlab.data.in_step import read_in_step
from speakerlab.data.strings import Strings
from speakerlab.data.tables import write_rejected, write_table

RATE = 16000
# Folders and speakers come in no order, one file lies in no folder, one name is not ASCII.
PATHS = {"a1": "/b/x.wav", "a2": "/a/y.wav", "b1": "/b/z.wav", "c1": "q.wav", "é1": "/a/é 1.wav"}
SPEAKERS = {"a1": "zoe", "a2": "bob", "b1": "zoe", "c1": "ann", "é1": "bob"}
SECONDS = {"a1": "1.5", "a2": "2.000031", "b1": "0.25", "c1": "3", "é1": "12.000000"}


def write_tables(folder: Path, **changed: str) -> Path:
    folder.mkdir()
    tables = {"wav.scp": PATHS, "utt2spk": SPEAKERS, "utt2dur": SECONDS}
    for name, table in tables.items():
        write_table(folder / name, table)
    for name, text in changed.items():
        (folder / name.replace("wav_scp", "wav.scp")).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, object]:
    columns = compile_columns(folder, sample_rate=RATE)
    arrays = {**columns.ids.arrays("id"), **columns.files.arrays()}
    for name in ("hash_N", "file_N", "start_N", "num_samples_N", "speaker_N"):
        arrays[name] = getattr(columns, name)
    kinds = {name: (array.dtype.str, array.tobytes()) for name, array in arrays.items()}
    return {**kinds, "speakers": columns.speakers, "sha256": columns.sha256}


def test_tables_in_any_order_give_the_same_columns(tmp_path):
    in_step = write_tables(tmp_path / "in_step")
    lines = (in_step / "wav.scp").read_text().splitlines(keepends=True)
    apart = write_tables(tmp_path / "apart", wav_scp="".join(reversed(lines)))
    rows = read_in_step(in_step, sample_rate=RATE)
    assert rows is not None and read_in_step(apart, sample_rate=RATE) is None
    assert contents(in_step) == contents(apart)
    found = {rows.ids[i]: int(rows.num_samples_N[i]) for i in range(5)}
    assert found == {"a1": 24000, "a2": 32000, "b1": 4000, "c1": 48000, "é1": 192000}
    assert {rows.ids[i]: rows.files[i] for i in range(5)} == PATHS
    assert {rows.ids[i]: rows.speakers[rows.speaker_N[i]] for i in range(5)} == SPEAKERS


def test_what_was_rejected_is_left_out_of_all_tables(tmp_path):
    folder = write_tables(tmp_path / "train")
    write_table(folder / "utt2dur", {k: v for k, v in SECONDS.items() if k != "b1"})
    write_rejected(folder, {"b1": ("/b/z.wav", "is broken")})
    rows = read_in_step(folder, sample_rate=RATE)
    assert rows is not None
    assert sorted(rows.ids) == ["a1", "a2", "c1", "é1"]


@pytest.mark.parametrize(
    "changed",
    [
        {"segments": "a1 a1 0 1\n"},
        {"utt2spk": "a1 zoe\na2 bob\n"},
        {"utt2spk": "a1 zoe\na2\nb1 zoe\nc1 ann\né1 bob\n"},
        {"wav_scp": "a1 x\na1 x\na2 y\nb1 z\nc1 q\né1 r\n"},
        {"wav_scp": "a1 /x.wav\na2 /x.wav\nb1 /z.wav\nc1 /q.wav\né1 /r.wav\n"},
    ],
    ids=["segments", "missing", "no value", "twice", "one file of two utterances"],
)
def test_other_tables_are_left_to_dictionaries(tmp_path, changed):
    assert read_in_step(write_tables(tmp_path / "train", **changed), sample_rate=RATE) is None


def test_strings_are_taken_in_any_order(monkeypatch):
    monkeypatch.setattr("speakerlab.data.strings.ROWS_AT_ONCE", 2)
    strings = Strings.of(["a", "", "ccc", "é"])
    assert list(strings.take(np.array([3, 2, 2, 0, 1]))) == ["é", "ccc", "ccc", "a", ""]
    assert len(strings.take(np.array([], dtype=np.int64))) == 0
