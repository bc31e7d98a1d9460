"""Sizes of downloads, which are printed before the first one starts."""

from collections import namedtuple

import pytest
from refusals import refused, refuses

from egs.common.corpus import fetch

Usage = namedtuple("Usage", "free")


@pytest.fixture
def files(tmp_path):
    """Three files to download: of 30 and 20 MB, and one whose server is not found."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "a.tar").write_bytes(b"0" * 30_000_000)
    (store / "b.tar").write_bytes(b"0" * 20_000_000)
    corpus = tmp_path / "new/corpus"
    sources = {}
    for name in ("a.tar", "b.tar", "c.tar"):
        url = (store / name).as_uri()
        sources[corpus / name] = (url, None)
    return sources


def fail_to_receive(url: str, part) -> None:
    pytest.fail(f"{url} begins early")


def fail_to_download(*args, **options) -> None:
    pytest.fail("nothing may be received")


def test_sizes_and_place_come_first(files, capsys, monkeypatch):
    a, b, c = files
    a.parent.mkdir(parents=True)
    # 10 of 30 MB are there already.
    a.with_name("a.tar.part").write_bytes(b"0" * 10_000_000)
    monkeypatch.setattr(fetch, "_receive", fail_to_receive)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Usage(7_200_000_000))
    with pytest.raises(pytest.fail.Exception, match="a.tar begins early"):
        fetch.download_all(files)
    (line,) = capsys.readouterr().out.splitlines()
    sizes = ("a.tar 0.02 GB", "b.tar 0.02 GB", "7.20 GB free")
    assert refused(line, a.parent, *sizes)
    assert f"{c.name} of unknown size" in line
    # The sum is not known either.
    assert "in all" not in line
    # Finished files are not downloaded again.
    b.touch()
    monkeypatch.setattr(fetch, "_receive", lambda _, part: part.touch())
    fetch.download_all(files)
    (line,) = capsys.readouterr().out.splitlines()
    assert "a.tar 0.02 GB" in line
    assert "b.tar" not in line
    fetch.download_all(files)
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_found_before_the_download(files, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Usage(40_000_000))
    monkeypatch.setattr(fetch, "download", fail_to_download)
    a, _, unknown_size = files
    del files[unknown_size]
    with refuses(str(a.parent), "0.05 GB in all", "0.04 GB free"):
        fetch.download_all(files)
