"""Open files of every kind: the recording, or one line that says what an open file needs."""

import gzip
import io
import os
import socket
import struct
import tempfile
import zipfile
from pathlib import Path, PurePath

import numpy as np
import pytest
from refusals import refused, refuses
from voices import make_wave

from speakerlab.data import audio
from speakerlab.data.convert import read_wave
from speakerlab.data.sources import refuse_cut

RATE = 16000
WAVE_S = make_wave(0, 0, 1.0)
FLAC = audio.encode(WAVE_S, RATE, "FLAC")


class Upload:
    """An open file as tempfile.SpooledTemporaryFile was before Python 3.11."""

    def __init__(self, content: bytes) -> None:
        file = io.BytesIO(content)
        self.read = file.read
        self.seek = file.seek
        self.tell = file.tell


class Stream:
    """An open file that can only be read, as the answer of a server."""

    def __init__(self, content: bytes) -> None:
        self.read = io.BytesIO(content).read


class AsyncUpload:
    """An open file of a web framework: its own methods are coroutines, `file` is plain."""

    def __init__(self, content: bytes) -> None:
        self.file = io.BytesIO(content)

    async def read(self, size: int = -1) -> bytes:
        return self.file.read(size)


def decode(source) -> np.ndarray:
    with audio.stream(source) as (rate, blocks):
        assert rate == RATE
        return np.concatenate(list(blocks))


@pytest.mark.parametrize("kind", [Upload, Stream, AsyncUpload, io.BytesIO])
def test_objects_with_few_methods_are_read(kind, capfd):
    assert np.array_equal(decode(kind(FLAC)), WAVE_S)
    wave_S = read_wave(kind(FLAC), sample_rate=RATE)
    assert np.array_equal(wave_S, WAVE_S / np.float32(32768))
    assert capfd.readouterr().err == ""


def test_files_of_the_standard_library_are_read(tmp_path: Path):
    path = tmp_path / "a.flac"
    path.write_bytes(FLAC)
    with gzip.open(tmp_path / "a.gz", "wb") as zipped:
        zipped.write(FLAC)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(path, "a.flac")
    with (
        path.open("rb") as buffered,
        path.open("rb", buffering=0) as raw,
        path.open("r+b") as updated,
        gzip.open(tmp_path / "a.gz") as unzipped,
        zipfile.ZipFile(tmp_path / "a.zip").open("a.flac") as member,
        tempfile.NamedTemporaryFile() as named,
        tempfile.SpooledTemporaryFile() as spooled,
        tempfile.TemporaryFile() as unnamed,
    ):
        # Written, but not to the disk yet.
        for file in (named, spooled, unnamed):
            file.write(FLAC)
        files = (buffered, raw, updated, unzipped, member, named, spooled, unnamed)
        for file in files:
            assert np.array_equal(decode(file), WAVE_S), file
        # The files stay open, and a second reading begins at the start.
        for file in (*files[:3], *files[5:]):
            assert np.array_equal(decode(file), WAVE_S), file


class PathOfAnotherLibrary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_every_kind_of_path_is_read(tmp_path: Path):
    path = tmp_path / "a.flac"
    path.write_bytes(FLAC)
    with os.scandir(tmp_path) as entries:
        paths = [PurePath(path), PathOfAnotherLibrary(path), *entries]
    for source in paths:
        assert np.array_equal(decode(source), WAVE_S)
        wave_S = read_wave(source, sample_rate=RATE)
        assert np.array_equal(wave_S, WAVE_S / np.float32(32768))
        assert audio.name_of(source) == str(path)


@pytest.mark.parametrize(
    ("path", "subject", "value"),
    [
        ("", "path", "is empty"),
        ("/no/such.wav\n", "/no/such.wav\\n", "no such file"),
        ("https://host/a.wav", "https://host/a.wav", "download it"),
        (Path("s3://bucket/a.wav"), "s3:/bucket/a.wav", "download it"),
        ("C:/a.wav", "C:/a.wav", "correct the path"),
        ("~/no-such.wav", "~/no-such.wav", "home folder"),
    ],
)
def test_a_wrong_path_is_one_line_with_a_remedy(
    path: str | Path, subject: str, value: str
):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        decode(path)
    assert refused(str(caught.value), subject, value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (b"\n<!doctype html><title>404</title>", "web page"),
        (b'<?xml version="1.0"?><Error/>', "web page"),
        (gzip.compress(FLAC, mtime=0), "gzip"),
        (b"PK\x03\x04" + FLAC, "zip"),
        (b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X" + bytes(300), "macOS"),
    ],
)
def test_what_is_often_in_place_of_a_recording_is_named(
    tmp_path: Path, content: bytes, value: str
):
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    for source in (path, content, io.BytesIO(content)):
        with refuses(audio.name_of(source), value):
            decode(source)


def test_a_file_that_was_read_before_begins_again():
    for file in (io.BytesIO(FLAC), Upload(FLAC)):
        file.read()
        assert np.array_equal(decode(file), WAVE_S)


def test_a_socket_is_read():
    client, server = socket.socketpair()
    with client, server.makefile("rb") as file:
        client.sendall(FLAC[:20000])
        client.shutdown(socket.SHUT_WR)
        with refuses("audio (BufferedReader)"):
            decode(file)
    server.close()


class Broken(Upload):
    """An open file whose connection breaks."""

    def __init__(self, error: Exception) -> None:
        super().__init__(FLAC)
        self.error = error
        self.read = self.fail

    def fail(self, size: int = -1) -> bytes:
        if size == 0:
            return b""
        raise self.error


class Wrong:
    """An open file that gives something else than bytes."""

    def __init__(self, content: object) -> None:
        self.content = content

    def read(self, size: int = -1) -> object:
        return self.content if size else b""


def test_what_is_no_open_binary_file_is_refused_in_one_line(tmp_path: Path, capfd):
    path = tmp_path / "a.flac"
    path.write_bytes(FLAC)
    closed = path.open("rb")
    closed.close()
    with (
        path.open(encoding="latin-1") as text,
        (tmp_path / "b").open("wb") as written,
        gzip.open(path) as no_archive,
    ):
        for source, value in (
            (text, "'rb'"),
            (io.StringIO("text"), "'rb'"),
            (closed, "closed"),
            (written, "'rb'"),
            (no_archive, "'rb'"),
            (Broken(ConnectionResetError("reset by peer")), "reset by peer"),
            (Broken(RuntimeError()), "RuntimeError"),
            (Broken(OSError("reset\nby peer")), "reset by peer"),
            (Wrong("text"), "'rb'"),
            (Wrong(None), "NoneType"),
            (io.BytesIO(), "0 bytes"),
            (io.BytesIO(b"no audio" * 99), "not readable audio"),
        ):
            for read in (decode, lambda source: read_wave(source, sample_rate=RATE)):
                with refuses(audio.name_of(source), value) as caught:
                    read(source)
                assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("stated", "present", "is_refused"),
    [
        (1 << 24, 64000, False),  # a program did not know the length yet
        (1 << 24, 8_000_000, True),  # a file cut in half, of a round length by chance
        (1 << 30, 600_000_000, False),
        (2_000_000_000, 64000, False),
        (300_000_000, 2_000_000, False),  # huge
        (128000, 64000, True),
        (64044, 64000, False),  # of the whole file, with its header
        (64036, 64000, False),
        (64100, 64000, True),
    ],
)
def test_a_length_that_no_recording_has_is_no_sign_of_a_cut(
    stated: int, present: int, is_refused: bool
) -> None:
    if is_refused:
        with refuses("a.wav", f"after {present} of {stated} bytes"):
            refuse_cut(stated, present, "bytes", "a.wav")
    else:
        refuse_cut(stated, present, "bytes", "a.wav")


@pytest.mark.parametrize("num_extra", [36, 44])
def test_a_wav_header_that_counts_itself_is_read(num_extra: int):
    content = audio.encode(WAVE_S, RATE, "WAV")
    size = struct.pack("<I", 2 * len(WAVE_S) + num_extra)
    counted = content[:40] + size + content[44:]
    assert np.array_equal(decode(counted), WAVE_S)
