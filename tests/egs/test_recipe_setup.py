"""egs/common/setup.sh: options of a recipe, its stages, and signals to a running command.

Each test writes a small run.sh that sources a copy of setup.sh; its commands are Python scripts.
"""

import fcntl
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

ROOT = Path(__file__).parents[2]
STOPS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]

RUN_SH = """
recipe=$(CDPATH='' cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
source "$recipe/../common/setup.sh"
python={python}
{options}
parse_options "${{BASH_SOURCE[0]}}" "$@"
{stages}
"""

OPTIONS = """
model=tiny        # NAME: a word
color=red         # red|dark-blue: one of two
seed=7            # 0-99: a number
set=()            # KEY=VALUE: several settings
large_margin=     # true|false: a flag
corpus=           # DIR: a folder
init=             # MODEL: a folder, or one of the hub
noise=auto        # DIR|none|auto: a folder, or a word
also=             # DATA: a data directory
"""
SHOW_ALL = """
for name in model color seed large_margin corpus init noise stop_stage dry_run gpus; do
  printf '%s=%s\\n' "$name" "${!name}"
done
printf 'set=%s\\n' "${set[@]}"
printf 'rate=%s\\n' "$rate"
"""

TWO_STAGES = """
if stage 1 first; then run python "$recipe/first.py"; fi
if stage 2 second; then run python "$recipe/second.py"; fi
"""

# Logs the ignored signals at the start, and later the received ones; saving takes half a second.
SAVES_WHEN_STOPPED = """
import os, signal, time
numbers = [getattr(signal, name) for name in {stops}]
log, received = open("log", "w", buffering=1), []
ignored = [number.name for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
for number in numbers:
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: received.append(number))
log.write(f"ignored {{ignored}}\\n")
while not received:
    time.sleep(0.01)
time.sleep(0.5)
log.write(" ".join(["got", *(signal.Signals(number).name for number in received)]) + "\\n")
os._exit({code})
"""


class Recipe:
    """A folder with egs/common and a recipe that has the given options and stages."""

    def __init__(self, folder: Path, *, options: str = "", stages: str = "") -> None:
        self.folder = folder
        self.recipe = folder / "egs/toy"
        self.recipe.mkdir(parents=True)
        shutil.copytree(ROOT / "egs/common", folder / "egs/common")
        text = RUN_SH.format(python=sys.executable, options=options, stages=stages)
        (self.recipe / "run.sh").write_text(text)

    def write(self, name: str, code: str) -> None:
        """Write a Python script into the recipe's folder."""
        (self.recipe / name).write_text(code)

    def start(self, *arguments: str, **variables: Any) -> subprocess.Popen[str]:
        """Start run.sh in the folder."""
        command = ["bash", str(self.recipe / "run.sh"), *arguments]
        options = {
            "cwd": self.folder,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        options |= variables
        return subprocess.Popen(command, text=True, **options)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run run.sh in the folder until it ends."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(
            args=list(arguments),
            returncode=process.returncode,
            stdout=output,
            stderr=errors,
        )


def test_the_build_of_pytorch_is_chosen_where_the_environment_is_made(tmp_path):
    stages = 'if stage 1 first; then run python "$recipe/first.py"; fi'
    recipe = Recipe(tmp_path, options="python=''", stages=stages)
    recipe.write("first.py", "")
    environment = tmp_path / "egs/common/environment.py"
    environment.write_text(
        "import sys\n"
        "open('asked', 'w').write(' '.join(sys.argv[1:]))\n"
        "print(sys.executable)\n"
    )
    for options, build in (([], "auto"), (["--torch", "cpu"], "cpu")):
        done = recipe.run(*options)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "asked").read_text() == f"run --torch {build}"
    assert refused(recipe.run("--torch", "cu126").stderr, "--torch", "auto|cpu")


def test_a_full_disk_of_the_output_skips_no_stage(tmp_path):
    recipe = Recipe(tmp_path, stages=TWO_STAGES)
    for name in ("first", "second"):
        recipe.write(f"{name}.py", f"open('{name} was run', 'w')")
    # Every write to /dev/full fails with "no space left on device".
    with Path("/dev/full").open("w") as full:
        for arguments in (("--dry-run",), ()):
            process = recipe.start(*arguments, stdout=full)
            process.communicate(timeout=60)
            is_dry = "--dry-run" in arguments
            for name in ("first", "second"):
                was_run = (tmp_path / f"{name} was run").exists()
                assert was_run == (not is_dry), (name, arguments)


# Options


@pytest.fixture
def shown(tmp_path):
    """shown("--model", "x") -> name -> value of every option; a list for --set."""
    recipe = Recipe(tmp_path, options=OPTIONS, stages=SHOW_ALL)

    def show(*arguments: str) -> dict[str, Any]:
        done = recipe.run(*arguments)
        assert done.stderr == ""
        assert done.returncode == 0
        values: dict[str, Any] = {"set": []}
        for line in done.stdout.splitlines():
            name, _, value = line.partition("=")
            if name != "set":
                values[name] = value
            elif value:
                values["set"].append(value)
        return values

    return show


def test_defaults_are_those_of_the_declarations(shown):
    assert shown() == {
        "model": "tiny",
        "color": "red",
        "seed": "7",
        "large_margin": "",
        "corpus": "",
        "init": "",
        "noise": "auto",
        "stop_stage": "6",
        "dry_run": "false",
        "gpus": "auto",
        "set": [],
        "rate": "16000",
    }


def test_every_kind_of_option_is_read(shown, tmp_path):
    model = ("--model=a=b", "--init=hub:x", "--large-margin", "--seed=99")
    data = ("--corpus", "my corpus", "--noise", "none")
    common = ("--color", "dark-blue", "--stop-stage", "3", "--gpus", "")
    settings = ("--set", "a.b=c d", "e={f: 1}", "--dry-run", "--set=g=h=i")
    values = shown(*model, *data, *common, *settings)
    assert values == {
        "model": "a=b",
        "color": "dark-blue",
        "seed": "99",
        "large_margin": "true",
        "corpus": f"{tmp_path}/my corpus",
        "init": "hub:x",
        "noise": "none",
        "stop_stage": "3",
        "dry_run": "true",
        "gpus": "",
        "set": ["a.b=c d", "e={f: 1}", "g=h=i"],
        "rate": "16000",
    }


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (("--noise", "some/folder"), "noise", "{cwd}/some/folder"),
        (("--noise", "/a b"), "noise", "/a b"),
        (("--init", "exp/a"), "init", "{cwd}/exp/a"),
        (("--corpus", "none"), "corpus", "{cwd}/none"),
        (("--large-margin", "false"), "large_margin", "false"),
        ("--large-margin=true", "large_margin", "true"),
        (("--stage", "4"), "large_margin", "true"),
        (("--stop-stage", "4"), "large_margin", "true"),
        (("--seed", "0"), "seed", "0"),
        (("--set", "frontend.sample_rate=8000"), "rate", "8000"),
    ],
)
def test_a_value_is_set(shown, tmp_path, arguments, name, value):
    if isinstance(arguments, str):
        arguments = (arguments,)
    (tmp_path / "exp/a").mkdir(parents=True)  # a model must exist
    expected = value.format(cwd=tmp_path)
    assert shown(*arguments)[name] == expected


REFUSED = {  # options -> subject of the message, values that it names
    "--modle tiny": ("run.sh", "--modle", "did you mean --model?"),
    "--stop 3": ("run.sh", "--stop", "did you mean --stop-stage?"),
    "--Seed=3": ("run.sh", "--Seed", "did you mean --seed?"),
    "--qqqqqqqqqq": ("run.sh", "--qqqqqqqqqq; see --help"),
    "here": ("run.sh", "here"),
    "--model": ("--model", "needs a value"),
    "--model --seed 1": ("--model", "needs a value"),
    "--model=": ("--model", "''"),
    "--corpus=": ("--corpus",),
    "--set": ("--set", "KEY=VALUE"),
    "--set training.lr": ("--set", "KEY=VALUE", "'training.lr'"),
    "--set training.lr=1 lr": ("--set", "KEY=VALUE", "'lr'"),
    "--set seed=1": ("--set seed=1", "--seed 1"),
    "--set data.dir=x": ("--set data.dir=x", "--data x"),
    "--color green": ("--color", "red|dark-blue", "green"),
    "--dry-run=yes": ("--dry-run", "true|false", "yes"),
    "--large-margin yes": ("--large-margin", "true|false", "yes"),
    "--seed -1": ("--seed", "0-99", -1),
    "--seed 100": ("--seed", "0-99", 100),
    "--seed 1.5": ("--seed", "0-99", 1.5),
    "--seed 08": ("--seed", "0-99", "08"),
    "--stage 7": ("--stage", "0-6", 7),
    "--stage 3 --stop-stage 2": ("--stop-stage", 2, 3),
    "--stage 4 --large-margin false": ("--large-margin false", "stage 4"),
    "--nnodes 2": ("--node-rank", "missing"),
    "--wait-minutes soon": ("--wait-minutes", "soon"),
    "--nproc 0": ("--nproc", 0),
    "--job 1/4": ("--job 1/4", "stage 2 or 5"),
    "--stage 5 --job 1/4": ("--job 1/4", "stage 2 or 5"),
    "--stage 5 --stop-stage 5 --job 1/2 --nnodes 2": ("--job 1/2", "one host"),
}


@pytest.mark.parametrize("options", REFUSED)
def test_wrong_options_are_refused_in_one_line(tmp_path, options):
    recipe = Recipe(tmp_path, options=OPTIONS, stages=SHOW_ALL)
    done = recipe.run(*options.split())
    assert done.stdout == ""
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert refused(done.stderr, *REFUSED[options]), done.stderr


@pytest.mark.parametrize("name", ["a\nb", os.fsdecode(b"a\xff"), "\x1b[31m"])
def test_a_path_that_no_table_can_hold_is_refused(tmp_path, name):
    recipe = Recipe(tmp_path, options=OPTIONS, stages=SHOW_ALL)
    done = recipe.run("--corpus", name)
    assert done.stdout == ""
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert refused(done.stderr, "--corpus", "one line of UTF-8")


def test_models_and_data_that_are_missing_are_refused_before_any_stage(tmp_path):
    recipe = Recipe(tmp_path, options=OPTIONS, stages=TWO_STAGES)
    for name in ("first", "second"):
        recipe.write(f"{name}.py", f"open('{name} was run', 'w')")
    data = tmp_path / "data"
    data.mkdir()
    for option, value, missing in (
        ("--init", "exp/a", tmp_path / "exp/a"),
        ("--also", "data", data / "wav.scp"),
        ("--also", "/none", "/none/wav.scp"),
    ):
        for arguments in ((option, value), (f"{option}={value}", "--stage", "2")):
            done = recipe.run(*arguments)
            assert done.stdout == ""
            assert done.returncode == 1
            assert done.stderr.count("\n") == 1
            assert refused(done.stderr, option, missing, "does not exist")
        # A dry run may be for another machine.
        done = recipe.run(option, value, "--dry-run")
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "first was run").exists()

    (data / "wav.scp").touch()
    done = recipe.run("--also", "data", "--init", "hf:ann/model")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "second was run").exists()


def test_help_prints_every_option_and_its_meaning(tmp_path):
    recipe = Recipe(tmp_path, options=OPTIONS, stages="exit 1")
    done = recipe.run("--help")
    assert done.stderr == ""
    assert done.returncode == 0
    for line in (
        "  --color=red         # red|dark-blue: one of two",
        "  --large-margin=     # true|false: a flag",
        "  --stop-stage=6    # 0-6: last stage",
    ):
        assert f"{line}\n" in done.stdout
    # Options are spelled with hyphens, though their variables have underscores.
    _, *lines = done.stdout.splitlines()
    for line in lines:
        option = line.partition("=")[0]
        assert "_" not in option


# Stages and commands


def test_stages_run_in_order_and_say_so(tmp_path):
    recipe = Recipe(tmp_path, stages=TWO_STAGES)
    for name in ("first", "second"):
        recipe.write(f"{name}.py", f"print('{name} ran', flush=True)")
    done = recipe.run()
    assert done.stderr == ""
    assert done.returncode == 0
    lines = ["stage 1: first", "first ran", "stage 2: second", "second ran"]
    assert done.stdout.splitlines() == lines
    second = recipe.run("--stage", "2")
    assert second.stdout.splitlines() == lines[2:]
    first = recipe.run("--stop-stage", "1")
    assert first.stdout.splitlines() == lines[:2]


@pytest.mark.parametrize("code", [1, 3, 5])
def test_a_failed_command_ends_the_run_with_its_exit_code(tmp_path, code):
    recipe = Recipe(tmp_path, stages=TWO_STAGES)
    recipe.write("first.py", f"raise SystemExit({code})")
    recipe.write("second.py", "print('second ran')")
    done = recipe.run()
    assert done.stdout == "stage 1: first\n"
    assert done.returncode == code
    assert done.stderr == f"stage 1: failed with exit code {code}\n"


def test_a_dry_run_prints_words_that_a_shell_reads_back_and_finds_no_python(tmp_path):
    stages = (
        "python='' && if stage 1 first; then run speakerlab train --exp 'a b' ''"
        " '$x'; fi"
    )
    recipe = Recipe(tmp_path, stages=stages)
    done = recipe.run("--dry-run")
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout == "# stage 1: first\nspeakerlab train --exp a\\ b '' \\$x\n"


def test_speakerlab_is_the_package_of_this_repository_in_the_environment(tmp_path):
    # A package in the user's folder must not hide the one of the repository.
    recipe = Recipe(tmp_path, stages="run speakerlab --version")
    package = tmp_path / "speakerlab"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(*sys.argv[1:])")
    done = recipe.run()
    assert done.stdout == "--version\n"
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_command_is_a_child_of_the_shell_that_it_watches(tmp_path):
    recipe = Recipe(tmp_path, stages=TWO_STAGES)
    code = "import os; print(os.getppid() == int(os.environ['SPEAKERLAB_PARENT']))"
    for name in ("first.py", "second.py"):
        recipe.write(name, code)
    lines = recipe.run().stdout.splitlines()
    assert lines[1::2] == ["True", "True"]  # titles of stages between them


@pytest.mark.parametrize(("rank", "runs"), [("0", range(7)), ("1", (3, 4, 5))])
def test_other_hosts_than_the_first_run_training_and_extraction_only(
    tmp_path, rank, runs
):
    stages = 'for n in {0..6}; do if stage "$n" title; then say "runs $n"; fi; done'
    recipe = Recipe(tmp_path, stages=stages)
    host = ("--nnodes", "2", "--node-rank", rank, "--rdzv", "a:1")
    done = recipe.run(*host)
    lines = done.stdout.splitlines()
    run_stages = [line for line in lines if line.startswith("runs")]
    assert run_stages == [f"runs {number}" for number in runs]
    num_skipped = done.stdout.count("runs on node rank 0 only")
    assert num_skipped == 7 - len(runs)


# What is checked before the first stage

TRAINING_OPTIONS = """
corpus=           # DIR: a corpus
init=             # MODEL: initial model
noise=auto        # DIR|none|auto: noise
rirs=auto         # DIR|none|auto: rooms
large_margin=     # true|false: a flag
"""
CHECKED = """
exp=/e data="$PWD/my data" seed=3 set=(a=b)
settings=("data.dir=$data" "seed=$seed" "${set[@]}")
check_training tiny conf.yaml
say "noise $noise, rirs $rirs"
"""
# In the place of speakerlab: prints its words into a file, and then the needs of a training.
NEEDS = """
import sys
open("words", "a").write(repr(sys.argv[1:]) + "\\n")
print("device: a toy\\nnoise: used (0.5)\\nrirs: not used (0)")
sys.exit(int(open("code").read()))
"""


@pytest.fixture
def checked(tmp_path):
    """checked("--noise", "x", code=0) -> (finished run.sh, words of each check)."""
    recipe = Recipe(tmp_path, options=TRAINING_OPTIONS, stages=CHECKED)
    package = tmp_path / "speakerlab"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(NEEDS)
    file = tmp_path / "words"

    def run(*arguments: str, code: int = 0):
        # Not in the module: of two versions in one second, Python might run the first one again.
        (tmp_path / "code").write_text(str(code))
        file.write_text("")
        done = recipe.run(*arguments)
        lines = file.read_text().splitlines()
        return done, [literal_eval(line) for line in lines]

    return run


def test_a_training_is_checked_with_its_own_options(checked, tmp_path):
    devices = ["--gpus", "0 1", "--nproc", "2"]
    model = tmp_path / "m"
    model.mkdir()
    done, (command,) = checked("--init", str(model), *devices)
    assert done.stderr == ""
    assert done.returncode == 0
    layers = ["--config", "tiny", "conf.yaml"]
    settings = [f"data.dir={tmp_path}/my data", "seed=3", "a=b"]
    assert command[:4] == ["train", "--check", "--exp", "/e"]
    assert command[4:9] == [*layers, "--init", str(model)]
    assert command[9:] == [*devices, "--set", *settings]


def test_what_a_training_does_not_use_is_not_prepared(checked):
    done, _ = checked("--noise", "/n")
    assert done.stdout.splitlines() == [
        "device: a toy",
        "noise /n, rirs none",
    ]
    # Rooms that were asked for, but have the probability 0.
    done, _ = checked("--rirs", "/r")
    assert done.stdout == "device: a toy\n"
    assert done.returncode == 1
    assert refused(done.stderr, "--rirs", "not used in training")


def test_a_check_that_fails_ends_the_run_before_the_first_stage(checked):
    done, _ = checked(code=1)
    assert done.stdout == ""
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize(
    "options", [("--stage", "5"), ("--stage", "3"), ("--dry-run",)]
)
def test_nothing_is_checked_where_the_training_itself_does_it_at_once(checked, options):
    done, commands = checked(*options)
    assert done.stderr == ""
    assert done.returncode == 0
    assert commands == []
    assert done.stdout.endswith("noise auto, rirs auto\n")


def test_noise_that_stage_1_has_not_prepared_is_noticed_before_packing(
    checked, tmp_path
):
    options = ("--stage", "2", "--rirs", "none")
    done, _ = checked(*options)
    assert done.returncode == 1
    assert refused(done.stderr, "--noise auto", tmp_path / "my data", "--noise none")
    done, _ = checked(*options, "--noise", "none", code=1)
    assert "--noise" not in done.stderr
    noise = tmp_path / "my data/noise"
    noise.mkdir(parents=True)
    (noise / "wav.scp").touch()
    done, _ = checked(*options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["corpus", "noise", "rirs"])
def test_a_later_stage_must_not_name_other_data_than_stage_1(checked, tmp_path, name):
    data = tmp_path / "my data"
    data.mkdir()
    (data / ".prepared").write_text("corpus=/a b\nnoise=/a b\nrirs=/a b\n")
    done, _ = checked(f"--{name}", "/a b", "--stage", "3")
    assert done.stderr == ""
    assert done.returncode == 0
    done, commands = checked(f"--{name}", "/a", "--stage", "3")
    assert done.stdout == ""
    assert done.returncode == 1
    assert commands == []
    assert refused(done.stderr, f"--{name}", "/a", "--stage 1")


# Signals


class Running:
    """A run of two stages, whose first command is running and saves when it is stopped."""

    def __init__(
        self, folder: Path, *, code: str = "128 + received[0]", **variables: Any
    ) -> None:
        recipe = Recipe(folder, stages=TWO_STAGES)
        first = SAVES_WHEN_STOPPED.format(stops=STOPS, code=code)
        recipe.write("first.py", first)
        recipe.write("second.py", "open('second_ran', 'w')")
        self.folder = folder
        self.process = recipe.start(**variables)
        self.wait_for("ignored")

    def wait_for(self, word: str) -> None:
        """Wait until the command has logged a word."""
        deadline = time.monotonic() + 20
        while word not in self.log():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.01)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def end(self) -> tuple[int, list[str], str]:
        """Return (exit code, lines of the command, errors of run.sh); no stage followed."""
        _, errors = self.process.communicate(timeout=20)
        assert not (self.folder / "second_ran").exists()
        lines = self.log().splitlines()
        return self.process.returncode, lines, errors or ""


@pytest.mark.parametrize("name", STOPS)
def test_a_command_saves_before_run_sh_ends(tmp_path, name):
    running = Running(tmp_path)
    running.process.send_signal(signal.Signals[name])
    code, log, errors = running.end()
    # run.sh passes on SIGINT as SIGTERM: Ctrl-C reaches the command itself, see below.
    passed_on = name.replace("INT", "TERM")
    assert log == ["ignored []", f"got {passed_on}"]
    assert code == 128 + signal.Signals[name]
    advice = "run the same command again to resume"
    assert errors == f"stage 1: stopped by {name}; {advice}\n"


def test_signals_that_follow_do_not_cut_saving_short(tmp_path):
    running = Running(tmp_path)
    for name in ("SIGUSR1", "SIGTERM", "SIGTERM"):
        running.process.send_signal(signal.Signals[name])
        time.sleep(0.1)
    code, log, _ = running.end()
    first_signals = log[1].split()[:3]
    assert first_signals == ["got", "SIGUSR1", "SIGTERM"]
    # The command ends with the number of the first signal, and run.sh with its exit code.
    assert code == 128 + signal.SIGUSR1


@pytest.mark.parametrize(
    ("left", "code", "line"),
    [("0", 143, "stopped by SIGTERM"), ("7", 7, "failed with exit code 7")],
)
def test_no_stage_follows_a_stop_however_the_command_ends(tmp_path, left, code, line):
    running = Running(tmp_path, code=left)
    running.process.send_signal(signal.SIGTERM)
    exit_code, _, errors = running.end()
    assert exit_code == code
    assert errors.startswith(f"stage 1: {line}")
    assert errors.count("\n") == 1


def test_ctrl_c_at_a_terminal_reaches_the_command_once(tmp_path):
    """A second SIGINT would end it without saving; run.sh sends a SIGTERM instead."""
    keyboard, terminal = pty.openpty()
    running = Running(
        tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.write(keyboard, b"\x03")  # Ctrl-C
    code, log, _ = running.end()
    shown = ""
    while "stopped by" not in shown:
        readable, _, _ = select.select([keyboard], [], [], 5)
        if not readable:
            break
        shown += os.read(keyboard, 1 << 16).decode()
    assert log == ["ignored []", "got SIGINT SIGTERM"]
    assert code == 128 + signal.SIGINT
    assert "stage 1: stopped by SIGINT" in shown


def test_what_nohup_ignores_stays_ignored(tmp_path):
    def ignore_hangup() -> None:  # as nohup does, before it starts run.sh
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    running = Running(tmp_path, preexec_fn=ignore_hangup)
    running.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    _, log, _ = running.end()
    assert log == ["ignored ['SIGHUP']", "got SIGTERM"]
