"""An environment of its own for the wheel, and a folder outside of the clone to use it in."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def read_project(root: Path = ROOT) -> dict:
    """Return the table `project` of pyproject.toml."""
    text = (root / "pyproject.toml").read_text("utf-8")
    return tomllib.loads(text)["project"]


class Environment:
    """A virtual environment, and an empty folder in which its commands run.

    name: begins the line that reports a failure.
    """

    def __init__(self, venv: Path, folder: Path, *, name: str) -> None:
        self.bin = venv / "bin"
        self.folder = folder
        self.name = name

    def make(self, base: str) -> None:
        """Make the environment, without any package."""
        # The clone, which would be imported instead of the wheel.
        os.environ.pop("PYTHONPATH", None)
        self.run([base, "-m", "venv", "--clear", self.bin.parent])

    def pip(self, *arguments: object) -> None:
        self.python("-m", "pip", "--disable-pip-version-check", *arguments)

    def python(self, *arguments: object, cwd: Path = ROOT) -> None:
        self.run([self.bin / "python", *arguments], cwd=cwd)

    def use(self, line: str, *arguments: str) -> None:
        """Run a command outside the clone."""
        command = [self.bin / "speakerlab", *line.split(), *arguments]
        self.run(command, cwd=self.folder)

    def run(self, arguments: Iterable[object], *, cwd: Path = ROOT) -> None:
        """Run a command; exit if it fails."""
        command = list(map(str, arguments))
        print("+", *command, flush=True)
        code = subprocess.run(command, cwd=cwd).returncode
        if code:
            sys.exit(f"{self.name}: failed with exit code {code}, see above")
