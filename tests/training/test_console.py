"""The progress bar on a pseudo terminal: in one line, below whole lines of the log."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

COLUMNS = 60
TRAINING = """
import logging, sys, time
from pathlib import Path
from speakerlab.training.appended import LogFile
from speakerlab.training.monitor import Monitor
folder = Path(sys.argv[1])
logging.basicConfig(format="%(message)s", level=logging.INFO)
logging.getLogger().addHandler(LogFile(folder / "train.log"))
monitor = Monitor(folder, total_steps=8, every_seconds=100)
monitor.begin(0)
for step in range(1, 9):
    time.sleep(0.21)  # the bar is not redrawn before
    monitor.train_row(step, {"loss": 3 / step, "name": step})
    if step == 4:
        logging.info("a word from elsewhere")
        monitor.valid_row(4, {"eer": 0.25})
    if step == int(sys.argv[2]):
        logging.shutdown()
        __import__("os")._exit(0)  # what the screen shows at this moment
monitor.close()
"""


def screen(data: str) -> list[str]:
    """Return the lines of a terminal that knows line feed, return and "erase to the end"."""
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
    """Return all that was written to a terminal of 60 columns."""
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


def test_lines_are_whole_and_the_bar_is_the_last(tmp_path):
    *said, bar = screen(run_on_terminal(tmp_path, 6))
    assert [line.rstrip() for line in said] == [
        "a word from elsewhere",
        "step 4: validation: eer 0.25",
    ]
    assert bar.startswith(" 75%|") and "6/8" in bar and "loss 0.5" in bar
    assert len(bar) <= COLUMNS
    lines = (tmp_path / "train.log").read_text()
    assert lines == "a word from elsewhere\nstep 4: validation: eer 0.25\n"


def test_at_the_end_the_bar_is_gone(tmp_path):
    *_, last, rest = screen(run_on_terminal(tmp_path, 0))
    assert last.startswith("step 8/8 ETA 0:00:00 loss 0.375") and not rest.strip()
