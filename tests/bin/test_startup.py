"""What a user waits for before anything is computed: help, wrong options."""

import re
import resource
import subprocess
import sys

import pytest
from tiny import ROOT

from speakerlab.__main__ import COMMANDS

LOAD = """
import sys
import speakerlab
speakerlab.load(sys.argv[1])
sys.exit("imports the compiler" if "torch._dynamo" in sys.modules else 0)
"""
# Half of what torch takes; not of the clock, because machines are busy.
MAX_CPU_SECONDS = 1.6
# Calls every command in one process, and names the first to import torch.
ASK_ALL = """
import contextlib, importlib, io, sys
from speakerlab.__main__ import module_of
for name in sys.argv[1:]:
    module = importlib.import_module(module_of(name))
    for words in (["--help"], ["--no-such-option"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                module.main(words)
            except SystemExit:
                pass
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""


def cpu_seconds(*command: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Return the CPU time of a command, with its children, and the finished process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user_seconds = after.ru_utime - before.ru_utime
    system_seconds = after.ru_stime - before.ru_stime
    return user_seconds + system_seconds, done


def test_no_command_imports_torch_before_its_options_are_right():
    _, done = cpu_seconds(sys.executable, "-c", ASK_ALL, *COMMANDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "values", "code"),
    [
        ("--help", ["usage: speakerlab COMMAND"], 0),
        ("train --help", ["usage: speakerlab train"], 0),
        ("score --help", ["usage: speakerlab score"], 0),
        ("train --exp x --config y --ini 3", ["speakerlab train: ", "--init"], 1),
    ],
)
def test_help_and_wrong_options_take_little(arguments, values, code):
    command = ["-m", "speakerlab", *arguments.split()]
    seconds, done = cpu_seconds(sys.executable, *command)
    printed = done.stdout + done.stderr
    for value in values:
        assert value in printed
    assert done.returncode == code
    assert seconds < MAX_CPU_SECONDS


@pytest.mark.parametrize(
    ("arguments", "module", "package"),
    [
        ("embed a.wav --model m --out o", "soundfile", "soundfile"),
        ("plan --model campplus", "yaml", "pyyaml"),
        ("plot det a --out a.pdf", "matplotlib", "matplotlib"),
    ],
)
def test_a_missing_package_is_a_line_with_the_command_that_installs_it(
    arguments, module, package
):
    # Python refuses to import a module that is None in sys.modules.
    hide = f"import sys; sys.modules['{module}'] = None"
    options = f"sys.argv[1:] = {arguments.split()}"
    code = f"{hide}; {options}; from speakerlab.__main__ import main; main()"
    _, done = cpu_seconds(sys.executable, "-c", code)
    expected = f"{package}: is not installed; pip install {package}\n"
    assert done.stderr == expected
    assert done.returncode == 1


def test_the_version_is_printed_without_importing_torch():
    seconds, done = cpu_seconds(sys.executable, "-m", "speakerlab", "--version")
    pattern = r"speakerlab [\d.]+ \(commit \S+\), torch \S+, Python \S+\n"
    assert re.fullmatch(pattern, done.stdout)
    assert seconds < MAX_CPU_SECONDS


def test_loading_a_model_does_not_import_the_compiler(publish_to):
    """Which takes seconds."""
    folder, *_ = publish_to("model")
    _, done = cpu_seconds(sys.executable, "-c", LOAD, str(folder))
    assert done.returncode == 0, done.stderr
