"""What a user waits for before anything is computed: help, wrong options, the Python to use."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT

from speakerlab.__main__ import COMMANDS

LOAD = """
import sys
import speakerlab
speakerlab.load(sys.argv[1])
sys.exit("imports the compiler" if "torch._dynamo" in sys.modules else 0)
"""
MAX_CPU_SECONDS = 1.0  # not of the clock: a busy machine must not fail a test
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
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done


def test_no_command_imports_torch_before_its_options_are_right():
    _, done = cpu_seconds(sys.executable, "-c", ASK_ALL, *COMMANDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "values", "code"),
    [
        ("--help", ["usage: speakerlab COMMAND"], 0),
        ("train --help", ["usage: speakerlab train"], 0),
        ("score --help", ["usage: speakerlab score"], 0),
        ("train --exp x --config y --ini 3", ["speakerlab train: ", "--init"], 1),
    ],
)
def test_help_and_wrong_options_take_little(words, values, code):
    seconds, done = cpu_seconds(sys.executable, "-m", "speakerlab", *words.split())
    assert all(value in done.stdout + done.stderr for value in values)
    assert done.returncode == code and seconds < MAX_CPU_SECONDS


def test_a_python_is_found_without_importing_torch():
    ask = 'PATH=$1:$PATH; source egs/common/env.sh; find_python; echo "$python"'
    folder = str(Path(sys.executable).parent)
    seconds, done = cpu_seconds("bash", "-c", ask, "bash", folder)
    assert Path(done.stdout.splitlines()[-1]).parent == Path(sys.executable).parent
    assert seconds < MAX_CPU_SECONDS


@pytest.mark.parametrize(
    ("torch", "problem"),
    [(None, "torch 2.6 or newer is needed, found none"), ("2.5.1+cu124", "found 2.5.1+cu124")],
)
def test_a_python_without_the_oldest_supported_packages_is_not_used(tmp_path, torch, problem):
    if torch is not None:
        (tmp_path / "torch.dist-info").mkdir()
        (tmp_path / "torch.dist-info/METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    ask = 'source egs/common/env.sh; try_python "$1" run'
    done = subprocess.run(
        ["bash", "-c", ask, "bash", python], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"env: not using {python} (" in done.stdout and problem in done.stdout


@pytest.mark.parametrize(
    ("words", "module", "package"),
    [
        ("embed a.wav --model m --out o", "soundfile", "soundfile"),
        ("plan --model campplus", "yaml", "pyyaml"),
    ],
)
def test_a_missing_package_is_a_line_with_the_command_that_installs_it(words, module, package):
    code = f"import sys; sys.modules['{module}'] = None; sys.argv[1:] = {words.split()}; "
    code += "from speakerlab.__main__ import main; main()"
    _, done = cpu_seconds(sys.executable, "-c", code)
    expected = f"{package}: is not installed; pip install {package}\n"
    assert (done.stderr, done.returncode) == (expected, 1)


def test_the_version_is_printed_without_importing_torch():
    seconds, done = cpu_seconds(sys.executable, "-m", "speakerlab", "--version")
    assert re.fullmatch(r"speakerlab [\d.]+ \(commit \S+\), torch \S+, Python \S+\n", done.stdout)
    assert seconds < MAX_CPU_SECONDS


def test_loading_a_model_does_not_import_the_compiler(publish_to):
    """Which takes seconds."""
    _, done = cpu_seconds(sys.executable, "-c", LOAD, str(publish_to("model")[0]))
    assert done.returncode == 0, done.stderr
