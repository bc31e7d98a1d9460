"""Find or make the Python environment, and print the path of its interpreter.

    python3 egs/common/environment.py run     # a Python with all requirements
    python3 egs/common/environment.py test    # also with the development tools
    python3 egs/common/environment.py make    # make or complete .venv for development
    python3 egs/common/environment.py make --torch cpu       # without CUDA: 1 GB instead of 5

The active Python (`python3` of PATH) is used if it has the requirements, else .venv, else .venv is
made, with the build of PyTorch for this machine's NVIDIA GPUs and driver. Messages go to stderr, so
that a shell can read the path:

    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    python=$(python3 "$root/egs/common/environment.py" run)

Callers set PYTHONPATH to the root of the repository, as above, because the package `speakerlab`
itself need not be installed.

An old system Python may start this file, and then has to find a newer one. Therefore the file uses
only the standard library and the syntax of Python 3.6, where newer types of annotations are quoted.
"""

import argparse
import fcntl
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
THIS_FILE = str(Path(__file__).resolve())
VENV = ROOT / ".venv"
VENV_PYTHON = str(VENV / "bin/python")
VENV_LOCK = ROOT / ".venv.lock"  # beside .venv, which may be replaced

# Purpose of an environment -> sections of pyproject.toml with the packages that it needs.
SECTIONS = {
    "run": ["dependencies", "report"],
    "test": ["dependencies", "report", "onnx", "aac", "vad", "dev"],
}

# Modules that are imported before tests, to see that they work.
TESTED_MODULES = (
    "torch torchaudio numpy scipy soundfile yaml pydantic tensorboard safetensors soxr"
    " matplotlib jinja2 tqdm"
)


class Build(NamedTuple):
    """A build of the torch in requirements.txt, the cards that it has kernels for, its needs."""

    name: str  # of its index at download.pytorch.org; "" for pip's own index
    # Capabilities: the oldest, and the first that is too new.
    cards: "tuple[float, float]"
    driver: int  # the oldest of NVIDIA's drivers that runs it
    size: str


# Best first: another build is only taken for cards that the one before has no kernels for, or for
# an older driver. Cards: github.com/pytorch/pytorch/blob/main/RELEASE.md, for release 2.11 on x86
# (CUDA 12.6: 5.0 to 9.0; 12.8 and 13.0: 7.5 to 12.0). Drivers:
# docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
CUDA_SIZE = "download 3 GB, disk 5 GB"
BUILDS = [
    Build("", (7.5, 13.0), 580, CUDA_SIZE),
    Build("cu126", (5.0, 10.0), 525, CUDA_SIZE),
    Build("cu128", (7.5, 13.0), 525, CUDA_SIZE),
]
CPU_BUILD = Build("cpu", (0.0, 0.0), 0, "download 0.4 GB, disk 1 GB")
PYTORCH_INDEX = "https://download.pytorch.org/whl/"
PIP_INDICES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
NVIDIA_SMI_SECONDS = 60
INSTALL = "docs/install.md"

# Interpreters that may make .venv, best first. The newest comes late, as packages support it late.
BASES = [
    "python3",
    "python3.13",
    "python3.12",
    "python3.11",
    "python3.10",
    "python3.14",
    "python",
]


def main() -> None:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "command",
        choices=["run", "test", "make"],
        help=(
            "run: print the path of a Python with all requirements; test: also with the"
            " development tools; make: make or complete .venv for development"
        ),
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check the Python that runs this file",
    )
    parser.add_argument(
        "--torch",
        choices=["auto", "cpu"],
        default="auto",
        help=(
            "build of PyTorch in a new environment; auto: for the GPUs and the driver"
            " of this machine; cpu: without CUDA, 1 GB instead of 5"
        ),
    )
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
            if purpose == "test":
                report(f"using {python}")
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
            [python, THIS_FILE, purpose, "--check"],
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

    if purpose == "test":
        for module in TESTED_MODULES.split():
            importlib.import_module(module)
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


# The build of PyTorch for this machine


class Gpu(NamedTuple):
    """A GPU as nvidia-smi reports it."""

    name: str
    capability: float  # 7.0 for sm_70; 0 if the driver is too old to know it
    driver: int  # 535 for 535.104.05


def choose_build(torch: str) -> Build:
    """Return the build of torch with kernels for most GPUs of this machine, and report why.

    torch: `auto`, or `cpu` for the build without CUDA.
    """
    gpus = find_gpus()
    if torch == "cpu":
        for gpu in gpus[:1]:
            report(f"--torch cpu: {gpu.name} will not be used")
        return CPU_BUILD
    # The user has chosen a build by the settings of pip, with PyTorch's index or a mirror of it.
    if any("/whl/" in os.environ.get(name, "") for name in PIP_INDICES):
        return BUILDS[0]
    if not gpus:
        report(
            "no NVIDIA GPU found; --torch cpu takes PyTorch without CUDA:"
            f" {CPU_BUILD.size}"
        )
        return BUILDS[0]

    driver = gpus[0].driver
    builds = [build for build in BUILDS if build.driver <= driver] or BUILDS[1:2]
    # `max` returns the first of several.
    chosen = max(builds, key=lambda build: sum(runs_on(build, gpu) for gpu in gpus))
    if chosen.driver > driver:
        report(
            f"NVIDIA driver {driver} is too old for any build of this PyTorch: update"
            f" it to {chosen.driver} or newer, or use --torch cpu"
        )
    for gpu in gpus:
        if not runs_on(chosen, gpu):
            report(f"{gpu.name}: this PyTorch has no kernels for it (see {INSTALL})")
    if chosen.name:
        version = chosen.name.replace("cu12", "CUDA 12.")
        cards = sorted({gpu.name for gpu in gpus})
        report(f"PyTorch for {version}, for {', '.join(cards)}, driver {driver}")
    return chosen


def runs_on(build: Build, gpu: Gpu) -> bool:
    """Return whether a build has kernels for a card."""
    oldest, too_new = build.cards
    # For a card of unknown capability, the driver alone decides.
    return gpu.capability == 0 or oldest <= gpu.capability < too_new


def find_gpus() -> "list[Gpu]":
    """Return the GPUs that nvidia-smi reports; none if it is missing or fails."""
    names = ask_nvidia_smi("name", "(.+)")
    drivers = ask_nvidia_smi("driver_version", r"\b(\d{3,})\.\d")
    # Drivers before 510 do not know this field.
    capabilities = ask_nvidia_smi("compute_cap", r"\b(\d{1,2}\.\d)\b")
    gpus = []
    for index, driver in enumerate(drivers):
        capability = capabilities[index] if index < len(capabilities) else "0"
        name = names[index] if index < len(names) else "GPU"
        gpus.append(Gpu(name, float(capability), int(driver)))
    return gpus


def ask_nvidia_smi(field: str, pattern: str) -> "list[str]":
    """Return a field of each GPU, the part that matches in each line; none if nvidia-smi fails."""
    try:
        query = subprocess.run(  # noqa: UP022 - Python 3.6 has no capture_output
            ["nvidia-smi", "--query-gpu=" + field, "--format=csv,noheader"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=NVIDIA_SMI_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if query.returncode != 0:
        return []
    return re.findall(pattern, os.fsdecode(query.stdout))


def torch_requirement(build: Build) -> "list[str]":
    """Return pip's options for a build of the torch in requirements.txt."""
    if not build.name:
        return []
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^torch==[0-9.]+", text, re.MULTILINE)
    # Without the name of the build, pip would keep another build that is installed.
    index = PYTORCH_INDEX + build.name
    return [f"{pinned}+{build.name}", "--extra-index-url", index]


# Making .venv


def make_venv(purpose: str, torch: str) -> str:
    """Make or complete .venv, with this package, and return the path of its Python."""
    base = find_base()
    with lock_venv() as has_waited:
        if has_waited:
            python = check_python(VENV_PYTHON, purpose)
            if python is not None:
                return python

        build = choose_build(torch)
        report(
            "installing PyTorch, the rest of requirements.txt and speakerlab into"
            f" {VENV}: {build.size}, some minutes without output"
        )
        create_venv(base)
        install_packages(purpose, build)
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
    options = []
    if VENV.exists() and not succeeds(VENV_PYTHON, "-c", ""):
        options = ["--clear"]
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


def install_packages(purpose: str, build: Build) -> None:
    """Install the pinned requirements, with this build of torch, and this package into .venv."""
    package = f"{ROOT}[dev]" if purpose == "test" else str(ROOT)
    requirements = str(ROOT / "requirements.txt")
    options = ["-q", "--disable-pip-version-check", "-r", requirements, "-e", package]
    options += torch_requirement(build)
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
