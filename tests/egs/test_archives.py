"""Zips and archives in parts: whole, unsafe, broken."""

import io
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
from archive_bytes import md5, tar_bytes
from refusals import refuses

from egs.common.corpus.archives import unpack

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


def split(body: bytes, folder: Path, *ends: int) -> list[Path]:
    """The bytes as files x_partaa, x_partab, ..., cut at `ends`."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number, (start, end) in enumerate(zip((0, *ends), (*ends, len(body)))):
        paths.append(folder / f"x_parta{'abcd'[number]}")
        paths[-1].write_bytes(body[start:end])
    return paths


@pytest.mark.parametrize(
    "body", [zip_bytes({"wav/a": CONTENT, "wav/b/c": b"1"}), tar_bytes({"wav/a": CONTENT})]
)
def test_parts_are_read_as_one(tmp_path, body):
    paths = split(body, tmp_path / "in", 7, 1_500_000, 2_900_000)
    (tmp_path / "out/wav").mkdir(parents=True)
    (tmp_path / "out/wav/old").write_text("stays")
    unpack(paths, tmp_path / "out", checksum=md5(body))
    assert (tmp_path / "out/wav/a").read_bytes() == CONTENT
    assert (tmp_path / "out/wav/old").read_text() == "stays"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["wav"]


def test_a_missing_part_is_found_before_anything_is_unpacked(tmp_path):
    body = zip_bytes({"wav/a": CONTENT})
    paths = split(body, tmp_path / "in", 1_000_000, 2_000_000)[:2]
    wrong = md5(body[:2_000_000]).removeprefix("md5:")
    with refuses(f"{paths[0]} {paths[1]}", "wrong md5", wrong):
        unpack(paths, tmp_path / "out", checksum=md5(body))
    with refuses(f"{paths[0]} {paths[1]}", "File is not a zip file"):
        unpack(paths, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("zip", name) for name in ("../outside", "/outside", "wav/../../outside", "link")),
        *(("tar.gz", name) for name in ("../outside", "/../../outside")),
    ],
)
def test_a_member_outside_its_folder_is_refused(tmp_path, kind, name):
    path, members = tmp_path / f"x.{kind}", {"inside": b"1", name: b"/etc"}
    path.write_bytes(zip_bytes(members, link="link") if kind == "zip" else tar_bytes(members))
    with refuses(path, f"{name} would be written outside" if kind == "zip" else "outside"):
        unpack([path], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == [] and not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_a_damaged_archive_leaves_nothing(tmp_path, kind):
    body = bytearray(zip_bytes({"a": b"1", "b": CONTENT}))
    body[1_000_000] ^= 255
    path = tmp_path / f"x.{kind}"
    path.write_bytes(body if kind == "zip" else tar_bytes({"x": CONTENT})[:5_000])
    with refuses(path, *(["cannot be unpacked"] if kind == "zip" else [])):
        unpack([path], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
