"""Import order and other rules that ruff does not know; planted violations are found."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The declared order: a package imports itself and those in rows below its own, and nothing else.
ORDER = (
    ("bin",),
    ("bench",),
    ("experiments",),
    ("inference",),
    ("checkpoints",),
    ("config",),
    ("embedder",),
    ("data", "frontend", "models", "losses", "training", "scoring", "diarization"),
    ("core",),
)
ROW = {name: index for index, row in enumerate(ORDER) for name in row}
MAX_PACKAGES = 14
BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}


def parts_of(path: Path, package: Path) -> list[str]:
    """Return a module's dotted name in parts: `speakerlab/models/pooling.py` -> three parts."""
    parts = list(path.relative_to(package.parent).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path: Path, package: Path) -> Iterator[str]:
    """Yield the absolute dotted names of all imports, also of those inside functions."""
    folder = list(path.parent.relative_to(package.parent).parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            start: list[str] = []
            if node.level:
                # One dot is the folder of the module, each other dot the folder above.
                num_parts = len(folder) - node.level + 1
                start += folder[:num_parts]
            if node.module:
                start.append(node.module)
            for alias in node.names:
                yield ".".join([*start, alias.name])


def may_import(importer: list[str], imported: list[str]) -> bool:
    """Return whether a module may import another; both are the parts of dotted names."""
    if importer[1:] == ["__main__"] or imported[1:2] in ([], ["__version__"]):
        return True
    if importer[1:] == []:  # the package's own __init__: `speakerlab.load`
        return imported[1] == "inference"
    row = ROW.get(importer[1])
    other = ROW.get(imported[1])
    return importer[1] == imported[1] or (
        row is not None and other is not None and row < other
    )


def find_bad_imports(path: Path, package: Path) -> Iterator[str]:
    inner = path.relative_to(package).as_posix()
    importer = parts_of(path, package)
    for name in imports_of(path, package):
        parts = name.split(".")
        if parts[0] == package.name and not may_import(importer, parts):
            yield f"{inner}: must not import {name}"


def find_cycles(package: Path) -> list[str]:
    """Return a line that names modules which import each other, if some do."""
    paths = {".".join(parts_of(path, package)): path for path in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported = {module_of(target, paths) for target in imports_of(path, package)}
        graph[name] = imported - {name, "", package.name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"cycle: {', '.join(sorted(set(error.args[1])))}"]
    return []


def module_of(name: str, modules: Mapping[str, Path]) -> str:
    """Return the module that a dotted name is, or is in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def find_violations(package: Path) -> list[str]:
    """Return every violation in a package laid out as speakerlab is."""
    lines: list[str] = []
    folders = sorted({path.parent.name for path in package.glob("*/*.py")})
    lines += [f"{name}/: has no place in ORDER" for name in folders if name not in ROW]
    loose = sorted(path.name for path in package.glob("*.py"))
    lines += [
        f"{name}: is loose; move it into a package"
        for name in loose
        if name not in ("__init__.py", "__main__.py", "embedder.py")
    ]
    for path in sorted(package.rglob("*.py")):
        lines += find_bad_imports(path, package)
    return lines + find_cycles(package)


def find_nameless(root: Path) -> list[str]:
    """Return a line for each module whose name does not say what is in it."""
    # not egs/**: a recipe's tools, corpus and experiments lie below it
    patterns = (
        "speakerlab/**/*.py",
        "egs/*/*.py",
        "examples/**/*.py",
        "tests/**/*.py",
        "benchmarks/**/*.py",
    )
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    return [
        f"{path.relative_to(root)}: is named for nothing in particular"
        for path in paths
        if path.stem in BANNED_NAMES
    ]


def test_package_keeps_the_rules() -> None:
    assert find_violations(ROOT / "speakerlab") == []


def test_packages_are_few_and_say_what_they_are_for() -> None:
    packages = [path.parent for path in (ROOT / "speakerlab").glob("*/__init__.py")]
    assert len(packages) <= MAX_PACKAGES
    for package in packages:
        text = ast.get_docstring(
            ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
        )
        assert text and text.splitlines()[0].endswith("."), package.name


def test_bars_are_not_shown_in_log_files() -> None:
    """Only these modules know when a bar is shown, so only they import tqdm."""
    importers: set[str] = set()
    for folder in ("speakerlab", "egs"):
        for path in (ROOT / folder).rglob("*.py"):
            names = imports_of(path, ROOT / folder)
            if any(name.split(".")[0] == "tqdm" for name in names):
                importers.add(path.relative_to(ROOT).as_posix())
    assert importers == {"speakerlab/core/bars.py", "egs/common/corpus/archives.py"}


def test_every_module_is_named_after_its_content() -> None:
    assert find_nameless(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "line"),
    [
        (
            "models/a.py",
            "from speakerlab.losses import margin",
            "import speakerlab.losses.margin",
        ),
        (
            "models/a.py",
            "import speakerlab.config",
            "must not import speakerlab.config",
        ),
        (
            "models/a.py",
            "from speakerlab import config",
            "must not import speakerlab.config",
        ),
        (
            "models/a.py",
            "from ..data import audio",
            "must not import speakerlab.data.audio",
        ),
        (
            "models/a.py",
            "def f():\n    import speakerlab.data",
            "import speakerlab.data",
        ),
        (
            "models/a.py",
            "if TYPE_CHECKING:\n    import speakerlab.data",
            "import speakerlab.data",
        ),
        (
            "core/a.py",
            "from speakerlab.data import audio",
            "import speakerlab.data.audio",
        ),
        (
            "config/a.py",
            "from speakerlab.bin import train",
            "must not import speakerlab.bin.train",
        ),
        ("build.py", "", "build.py: is loose"),
        ("models/a.py", "import speakerlab.models.b", "cycle: speakerlab.models.a, "),
        ("extras/a.py", "", "extras/: has no place in ORDER"),
    ],
)
def test_planted_violation_is_found(
    tmp_path: Path, file: str, source: str, line: str
) -> None:
    path = tmp_path / "speakerlab" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    if line.startswith("cycle"):
        path.with_name("b.py").write_text("from speakerlab.models.a import x")
    violations = find_violations(tmp_path / "speakerlab")
    assert len(violations) == 1
    assert line in violations[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "models/a.py",
            "from speakerlab.core.batch import Batch\nfrom .pooling import mean_std",
        ),
        ("models/__init__.py", "from .a import A"),
        ("bin/train.py", "from speakerlab.bin.command import run"),
        ("__main__.py", "import speakerlab.bin.train"),
        (
            "config/a.py",
            "from speakerlab import models\nfrom speakerlab.data import audio",
        ),
    ],
)
def test_what_is_allowed_is_not_reported(
    tmp_path: Path, file: str, source: str
) -> None:
    path = tmp_path / "speakerlab" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert find_violations(tmp_path / "speakerlab") == []


def test_nameless_modules_are_found(tmp_path: Path) -> None:
    (tmp_path / "speakerlab").mkdir()
    (tmp_path / "speakerlab/utils.py").touch()
    (tmp_path / "speakerlab/audio.py").touch()
    expected = ["speakerlab/utils.py: is named for nothing in particular"]
    assert find_nameless(tmp_path) == expected
