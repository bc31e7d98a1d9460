"""Recordings below a folder, and what lies beside them."""

from pathlib import Path

import pytest

from speakerlab.data.listing import is_apple_double, list_recordings, shorten


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_only_recordings_are_listed_and_the_rest_is_counted(tmp_path):
    corpus = tmp_path / ".hidden above/corpus"
    wanted = [
        touch(corpus / "a/1.wav"),
        touch(corpus / "a/2 b.FLAC"),
        touch(corpus / "录音 1.wav"),
    ]
    for name in (
        "._1.wav",
        "a/.DS_Store",
        "a/Thumbs.db",
        "@eaDir/1.wav/SYNOAUDIO",
        "__MACOSX/a/._1.wav",
        ".ipynb_checkpoints/1-checkpoint.wav",
        "$RECYCLE.BIN/S-1-5/$R1.wav",
        ".Trash-1000/files/1.wav",
    ):
        touch(corpus / name)
    for name in ("a/1.txt", "a/2.TXT", "README", "a/1.wav~"):
        touch(corpus / name)
    # A link to a folder above, and a second path to a folder.
    (corpus / "a/up").symlink_to(corpus)
    (corpus / "b").symlink_to(corpus / "a")

    listing = list_recordings(corpus)
    assert len(listing.recordings) == 3
    resolved = [path.resolve() for path in listing.recordings]
    assert sorted(resolved) == sorted(wanted)
    text = listing.skipped()
    assert "\n" not in text
    assert "files of other endings: 3 (2 .txt, 1 without)" in text
    assert "9 files and folders of systems and editors" in text


def test_long_names_are_shortened_and_stay_apart(tmp_path):
    for name in ("a", "s1/录音 1", "n" * 200):
        assert shorten(name) == name
    names = ["n" * 251, "n" * 252, "录" * 83, "\\udce9" * 41, f"s/{'n' * 251}"]
    short_names = [shorten(name) for name in names]
    assert len(set(short_names)) == len(names)
    for name, short_name in zip(names, short_names):
        assert short_name[:20] == name[:20]
        touch(tmp_path / f"{short_name}.json.partial")


def test_other_endings_are_recordings_if_asked_for(tmp_path):
    paths = [touch(tmp_path / name) for name in ("a.m4a", "b.wav")]
    assert list_recordings(tmp_path, [".m4a"]).recordings == paths[:1]
    assert list_recordings(tmp_path, [".m4a", ".wav"]).skipped() == ""


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    def scan(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", scan)
    with pytest.raises(PermissionError):
        list_recordings(tmp_path)


def test_attributes_of_macos_are_known_by_their_content(tmp_path):
    magic = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X"
    for name, content, expected in (
        ("._a.wav", magic, True),
        ("._b.wav", b"RIFF", False),
        ("c.wav", magic, False),
        ("._gone.wav", None, False),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        assert is_apple_double(path) is expected
