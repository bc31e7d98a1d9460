"""Outputs: whether they can be written is known before the work; their mode is the umask's."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from full_disk import cannot_write
from refusals import refuses
from safetensors.numpy import save_file

from speakerlab.core.atomic import (
    check_writable,
    copy_files,
    replacing,
    replacing_folder,
    write_text,
)


def test_writable_path_is_accepted_and_nothing_created(tmp_path) -> None:
    (tmp_path / "old").touch()
    for name in ("old", "new", "a/b/new"):
        check_writable(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_path_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file/a/b", Path("/proc/none/a")):
        with refuses(str(path)):
            check_writable(path)


def test_outputs_have_the_mode_of_the_umask(tmp_path) -> None:
    """Also where a library writes a file that only its owner may read, as safetensors does."""
    for mask, mode in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        path = tmp_path / f"{mask:o}" / "a.safetensors"
        previous = os.umask(mask)
        try:
            with replacing(path) as partial:
                save_file({"a": np.zeros(3)}, partial)
            with replacing_folder(tmp_path / f"{mask:o}/folder") as folder:
                (folder / "file").touch()
        finally:
            os.umask(previous)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        of_folder = path.with_name("folder").stat().st_mode
        assert stat.S_IMODE(of_folder) == 0o777 & ~mask
        of_file = (path.with_name("folder") / "file").stat().st_mode
        assert stat.S_IMODE(of_file) == mode


def test_a_replaced_file_keeps_its_mode(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    for mode in (0o600, 0o664):
        path.touch()
        path.chmod(mode)
        with replacing(path) as partial:
            save_file({"a": np.zeros(3)}, partial)
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_the_target_of_a_link_is_replaced(tmp_path) -> None:
    target = tmp_path / "shared" / "a"
    link = tmp_path / "a"
    link.symlink_to(target)
    # The target may not exist yet.
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["a"]


def test_the_longest_names_are_written_and_longer_ones_refused_first(tmp_path) -> None:
    for name in ("n" * 255, "音" * 85, "🎙" * 63):
        path = tmp_path / name
        check_writable(path)
        write_text(path, "a")
        assert path.read_text() == "a"
        with refuses(f"{path}nnnn", "too long"):
            check_writable(tmp_path / f"{name}nnnn")
    assert len(list(tmp_path.iterdir())) == 3


def test_the_error_of_a_full_disk_names_the_output(tmp_path) -> None:
    """A write names no file, and a copy its source first."""
    with cannot_write(tmp_path / "a"):
        write_text(tmp_path / "a", "text")
    folder = tmp_path / "folder"
    with cannot_write(folder / "b/c"), replacing_folder(folder) as fresh:
        write_text(fresh / "b/c", "text")
    with cannot_write(folder), replacing_folder(folder) as fresh:
        (fresh / "c").write_text("text")
    source = tmp_path / "source"
    write_text(source / "b/c", "text")
    with cannot_write(folder / "b/c"), replacing_folder(folder) as fresh:
        copy_files(source, fresh)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_error_of_an_input_is_kept(tmp_path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a"):
        missing.read_text()
    assert caught.value.filename == str(missing)
    with (
        pytest.raises(FileNotFoundError) as caught,
        replacing_folder(tmp_path / "b") as fresh,
    ):
        copy_files(missing, fresh)
    assert caught.value.filename == str(missing)


def test_a_folder_is_copied_without_some_files(tmp_path) -> None:
    for name in ("a", ".lock", "b/c", "b/.lock"):
        write_text(tmp_path / "source" / name, name)
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_files(tmp_path / "source", copy, leave_out=[".lock"])
    names = [str(path.relative_to(copy)) for path in sorted(copy.rglob("*"))]
    assert names == ["a", "b", "b/c"]
    assert (copy / "b/c").read_text() == "b/c"
