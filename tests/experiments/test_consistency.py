"""Only one run at a time trains in an experiment's folder."""

import subprocess
import sys

from refusals import refuses

from speakerlab.experiments.consistency import lock_experiment

HOLD = """
import sys, time
from pathlib import Path
from speakerlab.experiments.consistency import lock_experiment
lock = lock_experiment(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with refuses(str(tmp_path), f"process {holder.pid} on"):
            lock_experiment(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    lock_experiment(tmp_path).close()
