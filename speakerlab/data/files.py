"""Checks of file names and file types before a file is opened."""

import re
import stat
from pathlib import Path

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def require_file(path: str | Path) -> None:
    """Raise FileNotFoundError or ValueError unless a plain file, or a link to one, is there.

    Opening something else may have effects, and reading from a pipe may wait for ever.
    """
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: no such file; correct the path or restore it") from None
    except (OSError, ValueError) as error:  # links in a circle, a name too long, no permission
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: cannot be opened ({reason}); repair it or drop it") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ValueError(f"{path}: is {what}; give the path of a recording")


def one_line(name: str | Path) -> str:
    """A file name as text that is one line of valid UTF-8: what it may not have is escaped."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), str(name))
