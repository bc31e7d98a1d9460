"""Find or make the Python environment, and print the path of its interpreter.

    python3 egs/common/environment.py run     # a Python with all requirements
    python3 egs/common/environment.py test    # also with the development tools
    python3 egs/common/environment.py make    # make or complete .venv for development
    python3 egs/common/environment.py make --torch cpu       # without CUDA: 1 GB instead of 5

The active Python (`python3` of PATH) is used if it has the requirements, else .venv, else .venv is
made, with the build of PyTorch for this machine (speakerlab/core/torch_builds.py). Messages go to
stderr, so that a shell can read the path:

    python=$(python3 egs/common/environment.py run)

Callers set PYTHONPATH to the root of the repository, because the package need not be installed.

An old system Python may start this file, and then has to find a newer one. Therefore the file uses
only the standard library and the syntax of Python 3.6, where newer types of annotations are quoted.
"""

import argparse
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH_BUILDS = str(ROOT / "speakerlab/core/torch_builds.py")
VENV = ROOT / ".venv"
VENV_PYTHON = str(VENV / "bin/python")
VENV_LOCK = ROOT / ".venv.lock"  # beside .venv, which may be replaced

# Purpose of an environment -> sections of pyproject.toml with the packages that it needs.
SECTIONS = {
    "run": ["dependencies", "report"],
    "test": ["dependencies", "report", "onnx", "aac", "vad", "docs", "dev"],
}

# Interpreters that may make .venv, best first. The newest comes late, as packages support it late.
NEWER = ("python3.13", "python3.12", "python3.11", "python3.10", "python3.14")
BASES = ("python3", *NEWER, "python")


def main() -> None:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["run", "test", "make"])
    parser.add_argument("--torch", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--check", action="store_true", help="only this interpreter")
    options = parser.parse_args()
    purpose = "run" if options.command == "run" else "test"

    if options.check:
        check_this_python(purpose)
    elif options.command == "make":
        make_venv(purpose, options.torch)
    else:
        print(find_python(purpose, options.torch))


# Finding an environment


def find_python(purpose: str, torch: str) -> str:
    """Return the path of a Python with all requirements; make .venv if there is none.

    torch: `auto` or `cpu`, the build of PyTorch for a new .venv.
    """
    active = shutil.which("python3") or shutil.which("python")
    if active is not None:
        python = check_python(active, purpose)
        if python is not None:
            return python

    if os.access(VENV_PYTHON, os.X_OK):
        python = check_python(VENV_PYTHON, purpose)
        if python is not None:
            report(f"using {VENV}")
            return python

    return make_venv(purpose, torch)


def check_python(python: str, purpose: str) -> "str | None":
    """Return the real path of an interpreter with all requirements, else report what is missing.

    `python` may be a wrapper script. It would stand between a parent and the interpreter, which
    then could not identify its parent. Therefore the interpreter is asked for its path.
    """
    try:
        check = subprocess.run(  # noqa: UP022 - Python 3.6 has no capture_output
            [python, __file__, purpose, "--check"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        report(f"not using {python} ({error.strerror})")
        return None
    if check.returncode != 0:
        report(f"not using {python} ({last_line(check.stderr)})")
        return None
    return last_line(check.stdout)


def last_line(output: bytes) -> str:
    """Return the last line of the output of a command."""
    return os.fsdecode(output).strip().rpartition("\n")[2]


# Checking an interpreter, from within


def check_this_python(purpose: str) -> None:
    """Print the path of this interpreter, or exit with a line about the first missing requirement.

    Packages are looked up, not imported, which would take seconds at the start of every run.
    """
    # Read with patterns, because Python 3.10 has no parser of TOML.
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (oldest_python,) = re.findall('requires-python = ">=([0-9.]+)"', pyproject)
    require("Python", oldest_python, platform.python_version())

    for section in SECTIONS[purpose]:
        (packages,) = re.findall(rf"\n{section} = \[(.*?)\]\n", pyproject, re.DOTALL)
        for name, oldest in re.findall(r'"([\w-]+)[>=]=([0-9.]+)', packages):
            require(name, oldest, installed_version(name))
    print(sys.executable)


def require(name: str, oldest: str, installed: str) -> None:
    """Exit with one line if the installed version is older than the oldest supported one."""
    if installed == "none" or numbers(installed) < numbers(oldest):
        sys.exit(f"{name} {oldest} or newer is needed, found {installed}")


def installed_version(package: str) -> str:
    """Return the version of a package, or "none"."""
    from importlib import metadata  # needs Python 3.8

    try:
        return metadata.version(package) or "none"
    except metadata.PackageNotFoundError:
        return "none"


def numbers(version: str) -> "list[int]":
    """Return [2, 11, 0] for the version "2.11.0+cu130"."""
    text = re.findall("[0-9.]*[0-9]", version)[0]
    return [int(number) for number in text.split(".")]


# Making .venv


def make_venv(purpose: str, torch: str) -> str:
    """Make or complete .venv, with this package, and return the path of its Python."""
    base = find_base()
    with lock_venv() as has_waited:
        if has_waited:
            python = check_python(VENV_PYTHON, purpose)
            if python is not None:
                return python

        report(
            f"installing requirements.txt and speakerlab into {VENV}: some minutes"
            " without output"
        )
        create_venv(base)
        install_packages(purpose, torch)
        python = check_python(VENV_PYTHON, purpose)
        if python is None:
            sys.exit(f"env: {VENV} is incomplete; remove it and try again")

    report(f"for the speakerlab command: . {VENV}/bin/activate")
    return python


def find_base() -> str:
    """Return the name of an interpreter that is new enough and can make .venv."""
    is_new_enough = "import sys; sys.exit(sys.version_info < (3, 10))"
    bases = [base for base in BASES if succeeds(base, "-c", is_new_enough)]
    if not bases:
        sys.exit("env: Python 3.10 or newer is needed; install it")

    for base in bases:
        if succeeds(base, "-c", "import venv, ensurepip"):
            return base
    problem = f"{bases[0]} has no venv or ensurepip"
    sys.exit(f"env: {problem}; install it (Debian: apt install python3-venv)")


def create_venv(base: str) -> None:
    """Create .venv, or replace one that is broken, or keep the packages of one that works."""
    is_broken = VENV.exists() and not succeeds(VENV_PYTHON, "-c", "")
    options = ["--clear"] if is_broken else []
    creation = subprocess.run(
        [base, "-m", "venv", *options, str(VENV)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if creation.returncode != 0:
        sys.stderr.write(os.fsdecode(creation.stdout))
        remedy = "or activate an environment with requirements.txt"
        sys.exit(f"env: {base} cannot make {VENV}, see above; {remedy}")

    if not succeeds(VENV_PYTHON, "-m", "pip", "--version"):
        remedy = f"install pip (Debian: apt install python3-venv) and remove {VENV}"
        sys.exit(f"env: {VENV} has no pip; {remedy}")


def install_packages(purpose: str, torch: str) -> None:
    """Install the pinned requirements, with a build of torch, and this package into .venv."""
    build = subprocess.check_output([VENV_PYTHON, TORCH_BUILDS, "--torch", torch])
    package = f"{ROOT}[dev]" if purpose == "test" else str(ROOT)
    options = ["-q", "--disable-pip-version-check"]
    options += ["-r", str(ROOT / "requirements.txt"), "-e", package]
    options += os.fsdecode(build).split()
    pip = subprocess.Popen(
        [VENV_PYTHON, "-m", "pip", "install", *options], stdout=sys.stderr
    )
    try:
        pip.wait()
    except KeyboardInterrupt:
        # Ctrl-C has reached pip as well, which removes its temporary files, up to 3 GB.
        with suppress(subprocess.TimeoutExpired):
            pip.wait(timeout=10)
        pip.kill()
        raise
    if pip.returncode != 0:
        sys.exit(
            "env: pip install failed, see above; run the same command again to continue"
        )


@contextmanager
def lock_venv() -> "Iterator[bool]":
    """Let no other process install .venv; yield whether another one did until now.

    Child processes do not inherit the open file, so the lock ends with this process at the latest.
    """
    try:
        file = VENV_LOCK.open("a")
    except OSError:
        remedy = "correct its permissions, or choose another folder"
        sys.exit(f"{ROOT}: cannot be written; {remedy}")

    has_waited = False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process installs {VENV}; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
            has_waited = True
        except OSError:
            pass  # a file system without locks
        yield has_waited


# Commands and messages


def succeeds(*command: str) -> bool:
    """Return whether a command exists and exits with 0; its output is dropped."""
    try:
        code = subprocess.call(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        return False
    return code == 0


def report(message: str) -> None:
    """Print a message for the user."""
    print(f"env: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        report("stopped by Ctrl-C")
        sys.exit(130)
