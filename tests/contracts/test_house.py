"""Linters and types are clean, docstrings begin with a verb, and pins are in range."""

import ast
import re
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
NO_VERBS = "A|All|An|As|Every|From|Its|Mean|Names|No|One|Our|Rows|Share|The|What|Whether"
BEGINS_WITH_A_VERB = re.compile(rf"(?!({NO_VERBS})\b)[A-Z][a-z]+[ ,;.:]")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.timeout(900)  # basedpyright takes minutes on a busy machine
@pytest.mark.parametrize(
    "command",
    ["ruff check", "ruff format --check", f"basedpyright --pythonpath {sys.executable}"],
    ids=["ruff check", "ruff format", "basedpyright"],
)
def test_tool_finds_nothing(command: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    for package in ("speakerlab", "egs", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
                if text:
                    assert BEGINS_WITH_A_VERB.match(text), f"{path}:{node.lineno}: {text}"


def test_each_pin_is_in_its_range() -> None:
    ranges = {
        Requirement(text).name: Requirement(text).specifier
        for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["report"]]
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
