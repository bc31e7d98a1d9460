"""Whether an output can be written is known before the work that makes it."""

from pathlib import Path

from refusals import refuses

from speakerlab.core.atomic import check_writable


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
