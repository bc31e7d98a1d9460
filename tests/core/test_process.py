"""Ctrl-C ends a command and its processes, without a traceback; kinds of machines."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from speakerlab.core import system

ROOT = Path(__file__).parents[2]
# The first item stands for a user who presses Ctrl-C: every process of the terminal gets it.
INTERRUPTED = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from speakerlab.core.parallel import map_in_processes

def work(item):
    if item == 0:
        os.killpg(os.getpgrp(), signal.SIGINT)
    time.sleep(60)

try:
    list(map_in_processes(work, range(8), 2))
except KeyboardInterrupt:
    print("stopped")
"""

IMPORTS = """
import os, signal, sys
sys.path.insert(0, {root!r})
from speakerlab.core.ctrl_c import leave_on_ctrl_c

leave_on_ctrl_c()
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    print("an exception, which could abort the process in C++ code")
"""


@pytest.fixture
def run_script(tmp_path):
    """run_script(text) -> the finished script, the only process of its session."""

    def run(text: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "work.py"
        script.write_text(text.format(root=str(ROOT)))
        return subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            timeout=30,
            start_new_session=True,
        )

    return run


@pytest.mark.parametrize(
    ("release", "has_device", "expected"),
    [
        ("5.15.153.1-microsoft-standard-WSL2", True, True),
        ("4.4.0-19041-Microsoft", False, True),
        ("6.6.36-my-kernel", True, True),  # in WSL, with the user's own kernel
        ("6.8.0-45-generic", False, False),
        (None, False, False),  # not Linux
    ],
)
def test_linux_on_windows_is_known_by_its_kernel_or_its_device(
    tmp_path, release, has_device, expected
):
    (tmp_path / "dev").mkdir()
    if has_device:
        (tmp_path / "dev/dxg").touch()
    if release is not None:
        folder = tmp_path / "proc/sys/kernel"
        folder.mkdir(parents=True)
        (folder / "osrelease").write_text(f"{release}\n")
    assert system.is_on_wsl(tmp_path) == expected


def test_ctrl_c_before_a_training_raises_no_exception(run_script):
    finished = run_script(IMPORTS)
    assert finished.stdout == ""
    assert finished.stderr == "stopped by Ctrl-C\n"
    assert finished.returncode == 128 + signal.SIGINT


def test_ctrl_c_ends_all_processes_at_once_without_a_traceback(run_script):
    finished = run_script(INTERRUPTED)
    assert finished.stderr == ""
    assert finished.stdout == "stopped\n"
