"""Signals to run.sh during training: forwarded once, waited for and reported.

A program that saves on a signal replaces the training of the toy recipe.
"""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from toy_recipe import Toy

STOPS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]

# Logs the signals that it ignores at the start, and each one it gets; saving takes half a second.
TRAINING = """#!{python}
import os, signal, sys, time
numbers = [getattr(signal, name) for name in {stops}]
log, got = open(os.environ["CALLS"] + ".training", "w", buffering=1), []
ignored = [number.name for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
for number in numbers:
    signal.signal(number, lambda number, frame: got.append(number))
log.write(f"ignored {{ignored}}\\n")
while not got:
    time.sleep(0.01)
time.sleep(0.5)
log.write(" ".join(["got", *(signal.Signals(number).name for number in got)]) + "\\n")
os._exit({code})
"""


class Run:
    """Stage 3 of the toy recipe, running."""

    def __init__(self, folder: Path, code: str = "128 + got[0]", **more: Any) -> None:
        toy = Toy(folder)
        assert toy.run("--stop-stage 2").returncode == 0
        program = folder / "training"
        program.write_text(TRAINING.format(python=sys.executable, stops=STOPS, code=code))
        program.chmod(0o755)
        self.log = Path(f"{toy.calls}.training")
        self.toy = toy
        self.process = subprocess.Popen(
            toy.words("--stage 3"),
            env=toy.variables(TRAINING=str(program)),
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **more},
        )
        deadline = time.monotonic() + 20
        while not self.log.exists() or not self.log.read_text():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.01)

    def end(self) -> tuple[int, list[str], str]:
        """Return (exit code, lines of the training, errors of run.sh)."""
        _, errors = self.process.communicate(timeout=20)
        text = errors.decode() if isinstance(errors, bytes) else ""
        return self.process.returncode, self.log.read_text().splitlines(), text


@pytest.mark.parametrize("name", STOPS)
def test_a_training_saves_before_the_shell_exits(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    run.process.send_signal(signal.Signals[name])
    code, log, errors = run.end()
    passed = name.replace("INT", "TERM")  # Ctrl-C, see below
    assert log == ["ignored []", f"got {passed}"]
    assert code == 128 + signal.Signals[name]
    assert refused(errors, "stage 3", f"stopped by {name}") and errors.count("\n") == 1
    assert [call[4] for call in run.toy.recorded()][-1] == "train"  # no stage after it


def test_signals_that_follow_do_not_cut_saving_short(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in ("SIGUSR1", "SIGTERM", "SIGTERM"):
        run.process.send_signal(signal.Signals[name])
        time.sleep(0.1)
    code, log, _ = run.end()
    assert log[1].split()[:3] == ["got", "SIGUSR1", "SIGTERM"]
    assert code == 128 + signal.SIGUSR1  # the training's own


@pytest.mark.parametrize(("left", "line"), [("0", "stopped by SIGTERM"), ("7", "exit code 7")])
def test_no_stage_follows_a_stop_however_the_training_ends(
    tmp_path: Path, left: str, line: str
) -> None:
    run = Run(tmp_path, code=left)
    run.process.send_signal(signal.SIGTERM)
    code, _, errors = run.end()
    assert code == (int(left) or 128 + signal.SIGTERM)
    assert line in errors
    assert [call[4] for call in run.toy.recorded()][-1] == "train"


def test_ctrl_c_at_a_terminal_reaches_the_training(tmp_path: Path) -> None:
    """Only one SIGINT reaches it: a second one would stop it without saving."""
    keyboard, terminal = pty.openpty()
    run = Run(
        tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.write(keyboard, b"\x03")
    code, log, _ = run.end()
    shown = ""
    while "stopped by" not in shown and select.select([keyboard], [], [], 5)[0]:
        shown += os.read(keyboard, 1 << 16).decode()
    assert log == ["ignored []", "got SIGINT SIGTERM"]
    assert code == 128 + signal.SIGINT
    assert "stage 3: stopped by SIGINT" in shown


def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    run = Run(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    _, log, _ = run.end()
    assert log == ["ignored ['SIGHUP']", "got SIGTERM"]


def test_a_sigint_to_the_shell_alone_ends_it_after_the_command_in_the_foreground(
    tmp_path: Path,
) -> None:
    toy, gate = Toy(tmp_path), tmp_path / "gate"
    toy.calls.touch()
    process = subprocess.Popen(
        toy.words("--stop-stage 2"),
        env=toy.variables(GATE=str(gate)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while "prepare.py\t--data" not in toy.calls.read_text():  # stage 0 passes --download
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    gate.touch()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert refused(errors.decode(), "stage 1", "stopped by SIGINT")
    assert "check" not in toy.calls.read_text()
