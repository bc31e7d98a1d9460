"""Unusable recordings of a corpus are listed with a reason, and the others are used."""

import os
from pathlib import Path

import numpy as np
import pytest
from corrupted_audio import clean_wave, encoded
from voices import RATE, make_wave

from egs.common.corpus.prepare import find_audio, walk
from egs.own import prepare
from speakerlab.data import audio
from speakerlab.data.check import check_data_dirs
from speakerlab.data.convert import read_wave
from speakerlab.data.manifest import read_manifest
from speakerlab.data.tables import read_rejected, read_table, write_data_dir

RNG = np.random.default_rng(0)
WAV = encoded(clean_wave(RNG))


def put(path: Path, content: bytes = WAV) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two speakers with two recordings each."""
    for number, name in enumerate(("anna/1", "anna/2", "bob/1", "bob/2"), 1):
        content = encoded(clean_wave(np.random.default_rng(number)))
        put(tmp_path / "in" / f"{name}.wav", content)
    return tmp_path / "in"


def prepared(corpus: Path) -> Path:
    data = corpus.parent / "data"
    # the corpus may have changed
    (data / ".prepared").unlink(missing_ok=True)
    arguments = ["--corpus", str(corpus), "--data", str(data)]
    assert prepare.main(arguments) == 0
    return data / "train"


def test_links_are_followed_once_and_not_out_of_the_corpus(corpus: Path):
    elsewhere = put(corpus.parent / "elsewhere/1.wav").parent
    (corpus / "carl").symlink_to(elsewhere)
    # sorts before bob, which is listed once
    (corpus / "a").symlink_to(corpus / "bob")
    (corpus / "carl" / "round").symlink_to(corpus)
    (corpus / "up").symlink_to("/")
    files, left_out = walk(corpus)
    names = [str(path.relative_to(corpus)) for path in files]
    assert names == [
        "anna/1.wav",
        "anna/2.wav",
        "bob/1.wav",
        "bob/2.wav",
        "carl/1.wav",
    ]
    assert left_out == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_without_permission_is_reported(corpus: Path):
    (corpus / "bob").chmod(0)
    left_out = walk(corpus)[1]
    (corpus / "bob").chmod(0o700)
    assert "cannot be listed, got 'Permission denied'" in left_out[corpus / "bob"]


def test_a_folder_that_ends_like_audio_may_hold_some(corpus: Path):
    put(corpus / "anna/interview.wav/part.wav")
    (corpus / "anna/nothing.wav/deeper").mkdir(parents=True)
    files, left_out = find_audio(corpus)
    assert "anna/interview.wav/part.wav" in files
    assert list(left_out) == [corpus / "anna/nothing.wav"]


def test_a_file_without_a_valid_id_is_listed(corpus: Path):
    put(corpus / "anna/two\nlines.wav")
    folder = prepared(corpus)
    listed = read_rejected(folder)
    ((name, values),) = listed.items()
    path, reason = values
    assert name.startswith("~")
    assert path == f"{corpus}/anna/two\\nlines.wav"
    assert reason == f"{path}: its name has several lines; rename the file"
    with pytest.raises(ValueError, match="its name has several lines"):
        check_data_dirs([folder], allow_rejected=0.19)
    for _ in range(2):
        note = check_data_dirs([folder], allow_rejected=0.2)[0]
        assert "1 left out, see" in note
        assert read_rejected(folder) == listed
    manifest = read_manifest([folder], sample_rate=RATE)
    assert len(manifest) == 4
    (corpus / "anna/two\nlines.wav").rename(corpus / "anna/one line.wav")
    assert read_rejected(prepared(corpus)) == {}


def test_a_set_without_usable_files_is_an_error(corpus: Path):
    folder = prepared(corpus)
    for path in read_table(folder / "wav.scp").values():
        Path(path).unlink()
    with pytest.raises(
        ValueError, match=r"no such file(.|\n)*refused, no utt2dur was written"
    ):
        check_data_dirs([folder], allow_rejected=1.0)


def test_another_rate_is_one_broken_file_and_its_command_is_quoted(corpus: Path):
    path = put(corpus / "anna/$(touch a).wav")
    folder = prepared(corpus)
    wave_S = clean_wave(np.random.default_rng(0))
    path.write_bytes(encoded(wave_S, rate=8000))
    line = (
        f"{path}: must have 16000 Hz, got 8000; convert it: ffmpeg -i '{path}' -ar"
        " 16000 OUT.wav"
    )
    with pytest.raises(ValueError) as refused:
        check_data_dirs([folder], allow_rejected=0.19)
    assert str(refused.value).startswith(line)
    check_data_dirs([folder], allow_rejected=0.2)
    _, reason = read_rejected(folder)["anna/$(touch_a)"]
    assert reason.startswith(line)


def test_what_cannot_be_converted_is_listed_with_its_own_reason(corpus: Path):
    wave_S = make_wave(0, 0, 1.0, 8000)
    whole = encoded(wave_S, rate=8000)
    other = encoded(make_wave(0, 1, 1.0, 8000), rate=8000)
    half = encoded(wave_S[:4000], rate=8000)
    cut = put(corpus / "anna/cut.wav", whole[:9000])
    # with the suffix, a name of 255 letters, the most of a file system
    longest = "n" * 251
    put(corpus / "anna" / f"{longest}.wav", whole)
    put(corpus / "anna/same.new.wav", other)
    put(corpus / "anna/same.wav", half)
    folder = prepared(corpus)
    (values,) = read_rejected(folder).values()
    path, reason = values
    assert path == str(cut)
    expected = f"{cut}: is cut short, after 8956 of 16000 bytes; copy it again"
    assert reason == expected

    wavs = read_table(folder / "wav.scp")
    seconds = {}
    for name, path in wavs.items():
        seconds[name] = audio.read_info(path).seconds
    assert seconds["anna/same.new"] == 1.0
    assert seconds[f"anna/{longest}"] == 1.0
    assert seconds["anna/same"] == 0.5


def test_flac_from_a_pipe_is_converted(corpus: Path):
    pytest.importorskip("av")
    wave_S = make_wave(0, 0, 1.0)
    content = bytearray(encoded(wave_S, "FLAC"))
    content[21] &= 0xF0  # 36 bits of STREAMINFO: number of samples
    content[22:26] = bytes(4)
    path = put(corpus / "anna/piped.flac", bytes(content))
    assert audio.read_info(path).num_samples == len(wave_S)
    wavs = read_table(prepared(corpus) / "wav.scp")
    converted_S = audio.read(wavs["anna/piped"])
    assert np.array_equal(converted_S, wave_S)


def test_a_list_of_files_is_no_recording(tmp_path: Path):
    pytest.importorskip("av")
    put(tmp_path / "other.wav")
    path = put(tmp_path / "a.m4a", b"ffconcat version 1.0\nfile other.wav\n")
    with pytest.raises(ValueError, match=r"a\.m4a: is not readable audio:"):
        read_wave(path, sample_rate=RATE)


@pytest.mark.parametrize(
    ("name", "path", "line"),
    [
        (
            "a b",
            "/x.wav",
            "/x.wav: its id must be one word of UTF-8, got 'a b'; rename the file",
        ),
        (
            "",
            "/x.wav",
            "/x.wav: its id must be one word of UTF-8, got ''; rename the file",
        ),
        ("a", "/x\ry.wav", "/x\\ry.wav: its name has several lines; rename the file"),
        ("a", "/x\udcff", "/x\\udcff: its name is not UTF-8; rename the file"),
        ("a", "/x |", "/x |: its name ends in a blank or '|'; rename the file"),
    ],
)
def test_ids_and_paths_that_tables_cannot_hold_are_errors(
    tmp_path: Path, name, path, line
):
    with pytest.raises(ValueError) as refused:
        write_data_dir(tmp_path / "d", wavs={name: path})
    assert str(refused.value).splitlines()[0] == line
    assert not (tmp_path / "d").exists()


def test_a_damaged_rejected_tsv_is_an_error(corpus: Path):
    folder = prepared(corpus)
    (folder / "rejected.tsv").write_text("anna/1 /x.wav\n")
    with pytest.raises(
        ValueError, match=r"rejected\.tsv:1: is not 'id path reason' with tabs"
    ):
        check_data_dirs([folder])
