"""The wheel: what it holds, and that its command finds the models away from a clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from itertools import chain
from pathlib import Path

import pytest

from speakerlab import __version__
from speakerlab.core.distribution import FOLDERS, NAME

ROOT = Path(__file__).parents[2]
BUILD = "import setuptools.build_meta as backend; backend.build_{}('.')"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Return a copy of what is packaged, in a folder with the name of a clone."""
    clone = tmp_path_factory.mktemp("parent") / "speakerlab"
    hidden = shutil.ignore_patterns("__pycache__")
    for name in ("conf", "speakerlab"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=hidden)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    return clone


def install(kind: str, source: Path, site: Path) -> None:
    """Build a wheel and lay its files out as pip does."""
    build = [sys.executable, "-c", BUILD.format(kind)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    wheel.unlink()


@pytest.fixture(scope="module")
def unpacked(clone, tmp_path_factory) -> Path:
    """Return the folder of the wheel's files."""
    site = tmp_path_factory.mktemp("site")
    install("wheel", clone, site)
    return site


def test_it_holds_the_package_with_conf_and_nothing_else(unpacked):
    package = ROOT / "speakerlab"
    conf = ROOT / "conf"
    files = chain.from_iterable(map(package.rglob, ("*.py", "*.j2", "*.tsv")))
    expected = {path.relative_to(ROOT) for path in files}
    expected |= {"speakerlab" / path.relative_to(ROOT) for path in conf.rglob("*.yaml")}
    unpacked_files = {
        path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()
    }
    info = Path(f"{FOLDERS}-{__version__}.dist-info")
    assert {path for path in unpacked_files if info not in path.parents} == expected
    meta = message_from_bytes((unpacked / info / "METADATA").read_bytes())
    assert meta["Name"] == NAME
    assert {"onnx", "report", "hub", "dev"} <= set(meta.get_all("Provides-Extra", []))
    assert (
        "speakerlab = speakerlab.__main__:main"
        in (unpacked / info / "entry_points.txt").read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("--version", 0, f"speakerlab {__version__} (commit unknown), torch "),
        (
            "plan --model campplus_tiny --gpu-mem 11 --precision fp32",
            0,
            "micro-batch 32 x 1 ranks",
        ),
        ("plan --model campplus --recipe mini --gpu-mem 11", 1, "--recipe: mini: "),
        # The file was found.
        pytest.param(
            "train --config eres2net --exp e --set a=1",
            1,
            "--set a=1: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_its_command_works_in_another_folder(
    unpacked, tmp_path, arguments, code, expected
):
    done = subprocess.run(
        [sys.executable, "-m", "speakerlab", *arguments.split()],
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert expected in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("is_theirs_newer", "arguments"),
    [
        (True, ["-m", "speakerlab", "--help"]),
        (False, ["-m", "speakerlab", "--help"]),
        (False, ["-c", "import speakerlab; speakerlab.load('exp')"]),
    ],
)
def test_beside_the_files_of_3d_speaker_it_refuses_in_a_line(
    unpacked, tmp_path, is_theirs_newer, arguments
):
    """PyPI's `speakerlab` and this package in one folder; what is installed last wins."""
    site = tmp_path / "site"
    shutil.copytree(unpacked, site)
    (site / "speakerlab-0.0.6.dist-info").mkdir()
    if is_theirs_newer:
        (site / "speakerlab/__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert f"{NAME} and speakerlab 0.0.6; pip uninstall" in line


def test_an_editable_install_is_found_beside_a_folder_of_the_same_name(clone, tmp_path):
    """The clone itself, seen from its parent, and a checkout of 3D-Speaker on PYTHONPATH."""
    install("editable", clone, tmp_path)
    code = (
        f"import site; site.addsitedir({str(tmp_path)!r}); import speakerlab;"
        " speakerlab.load"
    )
    environment = {
        key: os.environ[key] for key in os.environ if not key.startswith("PYTHON")
    }
    subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=clone.parent,
        env=environment,
        check=True,
    )
