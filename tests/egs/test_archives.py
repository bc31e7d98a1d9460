"""Zips and archives in parts: whole, unsafe, broken."""

import io
import stat
import tarfile
import zipfile

import numpy as np
import pytest
from archive_bytes import md5, store_parts, tar_bytes
from refusals import refuses

from egs.common.corpus.archives import unpack

PARTS = ("x_partaa", "x_partab", "x_partac")
CONTENT = np.random.default_rng(0).bytes(3_000_000)


def zip_bytes(members: dict[str, bytes], *, link: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            if name == link:
                # The upper 16 bits are the mode of Unix.
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, content)
    return buffer.getvalue()


ZIP = zip_bytes({"wav/a": CONTENT, "wav/b/c": b"1"})
TAR = tar_bytes({"wav/a": CONTENT})


def is_empty(folder) -> bool:
    return not list(folder.iterdir())


def store(body: bytes, folder):
    """Write an archive in parts; return their paths."""
    names = store_parts(body, folder, PARTS)
    return [folder / name for name in names]


@pytest.mark.parametrize("body", [ZIP, TAR], ids=["zip", "tar"])
def test_parts_are_read_as_one(tmp_path, body, capsys):
    paths = store(body, tmp_path / "in")
    out = tmp_path / "out"
    (out / "wav").mkdir(parents=True)
    (out / "wav/old").write_text("stays")
    unpack(paths, out, checksum=md5(body))
    assert (out / "wav/a").read_bytes() == CONTENT
    assert (out / "wav/old").read_text() == "stays"
    (folder,) = out.iterdir()
    assert folder.name == "wav"
    # Bars are for terminals; here the output goes to a file, as a log.
    assert capsys.readouterr().err == ""


def test_a_missing_part_is_found_before_anything_is_unpacked(tmp_path):
    body = zip_bytes({"wav/a": CONTENT})
    first, second, _ = store(body, tmp_path / "in")
    paths = [first, second]
    incomplete = first.read_bytes() + second.read_bytes()
    digest = md5(incomplete).removeprefix("md5:")
    with refuses(f"{first} {second}", "wrong md5", digest):
        unpack(paths, tmp_path / "out", checksum=md5(body))
    with refuses(f"{first} {second}", "File is not a zip file"):
        unpack(paths, tmp_path / "out")
    assert is_empty(tmp_path / "out")


OUTSIDE = [
    ("zip", "../outside"),
    ("zip", "/outside"),
    ("zip", "wav/../../outside"),
    ("zip", "link"),
    ("tar.gz", "../outside"),
    ("tar.gz", "/../../outside"),
    ("old", "../outside"),
    ("old", "/../../outside"),
]


@pytest.mark.parametrize(("kind", "name"), OUTSIDE)
def test_a_member_outside_its_folder_is_refused(tmp_path, monkeypatch, kind, name):
    if kind == "old":
        # A tar in a Python without the filter.
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    path = tmp_path / f"x.{kind}"
    members = {"inside": b"1", name: b"/etc"}
    if kind == "zip":
        path.write_bytes(zip_bytes(members, link="link"))
        problem = f"{name} would be written outside"
    else:
        path.write_bytes(tar_bytes(members))
        problem = "outside"
    with refuses(path, problem):
        unpack([path], tmp_path / "out")
    assert is_empty(tmp_path / "out")
    assert not list(tmp_path.rglob("outside"))


def test_without_the_filter_links_and_special_modes_are_not_unpacked(
    tmp_path, monkeypatch
):
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    path = tmp_path / "x"
    out = tmp_path / "out"
    path.write_bytes(tar_bytes({"a": b"1"}))
    unpack([path], out)
    mode = (out / "a").stat().st_mode
    assert mode & 0o7777 == 0o644

    path.write_bytes(tar_bytes({"link": b""}))
    with refuses(out / ".unpack-x", "link or device"):
        unpack([path], out)


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_a_damaged_archive_leaves_nothing(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    if kind == "zip":
        body = bytearray(zip_bytes({"a": b"1", "b": CONTENT}))
        body[1_000_000] ^= 255
        values = ["cannot be unpacked"]
    else:
        body = tar_bytes({"x": CONTENT})[:5_000]
        values = []
    path.write_bytes(body)
    with refuses(path, *values):
        unpack([path], tmp_path / "out")
    assert is_empty(tmp_path / "out")
