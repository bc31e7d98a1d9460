"""Stage 3 of egs/mini on the tiny corpus. In: that corpus, settings. Out: the words to run."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tiny import ROOT


def prepared(data: Path, copy: Path) -> Path:
    """A copy of the corpus that looks as if stages 1 and 2 had been run."""
    shutil.copytree(data, copy)
    for marker in (".stage1", ".stage2"):
        (copy / marker).touch()
    return copy


def stage_3(data: Path, exp: Path, settings: list[str], *more: str) -> list[str]:
    """`settings` are those of the fixture; `more` are settings too, or options before them."""
    values = [value for value in settings[3:] if not value.startswith("data.dir=")]
    options = [word for word in more if "=" not in word]
    return [
        *("bash", str(ROOT / "egs" / "mini" / "run.sh"), "--stage", "3", "--stop-stage", "3"),
        *("--model", "campplus_tiny", "--data", str(data), "--exp", str(exp), *options),
        *("--set", *values, *(word for word in more if "=" in word)),
    ]


def training_of(words: list[str]) -> list[str]:
    """What stage 3 would run, without the seconds in which run.sh looks for a Python."""
    done = subprocess.run([*words, "--dry-run"], capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("python -m "))
    return [sys.executable, *shlex.split(line)[1:]]
