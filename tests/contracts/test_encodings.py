"""Text files do not depend on the system: they have a stated encoding, and `\\n` ends a line."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "speakerlab").rglob("*.py"))
SOURCES += sorted((ROOT / "egs/common").rglob("*.py"))
SOURCES += sorted((ROOT / "examples").rglob("*.py"))
# What has another `open`.
OTHERS = {"av", "os", "self", "tarfile", "trainer", "wave"}
# These open files without text: of the kernel, of locks, or where nothing is kept.
WITHOUT_TEXT = {
    "speakerlab/bin/command.py": 1,
    "speakerlab/core/atomic.py": 2,
    "speakerlab/core/system.py": 3,
    "speakerlab/data/shards.py": 2,
    "speakerlab/training/group.py": 1,
    "speakerlab/training/waiting.py": 1,
    "egs/common/environment.py": 1,
}
# These write text with the line ends of the system: of locks, or a number without a line end.
WITHOUT_LINES = {
    "speakerlab/data/remote.py": 1,
    "speakerlab/experiments/consistency.py": 1,
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


def writes_lines_of_the_system(node: ast.AST) -> bool:
    """Return whether a call writes text whose lines end with two characters on Windows."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    names = {keyword.arg for keyword in node.keywords}
    if "newline" in names:
        return False
    # Our own `write_text`, without an encoding, ends lines alike everywhere.
    if node.func.attr == "write_text":
        return "encoding" in names or len(node.args) > 1
    if node.func.attr != "open" or "encoding" not in names:
        return False
    modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
    return any(
        isinstance(mode, ast.Constant) and str(mode.value)[:1] in "wax"
        for mode in [*node.args[:1], *modes]
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("path.write_text(text, encoding='utf-8')", True),
        ("path.write_text(text, 'utf-8')", True),
        ("path.open('w', encoding='utf-8')", True),
        ("path.open(mode='a', encoding='utf-8')", True),
        ("path.write_text(text, encoding='utf-8', newline='\\n')", False),
        ("path.open('w', encoding='utf-8', newline='')", False),
        ("path.open(encoding='utf-8')", False),
        ("path.open('r', encoding='utf-8')", False),
        ("path.open('wb')", False),
        ("write_text(path, text)", False),
    ],
)
def test_lines_of_the_system_are_found(code, expected):
    call = ast.parse(code, mode="eval").body
    assert writes_lines_of_the_system(call) == expected


def test_every_line_ends_alike_on_every_system():
    lines_of: dict[str, list[int]] = {}
    for path in (ROOT / "speakerlab").rglob("*.py"):
        lines: list[int] = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if writes_lines_of_the_system(node):
                lines.append(node.lineno)
        name = path.relative_to(ROOT).as_posix()
        if len(lines) > WITHOUT_LINES.get(name, 0):
            lines_of[name] = lines
    assert lines_of == {}
