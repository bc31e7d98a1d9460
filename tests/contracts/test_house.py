"""Linters and types are clean, pins are in range, and the README's tree of files is true."""

import re
import subprocess
import sys
from collections.abc import Iterator
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


def test_each_pin_is_in_its_range() -> None:
    ranges = {
        Requirement(text).name: Requirement(text).specifier
        for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["plot"]]
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


def list_tree(text: str) -> Iterator[tuple[str, str]]:
    """Yield (folder, name) for each name in the first fenced tree of a README.

    A line is `name ... names or words`, indented below its folder; a name ends with "/" or has a
    suffix. Names behind a folder's name are in that folder.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    tree = next((block for block in blocks if re.search(r"^speakerlab/", block, re.MULTILINE)), "")
    above: list[tuple[int, str]] = [(-1, "")]
    for line in tree.splitlines():
        head, *rest = line.split() or [""]
        indent = len(line) - len(line.lstrip())
        if not head or not is_name(head):
            continue
        while above[-1][0] >= indent:
            above.pop()
        folder = above[-1][1]
        yield folder, head
        inside = folder
        if head.endswith("/"):
            inside = folder + head
            above.append((indent, inside))
        yield from ((inside, word) for word in rest if is_name(word))


def is_name(word: str) -> bool:
    return (
        re.fullmatch(r"[\w./-]*\w(/|\.(py|sh|md|yaml|txt|toml))|Makefile|LICENSE", word) is not None
    )


def find_missing(text: str, root: Path) -> list[str]:
    return [
        folder + name
        for folder, name in list_tree(text)
        if not (root / folder / name).exists() and not (root / name).exists()
    ]


def test_readme_tree_is_true() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(list(list_tree(text))) >= 10, "README.md has no fenced tree that names speakerlab/"
    assert find_missing(text, ROOT) == []


def test_missing_names_of_a_tree_are_found(tmp_path: Path) -> None:
    (tmp_path / "speakerlab/data").mkdir(parents=True)
    (tmp_path / "speakerlab/data/audio.py").touch()
    (tmp_path / "Makefile").touch()
    text = (
        "# x\n```\nMakefile   targets, e.g. test\nspeakerlab/\n  batch.py  what passes\n"
        "  data/    disk -> batch: audio.py shards.py\ndocs/\n```\n"
    )
    assert find_missing(text, tmp_path) == [
        "speakerlab/batch.py",
        "speakerlab/data/shards.py",
        "docs/",
    ]
