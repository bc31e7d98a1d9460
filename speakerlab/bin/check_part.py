"""Run the contract tests on a part of your own: model, head, augmentation, optimizer, ..."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.core import process
from speakerlab.core.registry import import_plugin

ROOT = Path(__file__).parents[2]
VARIABLE = "SPEAKERLAB_PART"  # read by tests/outside.py
TESTS = (
    "models/test_models.py",
    "models/test_onnx.py",
    "losses/test_heads.py",
    "frontend/test_contract_of_augmentations.py",
    "training/test_update.py",
    "training/test_schedules.py",
    "diarization/test_clustering.py",
)


def main(arguments: Sequence[str]) -> None:
    options = parser("check-part", __doc__)
    options.add("part MODULE:CLASS", "class or function to test")
    options.add_settings("its arguments, to make it small, e.g. channels=8")
    args = options.parse_args(arguments)
    tests = [ROOT / "tests" / name for name in TESTS]
    if not tests[0].exists():
        raise ValueError(
            f"check-part: {tests[0]} is missing; use a clone of the repository"
        )
    from speakerlab.config.layers import merge_layers

    import_plugin(args.part)  # raises ValueError if it cannot be imported
    settings, _ = merge_layers([], args.set)
    os.environ[VARIABLE] = json.dumps([args.part, settings])
    # Parametrized tests have the part as the parameter "outside".
    command = [sys.executable, "-m", "pytest", "-k", "outside"]
    command += [str(path) for path in tests]
    result = subprocess.run(command, cwd=ROOT, check=False)
    process.leave(process.EXIT_INPUT if result.returncode else 0)
