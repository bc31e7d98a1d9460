"""The launcher says in one line which rank ended a run, and hands its code on."""

import pytest

RANK_1_DIES = """
import os, sys, time
if os.environ["RANK"] == "1":
    {death}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("death", "code", "line"),
    [
        ("os.kill(os.getpid(), 9)", 137, "rank 1: ended the run, got SIGKILL of process "),
        ("sys.exit(3)", 3, "rank 1: ended the run, got exit code 3 of process "),
    ],
)
def test_the_rank_that_died_first_is_named(run, tmp_path, death, code, line):
    script = tmp_path / "ranks.py"
    script.write_text(RANK_1_DIES.format(death=death))
    done = run("-m", "speakerlab.bin.launch", "--standalone", "--nproc-per-node", "2", script)
    assert done.returncode == code
    assert line in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.rstrip().endswith(
        "run the same command again to go on from the last checkpoint"
    )
