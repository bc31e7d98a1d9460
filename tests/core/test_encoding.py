"""File names are UTF-8 in every locale."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "名字.rttm"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("options", [[], ["-X", "utf8=0"]])
def test_a_name_is_printed_in_utf_8_whatever_the_locale(options):
    command = [sys.executable, *options, "-m", "speakerlab", "der", NAME, NAME]
    finished = subprocess.run(
        command,
        env={"PYTHONPATH": str(ROOT), **ASCII},
        capture_output=True,
        timeout=60,
    )
    assert finished.returncode == 1
    if not options:
        expected = f"{NAME}: does not exist".encode()
        assert finished.stderr.startswith(expected)
    # The command line has the last word: the command must still end.
    else:
        assert b"does not exist" in finished.stderr
