"""Data directories on disk, and the columns they are read into."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from refusals import refused, refuses

from speakerlab.core.faults import Faults
from speakerlab.data import audio
from speakerlab.data import manifest as module
from speakerlab.data.arrays import Strings, stable_hash
from speakerlab.data.check import check_data_dirs
from speakerlab.data.manifest import read_manifest, split_valid
from speakerlab.data.tables import read_table, write_data_dir, write_table

RATE = 16000


def reverse_lines(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines.sort(reverse=True)
    path.write_text("".join(lines))


def test_strings_are_a_sequence():
    texts = ["", "plain", "größer", "日本", "with space"]
    strings = Strings.of(texts)
    assert list(strings) == texts
    assert len(strings) == 5
    assert strings[3] == "日本"
    with pytest.raises(IndexError):
        strings[5]
    assert list(Strings.of([])) == []


def test_hash_depends_on_the_text_alone():
    # written down once: it must not change with seed, process, machine or version
    assert stable_hash("spk1-0") == 17533405912219380780
    hashes = {stable_hash(f"utt{i}") for i in range(10000)}
    assert len(hashes) == 10000


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
    folder = make_data_dir(seconds=[1.0, 1.25])
    manifest = read_manifest([folder], sample_rate=RATE)
    assert manifest.speakers == ("spk0", "spk1", "spk2", "spk3")
    assert manifest.speaker_N.dtype == np.int32
    assert manifest.num_samples_N.dtype == np.int64
    assert manifest.hours == pytest.approx(4 * 2.25 / 3600)
    num_samples_of = {"0": 16000, "1": 20000}
    for row, utterance in enumerate(manifest.ids):
        expected = num_samples_of[utterance[-1]]
        assert manifest.num_samples_N[row] == expected
        speaker = manifest.speakers[manifest.speaker_N[row]]
        assert speaker == utterance[:4]
        path = Path(manifest.paths[row])
        assert path.stem == utterance


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    path.write_text(text.replace(old, new, 1))


def test_hash_of_the_manifest_sees_what_matters_and_no_paths(make_data_dir):
    folder = make_data_dir(seconds=[1.0])
    before = read_manifest([folder], sample_rate=RATE).sha256()

    wavs = folder / "wav.scp"
    text = wavs.read_text()
    wavs.write_text(text.replace(".wav", ".flac"))
    other_paths = read_manifest([folder], sample_rate=RATE).sha256()
    assert other_paths == before

    replace_once(folder / "utt2dur", "1.0", "1.1")
    other_length = read_manifest([folder], sample_rate=RATE).sha256()
    assert other_length != before

    replace_once(folder / "utt2spk", " spk3", " spk4")
    other_speaker = read_manifest([folder], sample_rate=RATE).sha256()
    assert other_speaker not in (before, other_length)


def test_segments_are_ranges_of_their_recording(tmp_path: Path):
    samples = np.arange(5 * RATE, dtype=np.int64)
    wave_S = samples.astype(np.int16)
    audio.write(tmp_path / "long.wav", wave_S, RATE)
    write_data_dir(
        tmp_path / "d",
        wavs={"rec": tmp_path / "long.wav"},
        speakers={"a": "s1", "b": "s2"},
        segments={
            "a": ("rec", 0.5, 2.0),
            "b": ("rec", 1.23456, 5.0),
        },
    )
    check_data_dirs([tmp_path / "d"])
    manifest = read_manifest([tmp_path / "d"], sample_rate=RATE)
    assert set(manifest.num_samples_N) == {24000, 60247}
    assert list(manifest.paths) == [str(tmp_path / "long.wav")] * 2

    # 1.23456 s is sample 19752.96
    row = list(manifest.ids).index("b")
    first = 19753
    assert manifest.num_samples_N[row] == 80000 - first
    expected_S = wave_S[first + 5 : first + 12]
    assert np.array_equal(manifest.read(row, 5, 7), expected_S)

    # more samples than the segment has: it is repeated
    other_row = 1 - row
    expected_S = np.resize(wave_S[8000:32000], 30000)
    assert np.array_equal(manifest.read(other_row, 0, 30000), expected_S)


def test_two_directories_are_one_set(make_data_dir):
    first = make_data_dir("a", speakers=[0, 1])
    second = make_data_dir("b", speakers=[2, 3])
    both = read_manifest([first, second], sample_rate=RATE)
    assert both.speakers == ("spk0", "spk1", "spk2", "spk3")
    assert len(both) == 12

    other_order = read_manifest([second, first], sample_rate=RATE)
    assert both.sha256() == other_order.sha256()


def test_equal_ids_of_two_directories_are_different_utterances_and_people(
    make_data_dir, caplog
):
    first = make_data_dir("a/train", speakers=[0, 1], seconds=[1.0])
    second = make_data_dir("b/train", speakers=[1, 2], seconds=[0.5])
    options = {"sample_rate": RATE, "names": ["a", "b"]}
    manifest = read_manifest([first, second], **options)
    assert manifest.speakers == ("a/spk1", "b/spk1", "spk0", "spk2")
    assert sorted(manifest.ids) == ["a/spk1-0", "b/spk1-0", "spk0-0", "spk2-0"]
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and all("spk1" in text for text in texts)
    for row, name in enumerate(manifest.ids):
        if name == "b/spk1-0":
            assert manifest.speakers[manifest.speaker_N[row]] == "b/spk1"
            assert manifest.paths[row].startswith(str(second.parent))

    shared = read_manifest([first, second], shares_speakers=[False, True], **options)
    assert shared.speakers == ("spk0", "spk1", "spk2")


def test_a_speaker_who_may_be_either_of_two_is_refused(make_data_dir):
    folders = [make_data_dir(f"{name}/train", speakers=[0, 1]) for name in "abc"]
    options = {"sample_rate": RATE, "names": ["a", "b", "c"]}
    with refuses("data.train", "spk0 of c", "a and b"):
        read_manifest(folders, shares_speakers=[False, False, True], **options)
    all_shared = read_manifest(folders, shares_speakers=[True] * 3, **options)
    assert all_shared.speakers == ("spk0", "spk1")


def test_one_recording_in_two_directories_is_refused(make_data_dir, tmp_path):
    first = make_data_dir("a", speakers=[0, 1])
    second = tmp_path / "b"
    shutil.copytree(first, second)
    with refuses(f"{first} + {second}", "with the same recording", "spk"):
        read_manifest([first, second], sample_rate=RATE)


def test_unchecked_and_changed_directories_are_refused(make_data_dir):
    folder = make_data_dir(check=False)
    with refuses(str(folder), "utt2dur", error=FileNotFoundError):
        read_manifest([folder], sample_rate=RATE)
    check_data_dirs([folder])
    table = read_table(folder / "wav.scp")
    with_another = table | {"new": table["spk0-0"]}
    without_first = dict(list(table.items())[1:])
    for wavs in (with_another, without_first):
        write_table(folder / "wav.scp", wavs)
        with refuses(f"{folder}/wav.scp", f"not those of {folder}/utt2dur"):
            read_manifest([folder], sample_rate=RATE)


def test_paths_with_spaces_and_tabs_between_columns(tmp_path: Path):
    folder = tmp_path / "my  data"
    folder.mkdir()
    for name in ("a", "b"):
        path = folder / f"the  voice {name}.wav"
        audio.write(path, np.ones(RATE, dtype=np.int16), RATE)
    (folder / "wav.scp").write_text(
        f"a {folder}/the  voice a.wav\n\nb\t {folder}/the  voice b.wav \n"
    )
    (folder / "utt2spk").write_text("a\ts1\nb s2\n")
    check_data_dirs([folder])
    manifest = read_manifest([folder], sample_rate=RATE)
    assert sorted(manifest.paths) == [
        f"{folder}/the  voice {name}.wav" for name in "ab"
    ]
    assert manifest.speakers == ("s1", "s2")


def test_of_speakers_numbers_labels_from_0(make_data_dir):
    folder = make_data_dir()
    whole = read_manifest([folder], sample_rate=RATE)
    part = whole.of_speakers(["spk3", "spk1"])
    assert part.speakers == ("spk1", "spk3")
    assert len(part) == 6
    ids = list(whole.ids)
    expected = [name for name in ids if name[:4] in ("spk1", "spk3")]
    assert list(part.ids) == expected
    for row, utterance in enumerate(part.ids):
        speaker = part.speakers[part.speaker_N[row]]
        assert speaker == utterance[:4]
        num_samples = whole.num_samples_N[ids.index(utterance)]
        assert part.num_samples_N[row] == num_samples


def test_validation_speakers_do_not_depend_on_the_other_speakers(make_data_dir):
    folder = make_data_dir(speakers=range(8), seconds=[0.5])
    manifest = read_manifest([folder], sample_rate=RATE)
    train, valid = split_valid(manifest, 3)

    for name in ("wav.scp", "utt2spk", "utt2dur"):
        reverse_lines(folder / name)
    reversed_manifest = read_manifest([folder], sample_rate=RATE)
    again, valid_again = split_valid(reversed_manifest, 3)
    assert valid.speakers == valid_again.speakers
    assert train.sha256() == again.sha256()
    assert len(valid.speakers) == 3
    all_speakers = sorted(train.speakers + valid.speakers)
    assert all_speakers == [f"spk{n}" for n in range(8)]
    shared = set(train.ids) & set(valid.ids)
    assert not shared

    # a fourth validation speaker is added to the same three
    whole = read_manifest([folder], sample_rate=RATE)
    _, valid_of_four = split_valid(whole, 4)
    assert set(valid.speakers) < set(valid_of_four.speakers)

    # a training speaker who is removed does not change them
    for removed in train.speakers:
        remaining = set(whole.speakers) - {removed}
        smaller = whole.of_speakers(remaining)
        _, valid_of_smaller = split_valid(smaller, 3)
        assert valid_of_smaller.speakers == valid.speakers


def test_validation_may_be_nobody_and_must_leave_two(make_data_dir):
    folder = make_data_dir(seconds=[0.5])
    whole = read_manifest([folder], sample_rate=RATE)
    train, valid = split_valid(whole, 0)
    assert len(train) == 4
    assert len(valid) == 0
    assert train.sha256() == whole.sha256()

    train, _ = split_valid(whole, 2)
    assert len(train.speakers) == 2
    with refuses("data.valid_speakers", 4, 3):
        split_valid(whole, 3)


def test_table_faults_name_the_line(tmp_path: Path):
    path = tmp_path / "utt2spk"
    path.write_text("a s1\nb\na s2\n")
    faults = Faults()
    assert read_table(path, faults) == {"a": "s1"}
    report = faults.report("end")
    assert refused(report, f"{path}:2", "'b'")
    assert refused(report, f"{path}:3", "duplicate id a")


def test_a_data_directory_replaces_the_old_one(tmp_path: Path):
    folder = tmp_path / "d"
    for name in ("a", "b"):
        write_data_dir(
            folder,
            wavs={name: "x.wav"},
            trials={f"trials_{name}": []},
        )
    wavs = read_table(folder / "wav.scp")
    assert wavs == {"b": str(Path("x.wav").resolve())}
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["trials_b", "wav.scp"]
    # no temporary folder remains
    assert list(tmp_path.iterdir()) == [folder]


def test_an_utterance_without_speaker_is_refused_not_made_one(make_data_dir):
    folder = make_data_dir()
    table = folder / "utt2spk"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[1:]))
    with refuses(str(table), "spk0-0"):
        read_manifest([folder], sample_rate=RATE)


def test_validation_speakers_come_from_every_directory(make_data_dir):
    large = make_data_dir("a", speakers=range(30), seconds=[0.3])
    small = make_data_dir("b", speakers=range(40, 50), seconds=[0.3])
    few = make_data_dir("c", speakers=range(60, 63), seconds=[0.3])
    manifest = read_manifest([large, small, few], sample_rate=RATE)
    train, valid = split_valid(manifest, 6)
    counts = np.bincount(valid.part_N, minlength=3)
    assert counts.tolist() == [4, 2, 0]
    assert not set(train.speakers) & set(valid.speakers)
    assert len(train.speakers) == 43 - 6


@pytest.mark.parametrize(
    ("total", "sizes", "expected"),
    [
        (12, [10, 10, 10], [4, 4, 4]),
        # The largest part keeps two of its own.
        (10, [30, 10, 10, 10, 10], [2, 2, 2, 2, 2]),
        # Too few for two of each part.
        (3, [10, 10], [2, 1]),
        (1, [10, 10], [1, 0]),
    ],
)
def test_validation_speakers_are_divided_among_directories(total, sizes, expected):
    assert module._divide(total, sizes) == expected
