"""Ctrl-C ends a command and the processes that it started, without a traceback."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The first item stands for a user who presses Ctrl-C: every process of the terminal gets it.
INTERRUPTED = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from speakerlab.core.process import map_in_processes

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
from speakerlab.core.process import leave_on_ctrl_c

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


def test_ctrl_c_before_a_training_raises_no_exception(run_script):
    finished = run_script(IMPORTS)
    assert finished.stdout == ""
    assert finished.stderr == "stopped by Ctrl-C\n"
    assert finished.returncode == 128 + signal.SIGINT


def test_ctrl_c_ends_all_processes_at_once_without_a_traceback(run_script):
    finished = run_script(INTERRUPTED)
    assert finished.stderr == ""
    assert finished.stdout == "stopped\n"
