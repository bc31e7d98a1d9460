"""A lock on an experiment's folder: one run at a time."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO


def lock_experiment(exp_dir: Path) -> TextIO:
    """Take `exp/.lock`, or raise ValueError naming its holder; keep the returned file open.

    The kernel releases it when the process ends, however it ends; forked workers do not inherit it.
    """
    exp_dir.mkdir(parents=True, exist_ok=True)
    file = (exp_dir / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{exp_dir}: is being trained by {holder}; wait for it or use another --exp"
        ) from None
    file.truncate(0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {started}\n")
    file.flush()
    return file
