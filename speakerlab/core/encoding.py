"""The encoding of file names: UTF-8, whatever the locale."""

import os
import sys

VARIABLE = "PYTHONUTF8"


def use_utf8() -> None:
    """Start the program again in Python's UTF-8 mode if file names have another encoding.

    Python itself does so in the locales C and POSIX, but not in others, such as those of ISO 8859.
    There, the name of a file would become another id than elsewhere, or could not be decoded.
    """
    is_utf8 = sys.getfilesystemencoding().lower() == "utf-8"
    # Options such as `python -E` have more weight than the variable.
    was_started_again = os.environ.get(VARIABLE) == "1"
    if is_utf8 or was_started_again:
        return
    environment = {**os.environ, VARIABLE: "1"}
    arguments = [sys.executable, *sys.orig_argv[1:]]
    # The output of this process so far would be lost.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(sys.executable, arguments, environment)  # noqa: S606
