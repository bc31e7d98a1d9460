"""Data directories on disk, and the columns they are read into."""

from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses

from speakerlab.core.faults import Faults
from speakerlab.data import audio
from speakerlab.data.arrays import Strings, stable_hash
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest, split_valid
from speakerlab.data.tables import read_table, write_data_dir, write_table

RATE = 16000


def reverse_lines(path: Path) -> None:
    path.write_text("".join(sorted(path.read_text().splitlines(keepends=True), reverse=True)))


def test_strings_are_a_sequence():
    words = ["", "plain", "größer", "日本", "with space"]
    strings = Strings.of(words)
    assert list(strings) == words
    assert len(strings) == 5
    assert strings[3] == "日本"
    with pytest.raises(IndexError):
        strings[5]
    assert list(Strings.of([])) == []


def test_hash_depends_on_the_text_alone():
    # written down once: it must not change with seed, process, machine or version
    assert stable_hash("spk1-0") == 17533405912219380780
    assert len({stable_hash(f"utt{i}") for i in range(10000)}) == 10000


def test_rows_are_in_the_order_of_their_hash(make_data_dir):
    folder = make_data_dir(seconds=[1.0, 1.25])
    before = read_manifest([folder], sample_rate=RATE)
    ids = list(before.ids)
    assert len(ids) == 8
    assert ids == sorted(ids, key=stable_hash)
    assert ids != sorted(ids)
    for name in ("wav.scp", "utt2spk", "utt2dur"):
        reverse_lines(folder / name)
    after = read_manifest([folder], sample_rate=RATE)
    assert after.sha256() == before.sha256()
    assert list(after.paths) == list(before.paths)


def test_columns(make_data_dir):
    manifest = read_manifest([make_data_dir(seconds=[1.0, 1.25])], sample_rate=RATE)
    assert manifest.speakers == ("spk0", "spk1", "spk2", "spk3")
    assert manifest.speaker_N.dtype == np.int32
    assert manifest.num_samples_N.dtype == np.int64
    assert manifest.hours == pytest.approx(4 * 2.25 / 3600)
    for row, utterance in enumerate(manifest.ids):
        assert manifest.num_samples_N[row] == {"0": 16000, "1": 20000}[utterance[-1]]
        assert manifest.speakers[manifest.speaker_N[row]] == utterance[:4]
        assert Path(manifest.paths[row]).stem == utterance


def test_hash_of_the_manifest_sees_what_matters_and_no_paths(make_data_dir):
    folder = make_data_dir(seconds=[1.0])
    hashes = {read_manifest([folder], sample_rate=RATE).sha256()}
    wavs = folder / "wav.scp"
    wavs.write_text(wavs.read_text().replace(".wav", ".flac"))
    hashes.add(read_manifest([folder], sample_rate=RATE).sha256())
    assert len(hashes) == 1
    for name, old, new in (("utt2dur", "1.0", "1.1"), ("utt2spk", " spk3", " spk4")):
        path = folder / name
        path.write_text(path.read_text().replace(old, new, 1))
        hashes.add(read_manifest([folder], sample_rate=RATE).sha256())
    assert len(hashes) == 3


def test_segments_are_ranges_of_their_recording(tmp_path: Path):
    wave_S = np.arange(5 * RATE, dtype=np.int64).astype(np.int16)
    audio.write(tmp_path / "long.wav", wave_S, RATE)
    write_data_dir(
        tmp_path / "d",
        wavs={"rec": tmp_path / "long.wav"},
        speakers={"a": "s1", "b": "s2"},
        segments={"a": ("rec", 0.5, 2.0), "b": ("rec", 1.23456, 5.0)},
    )
    check_data_dirs([tmp_path / "d"])
    manifest = read_manifest([tmp_path / "d"], sample_rate=RATE)
    row = list(manifest.ids).index("b")
    first = 19753  # 1.23456 s is sample 19752.96
    assert np.array_equal(manifest.read(row, 5, 7), wave_S[first + 5 : first + 12])
    assert manifest.num_samples_N[row] == 80000 - 19753
    assert set(manifest.num_samples_N) == {24000, 60247}
    assert np.array_equal(manifest.read(1 - row, 0, 30000), np.resize(wave_S[8000:32000], 30000))
    assert list(manifest.paths) == [str(tmp_path / "long.wav")] * 2


def test_two_directories_are_one_set(make_data_dir):
    dirs = [make_data_dir("a", speakers=[0, 1]), make_data_dir("b", speakers=[2, 3])]
    both = read_manifest(dirs, sample_rate=RATE)
    assert both.speakers == ("spk0", "spk1", "spk2", "spk3")
    assert len(both) == 12
    assert both.sha256() == read_manifest(dirs[::-1], sample_rate=RATE).sha256()


def test_two_directories_that_share_an_id_are_refused(make_data_dir):
    dirs = [make_data_dir("a", speakers=[0, 1]), make_data_dir("b", speakers=[1, 2])]
    with refuses(" + ".join(map(str, dirs)), "spk1-0"):
        read_manifest(dirs, sample_rate=RATE)


def test_unchecked_and_changed_directories_are_refused(make_data_dir):
    folder = make_data_dir(check=False)
    with refuses(str(folder), "utt2dur", error=FileNotFoundError):
        read_manifest([folder], sample_rate=RATE)
    check_data_dirs([folder])
    table = read_table(folder / "wav.scp")
    for wavs in ({**table, "new": table["spk0-0"]}, {k: table[k] for k in list(table)[1:]}):
        write_table(folder / "wav.scp", wavs)
        with refuses(f"{folder}/wav.scp", f"not those of {folder}/utt2dur"):
            read_manifest([folder], sample_rate=RATE)


def test_paths_with_spaces_and_tabs_between_columns(tmp_path: Path):
    folder = tmp_path / "my  data"
    folder.mkdir()
    for name in ("a", "b"):
        audio.write(folder / f"the  voice {name}.wav", np.ones(RATE, dtype=np.int16), RATE)
    (folder / "wav.scp").write_text(
        f"a {folder}/the  voice a.wav\n\nb\t {folder}/the  voice b.wav \n"
    )
    (folder / "utt2spk").write_text("a\ts1\nb s2\n")
    check_data_dirs([folder])
    manifest = read_manifest([folder], sample_rate=RATE)
    assert sorted(manifest.paths) == [f"{folder}/the  voice {name}.wav" for name in "ab"]
    assert manifest.speakers == ("s1", "s2")


def test_of_speakers_numbers_labels_from_0(make_data_dir):
    whole = read_manifest([make_data_dir()], sample_rate=RATE)
    part = whole.of_speakers(["spk3", "spk1"])
    assert part.speakers == ("spk1", "spk3")
    assert len(part) == 6
    assert list(part.ids) == [u for u in whole.ids if u[:4] in ("spk1", "spk3")]
    for row, utterance in enumerate(part.ids):
        assert part.speakers[part.speaker_N[row]] == utterance[:4]
        assert part.num_samples_N[row] == whole.num_samples_N[list(whole.ids).index(utterance)]


def test_validation_speakers_do_not_depend_on_the_other_speakers(make_data_dir):
    folder = make_data_dir(speakers=range(8), seconds=[0.5])
    train, valid = split_valid(read_manifest([folder], sample_rate=RATE), 3)
    for name in ("wav.scp", "utt2spk", "utt2dur"):
        reverse_lines(folder / name)
    again, valid_again = split_valid(read_manifest([folder], sample_rate=RATE), 3)
    assert valid.speakers == valid_again.speakers
    assert train.sha256() == again.sha256()
    assert len(valid.speakers) == 3
    assert sorted(train.speakers + valid.speakers) == [f"spk{n}" for n in range(8)]
    assert not set(train.ids) & set(valid.ids)
    # one more keeps those there were, and so does a corpus that lost a speaker
    whole = read_manifest([folder], sample_rate=RATE)
    assert set(valid.speakers) < set(split_valid(whole, 4)[1].speakers)
    for lost in train.speakers:
        rest = whole.of_speakers(set(whole.speakers) - {lost})
        assert split_valid(rest, 3)[1].speakers == valid.speakers


def test_validation_may_be_nobody_and_must_leave_two(make_data_dir):
    whole = read_manifest([make_data_dir(seconds=[0.5])], sample_rate=RATE)
    train, valid = split_valid(whole, 0)
    assert (len(train), len(valid)) == (4, 0)
    assert train.sha256() == whole.sha256()
    assert len(split_valid(whole, 2)[0].speakers) == 2
    with refuses("data.valid_speakers", 4, 3):
        split_valid(whole, 3)


def test_table_faults_name_the_line(tmp_path: Path):
    path = tmp_path / "utt2spk"
    path.write_text("a s1\nb\na s2\n")
    faults = Faults()
    assert read_table(path, faults) == {"a": "s1"}
    report = faults.report("end")
    assert refused(report, f"{path}:2", "'b'") and refused(report, f"{path}:3", "duplicate id a")


def test_a_data_directory_replaces_the_old_one(tmp_path: Path):
    for name in ("a", "b"):
        write_data_dir(tmp_path / "d", wavs={name: "x.wav"}, trials={f"trials_{name}": []})
    assert read_table(tmp_path / "d/wav.scp") == {"b": str(Path("x.wav").resolve())}
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["trials_b", "wav.scp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


def test_an_utterance_without_speaker_is_refused_not_made_one(make_data_dir):
    folder = make_data_dir()
    lines = (folder / "utt2spk").read_text().splitlines(keepends=True)
    (folder / "utt2spk").write_text("".join(lines[1:]))
    with refuses(str(folder / "utt2spk"), "spk0-0"):
        read_manifest([folder], sample_rate=RATE)
