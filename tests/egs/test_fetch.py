"""Sizes of downloads, which are printed before the first one starts."""

from collections import namedtuple

import pytest
from refusals import refused, refuses

from egs.common.corpus import fetch

Usage = namedtuple("Usage", "free")


@pytest.fixture
def files(tmp_path):
    """Two files to download, of 30 and 20 MB, and one whose server is not found."""
    store = tmp_path / "store"
    store.mkdir()
    found = {}
    for name, size in (("a.tar", 30_000_000), ("b.tar", 20_000_000), ("c.tar", 0)):
        if size:
            (store / name).write_bytes(b"0" * size)
        found[tmp_path / "new/corpus" / name] = ((store / name).as_uri(), None)
    return found


def test_sizes_and_place_come_first(files, capsys, monkeypatch):
    a, b, c = files
    a.parent.mkdir(parents=True)
    a.with_name("a.tar.part").write_bytes(b"0" * 10_000_000)
    monkeypatch.setattr(fetch, "_receive", lambda url, _: pytest.fail(f"{url} begins early"))
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Usage(7_200_000_000))
    with pytest.raises(pytest.fail.Exception, match="a.tar begins early"):
        fetch.download_all(files)
    (line,) = capsys.readouterr().out.splitlines()
    assert refused(line, a.parent, "a.tar 0.02 GB", "b.tar 0.02 GB", "7.20 GB free")
    assert f"{c.name} of unknown size" in line
    assert "in all" not in line
    b.touch()
    monkeypatch.setattr(fetch, "_receive", lambda _, part: part.touch())
    fetch.download_all(files)
    (line,) = capsys.readouterr().out.splitlines()
    assert "a.tar 0.02 GB" in line and "b.tar" not in line
    fetch.download_all(files)
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_found_before_the_download(files, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: Usage(40_000_000))
    monkeypatch.setattr(fetch, "download", lambda *_, **__: pytest.fail("nothing may be received"))
    del files[list(files)[-1]]
    with refuses(str(next(iter(files)).parent), "0.05 GB in all", "0.04 GB free"):
        fetch.download_all(files)
