"""Three minutes of chaos; `python tests/safety/chaos.py --help` has the longer forms."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")


@pytest.mark.slow
@pytest.mark.timeout(
    1200
)  # the undisturbed trainings, and a last round that began in time
def test_trainings_under_random_faults_end_as_undisturbed_ones():
    arguments = [sys.executable, CHAOS, "--minutes", "3", "--seed", "0", "--ranks", "2"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"(\d+)  faults", done.stdout)
    assert match and int(match[1]) >= 5, done.stdout
