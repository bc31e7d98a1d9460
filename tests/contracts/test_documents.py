"""What README.md and docs/ name exists: files, links, commands, options and keys."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_commands import RECIPE_OPTIONS, parser_of

from speakerlab.__main__ import COMMANDS
from speakerlab.config.schema import FIXED, NAMED, Config
from speakerlab.frontend import FRONTENDS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = sorted(ROOT.glob("docs/*.md"))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *GUIDES]
MIGRATING = ROOT / "docs/migrating.md"


BLOCK = re.compile(
    r"^```[^\n]*\n(.*?)^```"  # between fences
    r"|^((?:    \S[^\n]*\n)+)",  # indented by four blanks
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(r"(^|\s)#\s.*")
SPAN = re.compile(r"`([^`]+)`")


def code_of(text: str) -> Iterator[str]:
    """Yield code without comments: lines of blocks, and spans."""
    for match in BLOCK.finditer(text):
        block = match[1] or match[2]
        one_line_each = block.replace("\\\n", " ")
        for line in one_line_each.splitlines():
            yield COMMENT.sub("", line)
    without_blocks = BLOCK.sub("", text)
    yield from SPAN.findall(without_blocks)


def options_in(code: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", code)


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """Return command -> its options; run.sh is one of the commands."""
    with pytest.MonkeyPatch.context() as patch:
        of_commands = {
            name: set(parser_of(name, patch)._option_string_actions)
            for name in COMMANDS
        }
    return {**of_commands, "run.sh": {*RECIPE_OPTIONS.split(), "--help"}}


def test_the_readme_is_short():
    assert len(README.read_text().split()) < 1000


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(path):
    text = path.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        name, _, anchor = target.partition("#")
        if name.startswith("http"):
            continue
        other = path.parent / name if name else path
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", other.read_text(), re.M)
            assert anchor in {
                re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles
            }


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(path, options):
    for code in code_of(path.read_text()):
        match = re.search(
            r"(?:speakerlab (?=[a-z])|(?=run\.sh ))([a-z.-]+)\s(.*)", code
        )
        if match and not match[2].startswith("="):  # not `speakerlab = ...`
            assert match[1] in options, code
            named = set(options_in(match[2]))
            assert named <= options[match[1]], code


def is_key(name: str) -> bool:
    """Return whether a configuration can have this key."""
    section, *rest = name.split(".")
    if section == "frontend":
        makers = FRONTENDS.values()
        return any(rest[0] in inspect.signature(make).parameters for make in makers)
    if (section,) in FIXED:
        return rest[0] in inspect.signature(FIXED[(section,)][0]).parameters
    if rest[:1] == ["args"] and len(rest) > 1:
        makers = NAMED[section][0].values()
        return any(rest[1] in inspect.signature(make).parameters for make in makers)
    place: Any = Config
    for part in (section, *rest):
        field = getattr(place, "model_fields", {}).get(part)
        if field is None:
            return False
        place = field.annotation
    return True


def test_migrating_names_our_options_and_keys(options):
    """The last column of its tables is about this repository."""
    names = set().union(*options.values())
    rows = [line for line in MIGRATING.read_text().splitlines() if line.startswith("|")]
    keys: list[str] = []
    for row in rows:
        for code in re.findall(r"`([^`]+)`", row.split("|")[-2]):
            assert set(options_in(code)) <= names, code
            # Not followed by a bracket, as in `model.embed(path)`.
            keys += re.findall(
                rf"(?<![\w/.])(?:{'|'.join(Config.model_fields)})\.[a-z_.]+(?![\w.(])",
                code,
            )
    assert len(keys) > 40
    assert [key for key in keys if not is_key(key)] == []


def test_the_tests_of_promises_exist_and_are_called_slow_if_they_are():
    text = (ROOT / "docs/promises.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`( \*slow\*)?", text)
    assert len(named) > 60
    for file, name, slow in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{file}::{name}"
        marks = [ast.unparse(mark) for mark in functions[name].decorator_list]
        assert ("pytest.mark.slow" in marks) == bool(slow), f"{file}::{name}"


def test_files_of_the_architecture_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
    tree = next(block for block in blocks if "\nspeakerlab/" in block)
    names = re.findall(
        r"(?<!\S)(?:[\w.-]+/)+(?!\S)|[\w-]+\.(?:py|sh|md|yaml|cff)\b", tree
    )
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert len(names) > 30
    assert len(files) > 30
    places = ("", "*/", "*/*/")
    assert [
        n for n in names + files if not any(any(ROOT.glob(p + n)) for p in places)
    ] == []
