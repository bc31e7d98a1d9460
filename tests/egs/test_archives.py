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
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "body", [zip_bytes({"wav/a": CONTENT, "wav/b/c": b"1"}), tar_bytes({"wav/a": CONTENT})]
)
def test_parts_are_read_as_one(tmp_path, body):
    paths = [tmp_path / "in" / name for name in store_parts(body, tmp_path / "in", PARTS)]
    (tmp_path / "out/wav").mkdir(parents=True)
    (tmp_path / "out/wav/old").write_text("stays")
    unpack(paths, tmp_path / "out", checksum=md5(body))
    assert (tmp_path / "out/wav/a").read_bytes() == CONTENT
    assert (tmp_path / "out/wav/old").read_text() == "stays"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["wav"]


def test_a_missing_part_is_found_before_anything_is_unpacked(tmp_path):
    body = zip_bytes({"wav/a": CONTENT})
    paths = [tmp_path / "in" / name for name in store_parts(body, tmp_path / "in", PARTS)][:2]
    wrong = md5(b"".join(path.read_bytes() for path in paths)).removeprefix("md5:")
    with refuses(f"{paths[0]} {paths[1]}", "wrong md5", wrong):
        unpack(paths, tmp_path / "out", checksum=md5(body))
    with refuses(f"{paths[0]} {paths[1]}", "File is not a zip file"):
        unpack(paths, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("zip", name) for name in ("../outside", "/outside", "wav/../../outside", "link")),
        *((kind, name) for kind in ("tar.gz", "old") for name in ("../outside", "/../../outside")),
    ],
)
def test_a_member_outside_its_folder_is_refused(tmp_path, monkeypatch, kind, name):
    if kind == "old":  # Python, without the filter
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    path, members = tmp_path / f"x.{kind}", {"inside": b"1", name: b"/etc"}
    path.write_bytes(zip_bytes(members, link="link") if kind == "zip" else tar_bytes(members))
    with refuses(path, f"{name} would be written outside" if kind == "zip" else "outside"):
        unpack([path], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [] and not list(tmp_path.rglob("outside"))


def test_without_the_filter_links_and_special_modes_are_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "x").write_bytes(tar_bytes({"a": b"1"}))
    unpack([tmp_path / "x"], tmp_path / "out")
    assert (tmp_path / "out/a").stat().st_mode & 0o7777 == 0o644
    (tmp_path / "x").write_bytes(tar_bytes({"link": b""}))
    with refuses(tmp_path / "out/.unpack-x", "link or device"):
        unpack([tmp_path / "x"], tmp_path / "out")


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_a_damaged_archive_leaves_nothing(tmp_path, kind):
    body = bytearray(zip_bytes({"a": b"1", "b": CONTENT}))
    body[1_000_000] ^= 255
    path = tmp_path / f"x.{kind}"
    path.write_bytes(body if kind == "zip" else tar_bytes({"x": CONTENT})[:5_000])
    with refuses(path, *(["cannot be unpacked"] if kind == "zip" else [])):
        unpack([path], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
