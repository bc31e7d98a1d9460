"""Processes that a command starts end with it."""

import subprocess
import sys
from pathlib import Path

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


def test_ctrl_c_ends_all_processes_at_once_without_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(INTERRUPTED.format(root=str(ROOT)))
    finished = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=30,
        start_new_session=True,
    )
    assert finished.stderr == ""
    assert finished.stdout == "stopped\n"
