"""What a user waits for before anything is computed: help, wrong options, the Python to take."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from speakerlab.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
MAX_CPU_SECONDS = 1.0  # not of the clock: a busy machine must not fail a test
# Calls every command in one process, and says which was the first to import torch.
ASK_ALL = """
import contextlib, importlib, io, keyword, sys
for name in {names}:
    module = importlib.import_module(f"speakerlab.bin.{{name}}{{'_' * keyword.iskeyword(name)}}")
    for words in (["--help"], ["--no-such-option"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                module.main(words)
            except SystemExit:
                pass
    if "torch" in sys.modules:
        sys.exit(f"{{name}} imports torch")
"""


def cpu_seconds(*command: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """What a command takes of the CPU, with its children."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return spent() - before, done


def test_no_command_imports_torch_before_its_options_are_right(run):
    done = run("-c", ASK_ALL.format(names=list(COMMANDS)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        ("--help", "usage: speakerlab COMMAND", 0),
        ("train --help", "usage: speakerlab train", 0),
        ("score --help", "usage: speakerlab score", 0),
        ("train --epx x", "speakerlab train: the following arguments are required", 1),
        ("train --exp x --config y --below-micro 3", "did you mean --below-micro-batch?", 1),
    ],
)
def test_help_and_wrong_options_take_little(words, told, code):
    seconds, done = cpu_seconds(sys.executable, "-m", "speakerlab", *words.split())
    assert told in done.stdout + done.stderr
    assert done.returncode == code
    assert seconds < MAX_CPU_SECONDS


def test_the_python_to_take_is_found_without_importing_torch():
    ask = 'PATH=$1:$PATH; source egs/common/env.sh; find_python; echo "$python"'
    folder = str(Path(sys.executable).parent)
    seconds, done = cpu_seconds("bash", "-c", ask, "bash", folder)
    assert Path(done.stdout.splitlines()[-1]).parent == Path(sys.executable).parent
    assert seconds < MAX_CPU_SECONDS


def test_a_part_that_is_not_there_is_named():
    ask = 'source egs/common/env.sh; "$1" -I -S -c "$needed_to_run"'
    done = subprocess.run(
        ["bash", "-c", ask, "bash", sys.executable], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "No module named 'torch'\n"
