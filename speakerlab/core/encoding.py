"""The encoding of file names: UTF-8, whatever the locale."""

import os
import sys


def use_utf8() -> None:
    """Start the program again in Python's UTF-8 mode if file names have another encoding.

    Python itself does so in the locales C and POSIX, but not in others, such as those of ISO 8859,
    where names of files would become other ids, or none.
    """
    if sys.getfilesystemencoding().lower() == "utf-8":
        return
    environment = {**os.environ, "PYTHONUTF8": "1"}
    arguments = [sys.executable, *sys.orig_argv[1:]]
    # The output of this process so far would be lost.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(sys.executable, arguments, environment)  # noqa: S606
