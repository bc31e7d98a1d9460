"""Import order and other rules that a syntax tree can show; planted violations are found."""

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
    ("data", "frontend", "models", "losses", "training", "scoring"),
    ("core",),
)
ROW = {name: index for index, row in enumerate(ORDER) for name in row}
MAX_PACKAGES = 14
MAX_LINES = 320
BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}
# Optional, or slow to import: imported inside the functions that need them.
ONLY_IN_FUNCTIONS = {"torchaudio", "matplotlib", "soxr", "onnx", "onnxscript", "onnxruntime", "av"}
ONLY_IN = {
    "pydantic": ("config/schema.py", "config/messages.py"),
    "soundfile": ("data/audio.py",),
}
PRECISION = "training/precision.py"
FP32_ISLANDS = ("losses/", "frontend/", "models/pooling.py")


def parts_of(path: Path, package: Path) -> list[str]:
    """Return a module's dotted name in parts: `speakerlab/models/pooling.py` -> three parts."""
    parts = list(path.relative_to(package.parent).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path: Path, package: Path) -> Iterator[tuple[str, bool]]:
    """Yield (absolute dotted name, whether it is imported later than the module) of all imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = {id(n) for part in ast.walk(tree) if is_deferred(part) for n in ast.walk(part)}
    folder = list(path.parent.relative_to(package.parent).parts)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            start = [*base, *filter(None, [node.module])]
            names = [".".join([*start, alias.name]) for alias in node.names]
        yield from ((name, id(node) in later) for name in names)


def is_deferred(node: ast.AST) -> bool:
    """Return whether this code does not run when the module is imported."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def may_import(importer: list[str], imported: list[str]) -> bool:
    """Return whether a module may import another; both are the parts of dotted names."""
    if importer[1:] == ["__main__"] or imported[1:2] in ([], ["__version__"]):
        return True
    if importer[1:] == []:  # the package's own __init__: `speakerlab.load`
        return imported[1] == "inference"
    own, other = ROW.get(importer[1]), ROW.get(imported[1])
    return importer[1] == imported[1] or (own is not None and other is not None and own < other)


def find_bad_imports(path: Path, package: Path) -> Iterator[str]:
    inner, own = path.relative_to(package).as_posix(), parts_of(path, package)
    for name, deferred in imports_of(path, package):
        parts = name.split(".")
        if parts[0] == package.name:
            if not may_import(own, parts):
                yield f"{inner}: must not import {name}"
        elif parts[0] in ONLY_IN_FUNCTIONS and not deferred:
            yield f"{inner}: must import {name} inside the function that uses it"
        elif inner not in ONLY_IN.get(parts[0], (inner,)):
            yield f"{inner}: must not import {name}, only {ONLY_IN[parts[0]][0]} does"


def find_cycles(package: Path) -> list[str]:
    """Return a line that names modules which import each other, if some do."""
    paths = {".".join(parts_of(path, package)): path for path in package.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = {module_of(target, paths) for target, _ in imports_of(path, package)}
        graph[name] = found - {name, "", package.name}
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


def find_autocast(path: Path, package: Path) -> Iterator[str]:
    """Yield calls of torch's autocast outside its file; FP32_ISLANDS may switch it off."""
    inner = path.relative_to(package).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called != "autocast" and not (
            called.startswith("torch.") and called.endswith("autocast")
        ):
            continue
        switched_off = any(ast.unparse(k) == "enabled=False" for k in node.keywords)
        if inner != PRECISION and not (inner.startswith(FP32_ISLANDS) and switched_off):
            yield f"{inner}:{node.lineno}: must not call {called}"


def find_exits(path: Path, package: Path) -> Iterator[str]:
    """Yield calls that end the process outside commands."""
    inner = path.relative_to(package).as_posix()
    if inner.startswith("bin/") or inner == "__main__.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("exit", "quit", "sys.exit"):
            yield f"{inner}:{node.lineno}: must not exit, only bin/ does"


def find_violations(package: Path) -> list[str]:
    """Return every violation in a package laid out as speakerlab is."""
    lines: list[str] = []
    folders = sorted({path.parent.name for path in package.glob("*/*.py")})
    lines += [f"{name}/: has no place in ORDER" for name in folders if name not in ROW]
    loose = sorted(path.name for path in package.glob("*.py"))
    lines += [
        f"{name}: is loose; move it into a package"
        for name in loose
        if name not in ("__init__.py", "__main__.py")
    ]
    for path in sorted(package.rglob("*.py")):
        for find in (find_bad_imports, find_autocast, find_exits):
            lines += find(path, package)
    return lines + find_cycles(package)


def find_crowded(root: Path) -> list[str]:
    """Return a line for each module with an empty name or too many lines."""
    lines: list[str] = []
    # not egs/**: a recipe's tools, corpus and experiments lie below it
    patterns = ("speakerlab/**/*.py", "egs/*/*.py", "tests/**/*.py", "benchmarks/**/*.py")
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        if path.stem in BANNED_NAMES:
            lines.append(f"{path.relative_to(root)}: is named for nothing in particular")
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > MAX_LINES:
            lines.append(f"{path.relative_to(root)}: has {count} lines, more than {MAX_LINES}")
    return lines


def test_package_keeps_the_rules() -> None:
    assert find_violations(ROOT / "speakerlab") == []


def test_packages_are_few_and_say_what_they_are_for() -> None:
    packages = [path.parent for path in (ROOT / "speakerlab").glob("*/__init__.py")]
    assert len(packages) <= MAX_PACKAGES
    for package in packages:
        text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
        assert text and text.splitlines()[0].endswith("."), package.name


def test_no_module_is_crowded() -> None:
    assert find_crowded(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "line"),
    [
        ("models/a.py", "from speakerlab.losses import margin", "import speakerlab.losses.margin"),
        ("models/a.py", "import speakerlab.config", "must not import speakerlab.config"),
        ("models/a.py", "from speakerlab import config", "must not import speakerlab.config"),
        ("models/a.py", "from ..data import audio", "must not import speakerlab.data.audio"),
        ("models/a.py", "def f():\n    import speakerlab.data", "import speakerlab.data"),
        ("models/a.py", "if TYPE_CHECKING:\n    import speakerlab.data", "import speakerlab.data"),
        ("core/a.py", "from speakerlab.data import audio", "import speakerlab.data.audio"),
        ("config/a.py", "from speakerlab.bin import train", "must not import speakerlab.bin.train"),
        ("build.py", "", "build.py: is loose"),
        ("models/a.py", "import speakerlab.models.b", "cycle: speakerlab.models.a, "),
        ("models/a.py", "import pydantic", "only config/schema.py does"),
        ("config/a.py", "from soundfile import read", "only data/audio.py does"),
        ("frontend/a.py", "import torchaudio", "inside the function"),
        ("scoring/a.py", "from matplotlib import pyplot", "inside the function"),
        ("models/a.py", "torch.autocast('cuda')", "models/a.py:1: must not call torch.autocast"),
        ("losses/a.py", "torch.autocast('cuda')", "losses/a.py:1: must not call torch.autocast"),
        ("models/a.py", "torch.autocast('cuda', enabled=False)", "must not call torch.autocast"),
        ("models/a.py", "torch.cuda.amp.autocast()", "must not call torch.cuda.amp.autocast"),
        ("data/a.py", "import sys\nsys.exit(1)", "data/a.py:2: must not exit"),
        ("extras/a.py", "", "extras/: has no place in ORDER"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, source: str, line: str) -> None:
    path = tmp_path / "speakerlab" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    if line.startswith("cycle"):
        path.with_name("b.py").write_text("from speakerlab.models.a import x")
    found = find_violations(tmp_path / "speakerlab")
    assert len(found) == 1
    assert line in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("models/a.py", "from speakerlab.core.batch import Batch\nfrom .pooling import mean_std"),
        ("models/__init__.py", "from .a import A"),
        ("training/precision.py", "import torch\ntorch.autocast('cuda')"),
        ("losses/a.py", "import torch\ntorch.autocast('cuda', enabled=False)"),
        ("frontend/a.py", "def f():\n    from torchaudio.transforms import Resample"),
        ("scoring/a.py", "if TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
        ("data/audio.py", "import soundfile"),
        ("bin/train.py", "from speakerlab.bin.command import run\nimport sys\nsys.exit(0)"),
        ("__main__.py", "import speakerlab.bin.train"),
        ("config/a.py", "from speakerlab import models\nfrom speakerlab.data import audio"),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / "speakerlab" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert find_violations(tmp_path / "speakerlab") == []


def test_crowded_modules_are_found(tmp_path: Path) -> None:
    for name, text in (
        ("utils.py", ""),
        ("long.py", "x = 1\n" * 321),
        ("fits.py", "x = 1\n" * 320),
    ):
        (tmp_path / "speakerlab").mkdir(exist_ok=True)
        (tmp_path / "speakerlab" / name).write_text(text)
    found = find_crowded(tmp_path)
    assert len(found) == 2
    assert "long.py: has 321 lines" in found[0]
    assert "utils.py: is named" in found[1]
