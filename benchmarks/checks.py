"""Whether trainings work on this machine: checks and tests, as rows that count what passed.

    python benchmarks/checks.py --json FILE

`check.doctor` is `speakerlab doctor`, `check.gpu` all tests that need a GPU (none run on a CPU),
`check.harm` tests that run anywhere: trainings with NaNs, without memory, killed and resumed, on a
GPU if there is one. The tests need pytest.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from sides import ROOT, report, run_case, say, wants

HARMED = "tests/bin/test_harm.py::test_"
CHECKS = {
    # By name: other files import the development tools.
    "gpu": (
        "-m",
        "gpu",
        "tests/training/test_task.py",
        "tests/training/test_update.py",
        "tests/bench/test_profile.py",
    ),
    "harm": (
        f"{HARMED}a_step_with_a_nan_is_skipped_whole",
        f"{HARMED}a_validation_that_is_not_finite_is_rolled_back",
        f"{HARMED}a_training_that_runs_out_of_memory_saves_and_retries_with_a_smaller_micro_batch",
        "tests/bin/test_kills.py::test_a_killed_training_resumes_bit_identically",
    ),
}


def compare(options: argparse.Namespace) -> Iterator[Any]:
    """Yield a row for each check that passes; exit at the first that fails."""
    on_gpu = options.device != "cpu"
    if wants(options, "check.doctor"):
        num_ok = doctor(options.folder, on_gpu=on_gpu)
        yield report("check.doctor", [[num_ok]], unit="passed")
    for name, test_arguments in CHECKS.items():
        if wants(options, f"check.{name}"):
            num_passed = count_tests(test_arguments, options.folder / "tests.xml")
            if not num_passed and on_gpu:
                raise SystemExit(f"check.{name}: all tests were skipped; see above")
            yield report(f"check.{name}", [[num_passed]], unit="passed")


def doctor(folder: Path, *, on_gpu: bool) -> int:
    """Return how many lines are ok; exit where one has failed."""
    arguments = ["doctor", "--exp", str(folder / "exp")]
    arguments += ["--gpus", str(torch.cuda.device_count())] if on_gpu else []
    command = [sys.executable, "-m", "speakerlab", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    say(done.stdout)
    if done.returncode:
        raise SystemExit(f"check.doctor: exited with {done.returncode}; see above")
    return sum(line.startswith("ok") for line in done.stdout.splitlines())


def count_tests(test_arguments: Sequence[str], report: Path) -> int:
    """Run tests; return how many passed, and exit where one has failed."""
    command = [sys.executable, "-m", "pytest", f"--junit-xml={report}", *test_arguments]
    # Without pytest-timeout, its mark would be refused.
    command += ["--override-ini", "addopts=-q"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(
            f"pytest {' '.join(test_arguments)}: exited with {code}; see above"
        )
    (test_suite,) = ElementTree.parse(report).getroot()
    return int(test_suite.attrib["tests"]) - int(test_suite.attrib["skipped"])


if __name__ == "__main__":
    run_case(__doc__, compare, peers=())
