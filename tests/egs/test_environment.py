"""The Python environment of recipes: found quickly, made once, refused in one line."""

import ast
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "egs/common/environment.py"
MAX_CPU_SECONDS = 1.0  # not of the clock: a busy machine must not fail a test

# Interpreters. A complete one has all requirements and records what pip installs; in place of the
# arguments of pip for a build of torch, it prints the arguments of torch_builds.py.
COMPLETE = """#!/usr/bin/env bash
root={root}
if [[ "$*" == *--check ]]; then printf '%s\\n' "$0"; fi
if [[ "$1" == */torch_builds.py ]]; then printf '%s\\n' "${@:2}"; fi
if [[ "$*" == "-m pip install "* ]]; then
  printf '%s\\n' "$*" >>"$root/calls"
  while [[ -e $root/pip_waits ]]; do sleep 0.05; done
fi
"""
# An incomplete one makes .venv with a complete one.
INCOMPLETE = """#!/usr/bin/env bash
root={root}
if [[ "$*" == *--check ]]; then
  echo Traceback >&2
  echo "No module named 'torch'" >&2
  exit 1
fi
if [[ "$*" == "-m venv "* ]]; then
  printf '%s\\n' "$*" >>"$root/calls"
  while [[ -e $root/venv_waits ]]; do sleep 0.05; done
  mkdir -p "$root/.venv/bin"
  rm -f "$root/.venv/bin/python"
  cp "$root/complete" "$root/.venv/bin/python"
fi
"""
OLD = """#!/bin/sh
echo "Python 3.10 or newer is needed, found 3.8.1" >&2
exit 1
"""


class Repository:
    """A copy of the script with fake interpreters in PATH; it runs in the background."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.script = folder / "egs/common/environment.py"
        self.path = folder / "bin"
        self.venv = folder / ".venv"
        self.venv_python = self.venv / "bin/python"
        self.calls = folder / "calls"
        self.processes: list[subprocess.Popen[str]] = []
        self.script.parent.mkdir(parents=True)
        self.path.mkdir()
        shutil.copy(SCRIPT, self.script)
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copy(ROOT / "requirements.txt", folder)
        self.write(folder / "complete", COMPLETE)
        # Without the folders of this machine, where a true Python could be found.
        for tool in ("env", "bash", "mkdir", "rm", "cp", "sleep"):
            program = shutil.which(tool) or tool
            (self.path / tool).symlink_to(program)

    def write(self, path: Path, interpreter: str) -> Path:
        """Write a fake interpreter."""
        path.parent.mkdir(parents=True, exist_ok=True)
        root = quote(str(self.root))
        path.write_text(interpreter.replace("{root}", root))
        path.chmod(0o755)
        return path

    def write_python(self, name: str, interpreter: str) -> Path:
        """Write a fake interpreter into the folder in PATH."""
        return self.write(self.path / name, interpreter)

    def call_lines(self) -> list[str]:
        """Return the arguments of each recorded call."""
        return self.calls.read_text().splitlines()

    def write_package(self, name: str, version: str) -> None:
        """Write the metadata of an installed package, for the interpreter `with_packages`."""
        folder = f"{name.replace('-', '_')}.dist-info"
        metadata = self.root / "packages" / folder / "METADATA"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(f"Name: {name}\nVersion: {version}\n")

    def with_packages(self) -> str:
        """Return a real interpreter that has the written packages and no others."""
        packages = quote(str(self.root / "packages"))
        # -S: without the packages of the interpreter that runs the tests.
        python = f'{quote(sys.executable)} -S "$@"'
        return f"#!/bin/sh\nPYTHONPATH={packages} exec {python}\n"

    def start(
        self, command: str = "run", *options: str, **variables: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, self.script, command, *options],
            env={"PATH": str(self.path), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(
        self, command: str = "run", *options: str, **variables: str
    ) -> tuple[int, str, list[str]]:
        """Return the exit code, the output and the lines of messages."""
        return finish(self.start(command, *options, **variables))

    def wait_for_call(self, text: str) -> None:
        """Wait until an interpreter was called with a text among its arguments."""
        deadline = time.monotonic() + 60
        while not self.calls.exists() or text not in self.calls.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """Return the exit code, the output and the lines of messages of a process."""
    output, messages = process.communicate(timeout=60)
    return process.returncode, output, messages.splitlines()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    repository = Repository(tmp_path / 'a "b" #c ü')
    yield repository
    for process in repository.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def installing(venv: Path) -> str:
    return (
        f"env: installing requirements.txt and speakerlab into {venv}: some minutes"
        " without output"
    )


def failing(interpreter: str, arguments: str, message: str = "") -> str:
    """Return an interpreter that fails if its arguments match a pattern of bash."""
    failure = f"if [[ $* == {arguments} ]]; then echo '{message}'; exit 1; fi\n"
    first_line, rest = interpreter.split("\n", 1)
    return f"{first_line}\n{failure}{rest}"


def test_a_python_is_found_without_importing_torch() -> None:
    folder = Path(sys.executable).parent
    search = f"{folder}:{os.environ['PATH']}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, SCRIPT, "run"],
        env={**os.environ, "PATH": search},
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == ""
    assert done.returncode == 0
    python = Path(done.stdout.rstrip("\n"))
    assert python.parent == folder

    # Importing torch would take several seconds.
    user_seconds = after.ru_utime - before.ru_utime
    system_seconds = after.ru_stime - before.ru_stime
    assert user_seconds + system_seconds < MAX_CPU_SECONDS


def test_the_path_behind_a_wrapper_script_is_printed(repository: Repository) -> None:
    """A wrapper would stand between a parent and its child."""
    wrapper = f'#!/bin/sh\n{quote(sys.executable)} "$@"\n'
    repository.write_python("python3", wrapper)
    # With a complete .venv, nothing is installed if the wrapper is refused.
    repository.write(repository.venv_python, COMPLETE)
    assert repository.run() == (0, f"{sys.executable}\n", [])


def test_a_complete_active_python_is_used(repository: Repository) -> None:
    python = repository.write_python("python", COMPLETE)
    assert repository.run("run") == (0, f"{python}\n", [])
    assert repository.run("test") == (0, f"{python}\n", [])

    # python3 comes before python.
    python3 = repository.write_python("python3", COMPLETE)
    assert repository.run("run") == (0, f"{python3}\n", [])


def test_an_incomplete_python_is_not_used(repository: Repository) -> None:
    """A message names the missing package; a complete .venv is used as it is."""
    active = repository.write_python("python3", INCOMPLETE)
    python = repository.write(repository.venv_python, COMPLETE)
    code, output, messages = repository.run()
    assert code == 0
    assert output == f"{python}\n"
    assert messages == [
        f"env: not using {active} (No module named 'torch')",
        f"env: using {repository.venv}",
    ]
    assert not repository.calls.exists()


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({}, "torch 2.6 or newer is needed, found none"),
        ({"torch": "2.5.1+cu124"}, "torch 2.6 or newer is needed, found 2.5.1+cu124"),
        ({"torch": "2.10.0"}, "numpy 1.26 or newer is needed, found none"),
    ],
)
def test_a_python_without_the_oldest_supported_packages_is_not_used(
    repository: Repository, versions: dict[str, str], problem: str
) -> None:
    for name, version in versions.items():
        repository.write_package(name, version)
    python = repository.with_packages()
    active = repository.write_python("python3", python)
    repository.write(repository.venv_python, COMPLETE)
    _, _, messages = repository.run()
    assert messages[0] == f"env: not using {active} ({problem})"


def test_the_packages_of_dependencies_and_reports_are_enough(
    repository: Repository,
) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    report = project["optional-dependencies"]["report"]
    for requirement in [*project["dependencies"], *report]:
        name, version = requirement.split(">=")
        repository.write_package(name, version)
    # With a complete .venv, nothing is installed if the packages are refused.
    repository.write(repository.venv_python, COMPLETE)
    repository.write_python("python3", repository.with_packages())
    assert repository.run() == (0, f"{sys.executable}\n", [])


@pytest.mark.parametrize("command", ["run", "make"])
def test_pip_installs_the_chosen_build_of_torch(
    repository: Repository, command: str
) -> None:
    repository.write_python("python3", INCOMPLETE)
    code, _, _ = repository.run(command, "--torch", "cpu")
    assert code == 0
    assert repository.call_lines()[-1].endswith(" --torch cpu")


def test_an_old_python_makes_venv_with_a_newer_one(repository: Repository) -> None:
    old = repository.write_python("python3", OLD)
    repository.write_python("python3.12", INCOMPLETE)
    code, output, messages = repository.run()
    assert code == 0
    assert output == f"{repository.venv}/bin/python\n"
    assert messages == [
        f"env: not using {old} (Python 3.10 or newer is needed, found 3.8.1)",
        installing(repository.venv),
        f"env: for the speakerlab command: . {repository.venv}/bin/activate",
    ]
    creation, installation = repository.call_lines()
    assert creation == f"-m venv {repository.venv}"
    pip_install = "-m pip install -q --disable-pip-version-check"
    packages = f"-r {repository.root}/requirements.txt -e {repository.root}"
    assert installation == f"{pip_install} {packages} --torch auto"


@pytest.mark.parametrize("command", ["test", "make"])
def test_development_tools_are_installed_too(
    repository: Repository, command: str
) -> None:
    repository.write_python("python3", INCOMPLETE)
    code, output, _ = repository.run(command)
    assert code == 0
    expected = "" if command == "make" else f"{repository.venv}/bin/python\n"
    assert output == expected
    assert f" -e {repository.root}[dev] " in repository.call_lines()[-1]


def test_without_python_one_line_says_what_to_do(repository: Repository) -> None:
    needed = "env: Python 3.10 or newer is needed; install it"
    assert repository.run() == (1, "", [needed])

    repository.write_python("python3", OLD)
    code, output, messages = repository.run()
    assert code == 1
    assert output == ""
    assert messages[1:] == [needed]


def test_the_version_of_python_is_checked(repository: Repository) -> None:
    pyproject = repository.root / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(text.replace(">=3.10", ">=99.0"))
    done = subprocess.run(
        [sys.executable, repository.script, "run", "--check"],
        capture_output=True,
        text=True,
    )
    version = sys.version.split()[0]
    assert done.stderr == f"Python 99.0 or newer is needed, found {version}\n"
    assert done.stdout == ""
    assert done.returncode == 1


def test_the_script_has_the_syntax_of_old_pythons() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("name", ["python3.6", "python3.7", "python3.8", "python3.9"])
def test_an_old_python_runs_the_script(name: str) -> None:
    old = shutil.which(name)
    if old is None:
        pytest.skip(f"{name} is not installed")
    # A launcher of pyenv exists although its version may be missing.
    attempt = subprocess.run([old, "-c", ""], capture_output=True)
    if attempt.returncode != 0:
        pytest.skip(f"{name} is not installed")
    command = [old, SCRIPT, "run", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.startswith("Python 3.10 or newer is needed, found 3.")


def test_one_environment_is_installed(repository: Repository) -> None:
    """Of two processes without .venv, one installs it, the other waits and uses it."""
    active = repository.write_python("python3", INCOMPLETE)
    (repository.root / "venv_waits").touch()
    first = repository.start()
    repository.wait_for_call("-m venv")
    second = repository.start()
    reason = f"env: not using {active} (No module named 'torch')\n"
    waiting = f"env: another process installs {repository.venv}; waiting for its end\n"
    assert second.stderr is not None
    assert second.stderr.readline() == reason
    assert second.stderr.readline() == waiting

    (repository.root / "venv_waits").unlink()
    python = f"{repository.venv}/bin/python\n"
    code, output, _ = finish(first)
    assert code == 0
    assert output == python
    assert finish(second) == (0, python, [])
    assert len(repository.call_lines()) == 2


def test_a_killed_installation_is_continued(repository: Repository) -> None:
    """Its pip still runs, but holds no lock."""
    repository.write_python("python3", INCOMPLETE)
    (repository.root / "pip_waits").touch()
    killed = repository.start("make")
    repository.wait_for_call("-m pip install")
    killed.kill()
    repository.calls.unlink()

    next_process = repository.start("make")
    repository.wait_for_call("-m pip install")
    (repository.root / "pip_waits").unlink()
    code, _, messages = finish(next_process)
    assert code == 0
    assert messages[0] == installing(repository.venv)


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_ctrl_c_is_one_line(repository: Repository, step: str) -> None:
    repository.write_python("python3", INCOMPLETE)
    (repository.root / f"{step}_waits").touch()
    process = repository.start()
    repository.wait_for_call(f"-m {step}")
    os.killpg(process.pid, signal.SIGINT)
    code, output, messages = finish(process)
    assert code == 130
    assert output == ""
    expected = [installing(repository.venv), "env: stopped by Ctrl-C"]
    assert messages[-2:] == expected


def test_ctrl_c_ends_the_wait_for_another_process(repository: Repository) -> None:
    repository.write_python("python3", INCOMPLETE)
    (repository.root / "venv_waits").touch()
    repository.start()
    repository.wait_for_call("-m venv")
    process = repository.start()
    assert process.stderr is not None
    while "another process" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process) == (130, "", ["env: stopped by Ctrl-C"])


NO_PYTHON = "#!/no/such/file\n"
FAILING_PYTHON = "#!/bin/sh\nexit 1\n"


@pytest.mark.parametrize("interpreter", [FAILING_PYTHON, NO_PYTHON, None])
def test_a_broken_venv_is_replaced(
    repository: Repository, interpreter: str | None
) -> None:
    repository.write_python("python3", INCOMPLETE)
    python = repository.venv_python
    if interpreter is None:
        # As after the base Python was uninstalled.
        python.parent.mkdir(parents=True)
        python.symlink_to("/no/such/file")
    else:
        repository.write(python, interpreter)
    code, output, _ = repository.run()
    assert code == 0
    assert output == f"{python}\n"
    creation, *_ = repository.call_lines()
    assert creation == f"-m venv --clear {repository.venv}"


def test_an_incomplete_venv_is_completed(repository: Repository) -> None:
    repository.write_python("python3", INCOMPLETE)
    python = repository.write(repository.venv_python, INCOMPLETE)
    code, _, messages = repository.run()
    assert code == 0
    assert f"env: not using {python} (No module named 'torch')" in messages
    creation, *_ = repository.call_lines()
    assert creation == f"-m venv {repository.venv}"


def test_a_python_without_venv_is_reported(repository: Repository) -> None:
    without = failing(INCOMPLETE, "*ensurepip")
    repository.write_python("python3", OLD)
    repository.write_python("python3.11", without)
    problem = "env: python3.11 has no venv or ensurepip"
    remedy = "install it (Debian: apt install python3-venv)"
    code, _, messages = repository.run()
    assert code == 1
    assert messages[1:] == [f"{problem}; {remedy}"]
    repository.write_python("python", INCOMPLETE)
    assert repository.run()[0] == 0


def test_a_failed_creation_is_reported(repository: Repository) -> None:
    base = failing(INCOMPLETE, '"-m venv "*', "No space left on device")
    repository.write_python("python3", base)
    code, output, messages = repository.run()
    assert code == 1
    assert output == ""
    remedy = "or activate an environment with requirements.txt"
    assert messages[2:] == [
        "No space left on device",
        f"env: python3 cannot make {repository.venv}, see above; {remedy}",
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            '"-m pip --version"',
            (
                "env: {venv} has no pip; install pip (Debian: apt install python3-venv)"
                " and remove {venv}"
            ),
        ),
        (
            '"-m pip install "*',
            (
                "env: pip install failed, see above; run the same command again to"
                " continue"
            ),
        ),
        ("*--check", "env: {venv} is incomplete; remove it and try again"),
    ],
)
def test_a_failed_installation_is_reported(
    repository: Repository, arguments: str, error: str
) -> None:
    repository.write_python("python3", INCOMPLETE)
    complete = failing(COMPLETE, arguments, "a problem")
    repository.write(repository.root / "complete", complete)
    code, output, messages = repository.run()
    assert code == 1
    assert output == ""
    expected = error.format(venv=repository.venv)
    assert messages[-1] == expected
    # The messages of pip are shown, those of the other commands are not.
    shows_messages = "install " in arguments
    assert ("a problem" in messages) == shows_messages


def test_a_folder_that_cannot_be_written_is_reported(repository: Repository) -> None:
    repository.write_python("python3", INCOMPLETE)
    # Opening a folder fails, as opening a file without permission does.
    (repository.root / ".venv.lock").mkdir()
    code, _, messages = repository.run()
    remedy = "correct its permissions, or choose another folder"
    assert code == 1
    assert messages[-1] == f"{repository.root}: cannot be written; {remedy}"
