"""The bar on a real (pseudo) terminal: redrawn in one line, below whole lines of the log."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

COLUMNS = 60
TRAINING = """
import logging, sys, time
from pathlib import Path
from speakerlab.training.appended import LogFile
from speakerlab.training.monitor import Monitor
folder = Path(sys.argv[1])
logging.basicConfig(format="%(message)s", level=logging.INFO)
logging.getLogger().addHandler(LogFile(folder / "train.log"))
monitor = Monitor(folder, start_step=0, total_steps=8, every_seconds=100)
for step in range(1, 9):
    time.sleep(0.21)  # the bar is not redrawn before
    monitor.train_row(step, {"loss": 3 / step, "a_name_that_makes_the_line_long": step})
    if step == 4:
        logging.info("a word from elsewhere")
        monitor.valid_row(4, {"eer": 0.25})
    if step == int(sys.argv[2]):
        logging.shutdown()
        __import__("os")._exit(0)  # what the screen shows at this moment
monitor.close()
"""


def screen(data: str) -> list[str]:
    """The lines of a terminal that knows a line feed, a return and "erase to the end"."""
    lines, column = [""], 0
    for part in data.replace("\r\n", "\n").replace("\x1b[K", "\x00"):
        if part == "\n":
            lines.append("")
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\x00":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + 1 :]
            column += 1
    return lines


def run_on_terminal(folder, stop_step: int) -> str:
    """All that was written to a terminal of 60 columns."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    words = [sys.executable, "-c", TRAINING, str(folder), str(stop_step)]
    with subprocess.Popen(words, stderr=terminal) as process:
        os.close(terminal)
        data = b""
        try:
            while part := os.read(master, 4096):
                data += part
        except OSError:  # the other end is closed
            os.close(master)
    assert process.returncode == 0, data.decode()
    return data.decode()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, what a run that was cut off at step 6 of 8 wrote)"""
    folder = tmp_path_factory.mktemp("cut")
    return folder, run_on_terminal(folder, 6)


def test_lines_are_whole_and_the_bar_is_the_last(written):
    said, there, bar = screen(written[1])
    assert said == "a word from elsewhere" and there == "step 4: validation: eer 0.25"
    assert bar.startswith(f"[{'#' * 18}......] 75% step 6/8 ETA 0:00:0")
    assert len(bar) < COLUMNS


def test_the_bar_is_redrawn_in_its_line(written):
    assert written[1].count("\r\x1b[K[") == 6 and written[1].count("\n") == 2


def test_the_log_file_has_plain_lines(written):
    lines = (written[0] / "train.log").read_text()
    assert lines == "a word from elsewhere\nstep 4: validation: eer 0.25\n"


def test_at_the_end_the_bar_is_gone(tmp_path):
    lines = screen(run_on_terminal(tmp_path, 0))
    assert lines[-2].startswith("step 8/8 ETA 0:00:00 loss 0.375") and lines[-1] == ""
    assert not any("#" in line for line in lines)
