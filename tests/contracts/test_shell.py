"""Shell files pass the linters and are short; the shared parts of the recipes are the same."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sysconfig.get_path("scripts"))
RECIPES = sorted(ROOT.glob("egs/*/run*.sh"))
SETUP = ROOT / "egs/common/setup.sh"
SHELL_FILES = [
    *sorted(ROOT.glob("egs/*/*.sh")),
    ROOT / "benchmarks/gpu.sh",
    ROOT / ".ci/run",
]
MOST_LINES = 140
every_recipe = pytest.mark.parametrize(
    "path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}"
)


def run_tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLS / name, *arguments], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.lint
def test_shellcheck_finds_nothing() -> None:
    assert len(SHELL_FILES) >= 10
    finished = run_tool("shellcheck", "-x", *SHELL_FILES)
    assert (finished.stdout, finished.returncode) == ("", 0)


@pytest.mark.lint
def test_shfmt_changes_nothing() -> None:
    finished = run_tool("shfmt", "-d", "-i", "2", "-ci", *SHELL_FILES)
    assert (finished.stdout, finished.returncode) == ("", 0)


def test_the_recipes_share_one_shell_file() -> None:
    assert [*ROOT.glob("egs/common/**/*.sh")] == [SETUP]


@every_recipe
def test_a_recipe_is_a_page_of_stages(path: Path) -> None:
    """Each command of a stage is printed by --dry-run, because `run` starts it."""
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    begins = text.index("if stage 0")
    commands = re.findall(
        r"^ *(?:if .*; then )?(\S+ (?:speakerlab|python) .*)", text[begins:], re.M
    )
    assert len(commands) >= 5
    assert all(command.startswith("run ") for command in commands)


@every_recipe
def test_a_recipe_declares_its_options_before_it_reads_them(path: Path) -> None:
    """An assignment without a comment of this form would be no option."""
    text = path.read_text()
    declarations = text.partition("# Options: ")[2].partition("\nparse_options ")[0]
    lines = [
        line for line in declarations.splitlines()[1:] if not line.startswith("# ")
    ]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[a-z_]+=\S* +# [^ ]+: .+", line), line


@pytest.mark.parametrize("number", [3, 4])
def test_all_recipes_train_alike(number: int) -> None:
    """What is the same in all of them is written the same."""
    stage = re.compile(
        rf"^if [^\n]*stage {number} [^\n]*; then\n.*?^fi$", re.MULTILINE | re.DOTALL
    )
    texts = [
        path.read_text()
        for path in RECIPES
        if path.parent.joinpath("prepare.py").exists()
        # Its stage 4 has a training more.
        and not (number == 4 and path.stem == "run_pretrained")
        # Its stage 4 trains on another corpus.
        and not (number == 4 and path.parent.name == "voxblink2")
    ]
    stages = [stage.search(text) for text in texts if "run speakerlab train" in text]
    blocks = [match[0] for match in stages if match is not None]
    assert len(blocks) >= 6
    assert len(set(blocks)) == 1
