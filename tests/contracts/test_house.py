"""Linters and types are clean, and pins are in range."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PINS = [
    Requirement(line)
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.lint
@pytest.mark.timeout(900)  # basedpyright takes minutes on a busy machine
@pytest.mark.parametrize(
    "command",
    [
        "ruff check",
        "ruff format --check",
        f"basedpyright --pythonpath {sys.executable}",
    ],
    ids=["ruff check", "ruff format", "basedpyright"],
)
def test_tool_finds_nothing(command: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_each_pin_is_in_its_range() -> None:
    ranges = {
        Requirement(text).name: Requirement(text).specifier
        for text in [
            *PROJECT["dependencies"],
            *PROJECT["optional-dependencies"]["report"],
        ]
    }
    assert {pin.name for pin in PINS} == set(ranges)
    for pin in PINS:
        (exact,) = pin.specifier
        assert exact.operator == "==", pin
        assert exact.version in ranges[pin.name], pin


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.14"])
def test_every_python_gets_one_pin_of_everything(python: str) -> None:
    chosen = [
        pin.name
        for pin in PINS
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
    ]
    assert sorted(chosen) == sorted({pin.name for pin in PINS})
