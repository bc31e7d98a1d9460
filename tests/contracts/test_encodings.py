"""Text files have a stated encoding, so that they do not depend on the locale."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "speakerlab").rglob("*.py"))
SOURCES += sorted((ROOT / "egs/common").rglob("*.py"))
# What has another `open`.
OTHERS = {"av", "os", "self", "tarfile", "trainer"}
# These open files without text: of the kernel, of locks, or where nothing is kept.
WITHOUT_TEXT = {
    "speakerlab/bin/command.py": 1,
    "speakerlab/core/atomic.py": 2,
    "speakerlab/core/process.py": 3,
    "speakerlab/data/shards.py": 2,
    "speakerlab/training/group.py": 1,
    "egs/common/environment.py": 1,
}


def opens_text_without_encoding(node: ast.AST) -> bool:
    """Return whether a call reads or writes text in the encoding of the locale."""
    if not isinstance(node, ast.Call):
        return False
    if any(keyword.arg == "encoding" for keyword in node.keywords):
        return False
    position = 0  # of the mode, among the arguments
    if isinstance(node.func, ast.Attribute):
        name = node.func.attr
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id in OTHERS:
            return False
        if name in ("read_text", "write_text"):
            # The encoding may be given by position, behind the text.
            return len(node.args) <= (name == "write_text")
    elif isinstance(node.func, ast.Name):
        name = node.func.id
        position = 1
    else:
        return False
    if name != "open":
        return False
    modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
    modes += node.args[position : position + 1]
    for mode in modes:
        # The mode may be chosen between two.
        constants = [part for part in ast.walk(mode) if isinstance(part, ast.Constant)]
        if any("b" in str(constant.value) for constant in constants):
            return False
    return True


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("path.open()", True),
        ("path.open('w')", True),
        ("path.open(mode='a')", True),
        ("open(path, 'r')", True),
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("path.open('rb')", False),
        ("path.open(mode='wb')", False),
        ("open(path, 'ab')", False),
        ("path.open('ab' if exists else 'wb')", False),
        ("path.open('w', encoding='utf-8')", False),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, 'utf-8')", False),
        ("read_text(path)", False),
        ("os.open(path, os.O_RDONLY)", False),
    ],
)
def test_calls_without_encoding_are_found(code, expected):
    call = ast.parse(code, mode="eval").body
    assert opens_text_without_encoding(call) == expected


def test_every_text_file_has_an_encoding():
    assert SOURCES
    lines_of: dict[str, list[int]] = {}
    for path in SOURCES:
        lines: list[int] = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if opens_text_without_encoding(node):
                lines.append(node.lineno)
        name = path.relative_to(ROOT).as_posix()
        if len(lines) > WITHOUT_TEXT.get(name, 0):
            lines_of[name] = lines
    assert lines_of == {}
