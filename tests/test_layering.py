"""The rules of the house that an import graph or a syntax tree can show, and that each is noticed.

In: a tree of sources. Out: one line for each violation; for this repository there are none.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = {"atomic", "batch", "faults", "process", "regions", "windows"}
SIBLINGS = {"frontend", "models", "losses", "data", "training", "scoring"}
UPPER = {
    "benching",
    "evaluation",
    "extraction",
    "inference",
    "interop",
}  # packages of the upper layer
MAX_LINES = 320
BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}
# Parts that not everybody has, or that are slow to import: inside the function that needs them.
ONLY_IN_FUNCTIONS = {"torchaudio", "matplotlib", "soxr", "onnx", "onnxscript", "onnxruntime", "av"}
ONLY_IN = {
    "pydantic": ("config.py", "config_faults.py"),
    "soundfile": ("data/audio.py",),
}
PRECISION = "training/precision.py"
FP32_ISLANDS = ("losses/", "frontend/", "models/pooling.py")


def parts_of(path: Path, package: Path) -> list[str]:
    """The dotted name of a module, in parts: `speakerlab/models/pooling.py` -> three parts."""
    parts = list(path.relative_to(package.parent).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path: Path, package: Path) -> Iterator[tuple[str, bool]]:
    """(absolute dotted name, whether importing the module leaves it alone) of all its imports."""
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
    """Whether what is in here does not run when the module is imported."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def layer_of(parts: list[str]) -> str:
    """leaf, the name of a sibling package, upper, or bin, for the parts of a module's name."""
    head = parts[1] if len(parts) > 1 else ""
    if head in LEAVES:
        return "leaf"
    return head if head in SIBLINGS or head == "bin" else "upper"


def may_import(importer: str, imported: str) -> bool:
    """Whether a module of one layer may import one of another."""
    if importer == "leaf":
        return False
    if importer in SIBLINGS:
        return imported in ("leaf", importer)
    return imported != "bin" or importer == "bin"


def find_bad_imports(path: Path, package: Path) -> Iterator[str]:
    inner, own = path.relative_to(package).as_posix(), parts_of(path, package)
    for name, deferred in imports_of(path, package):
        parts = name.split(".")
        if parts[0] == package.name:
            allowed = may_import(layer_of(own), layer_of(parts)) or own[1:] == ["__main__"]
            if not allowed and parts[1:]:
                yield f"{inner}: must not import {name}"
        elif parts[0] in ONLY_IN_FUNCTIONS and not deferred:
            yield f"{inner}: must import {name} inside the function that uses it"
        elif inner not in ONLY_IN.get(parts[0], (inner,)):
            yield f"{inner}: must not import {name}, only {ONLY_IN[parts[0]][0]} does"


def find_autocast(path: Path, package: Path) -> Iterator[str]:
    """torch's autocast is called in one file; elsewhere it may be switched off, where listed."""
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
    """Only commands end the process."""
    inner = path.relative_to(package).as_posix()
    if inner.startswith("bin/") or inner == "__main__.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("exit", "quit", "sys.exit"):
            yield f"{inner}:{node.lineno}: must not exit, only bin/ does"


def find_violations(package: Path) -> list[str]:
    """Every violation in a package laid out as speakerlab is."""
    known = SIBLINGS | UPPER | {"bin"}
    folders = [p.parent for p in package.glob("*/*.py") if p.parent.name not in known]
    lines = [
        f"{folder.name}/: has no layer; name it in test_layering.py" for folder in set(folders)
    ]
    for path in sorted(package.rglob("*.py")):
        for find in (find_bad_imports, find_autocast, find_exits):
            lines += find(path, package)
    return lines


def find_crowded(root: Path) -> list[str]:
    """Modules with a name that says nothing, or with too many lines."""
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


def test_no_module_is_crowded() -> None:
    assert find_crowded(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "line"),
    [
        ("models/a.py", "from speakerlab.losses import margin", "import speakerlab.losses.margin"),
        ("models/a.py", "import speakerlab.config", "must not import speakerlab.config"),
        ("models/a.py", "from speakerlab import build", "must not import speakerlab.build"),
        ("models/a.py", "from ..data import audio", "must not import speakerlab.data.audio"),
        ("models/a.py", "def f():\n    import speakerlab.data", "import speakerlab.data"),
        ("batch.py", "from speakerlab.faults import Faults", "import speakerlab.faults.Faults"),
        ("build.py", "from speakerlab.bin import train", "must not import speakerlab.bin.train"),
        ("models/a.py", "import pydantic", "only config.py does"),
        ("build.py", "from soundfile import read", "only data/audio.py does"),
        ("frontend/a.py", "import torchaudio", "inside the function"),
        ("scoring/a.py", "from matplotlib import pyplot", "inside the function"),
        ("models/a.py", "torch.autocast('cuda')", "models/a.py:1: must not call torch.autocast"),
        ("losses/a.py", "torch.autocast('cuda')", "losses/a.py:1: must not call torch.autocast"),
        ("models/a.py", "torch.autocast('cuda', enabled=False)", "must not call torch.autocast"),
        ("models/a.py", "torch.cuda.amp.autocast()", "must not call torch.cuda.amp.autocast"),
        ("data/a.py", "import sys\nsys.exit(1)", "data/a.py:2: must not exit"),
        ("extras/a.py", "", "extras/: has no layer"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, file: str, source: str, line: str) -> None:
    path = tmp_path / "speakerlab" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found = find_violations(tmp_path / "speakerlab")
    assert len(found) == 1
    assert line in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("models/a.py", "from speakerlab.batch import Batch\nfrom .pooling import mean_std"),
        ("models/__init__.py", "from .a import A"),
        ("training/precision.py", "import torch\ntorch.autocast('cuda')"),
        ("losses/a.py", "import torch\ntorch.autocast('cuda', enabled=False)"),
        ("frontend/a.py", "def f():\n    from torchaudio.transforms import Resample"),
        ("scoring/a.py", "if TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
        ("data/audio.py", "import soundfile"),
        ("bin/train.py", "from speakerlab.bin.command import run\nimport sys\nsys.exit(0)"),
        ("__main__.py", "import speakerlab.bin.train"),
        ("embedder.py", "from speakerlab import build, models\nfrom speakerlab.data import audio"),
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
