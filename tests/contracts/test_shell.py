"""Shell files pass the linters, and run.sh is the same file in every recipe."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sysconfig.get_path("scripts"))
SHELL_FILES = [*sorted(ROOT.glob("egs/*/*.sh")), ROOT / "benchmarks/gpu.sh", ROOT / ".ci/run"]
RECIPES = sorted(path.parent for path in ROOT.glob("egs/*/recipe.sh"))


def run_tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOLS / name, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_shellcheck_finds_nothing() -> None:
    assert len(SHELL_FILES) >= 10
    found = run_tool("shellcheck", "-x", *SHELL_FILES)
    assert (found.stdout, found.returncode) == ("", 0)


def test_shfmt_changes_nothing() -> None:
    found = run_tool("shfmt", "-d", "-i", "2", "-ci", *SHELL_FILES)
    assert (found.stdout, found.returncode) == ("", 0)


def test_run_sh_is_one_file() -> None:
    assert len(RECIPES) >= 3
    assert len({(recipe / "run.sh").read_bytes() for recipe in RECIPES}) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_sh_holds_variables_only(recipe: Path) -> None:
    lines = (recipe / "recipe.sh").read_text().splitlines()
    code = [line for line in lines if line and not line.startswith("#")]
    assert code
    for line in code:
        name, equals, value = line.partition("=")
        assert name.isidentifier(), line
        assert equals, line
        assert not set("$`;&|<>") & set(value), line
