"""Every recipe's run.sh: what it would run, what it refuses, what it skips.

In: the recipes as they are, and one made here. Commands are recorded by a stand-in for the Python
interpreter, so that nothing here needs an environment.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.parent.name for path in ROOT.glob("egs/*/recipe.sh"))
every_recipe = pytest.mark.parametrize("recipe", RECIPES)

# Writes down how it was called, and leaves what each command would; TRAIN_EXITS is its exit code.
PYTHON = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then printf '%s\\n' "$0" && exit; fi
printf '%s\\t' "$PPID" "$SPEAKERLAB_PARENT" "$@" >>"$CALLS" && printf '\\n' >>"$CALLS"
case "$*" in
  *' check '*) for folder in "$@"; do [[ ! -d $folder ]] || touch "$folder/utt2dur"; done ;;
  *prepare.py*--download*) ;;
  *prepare.py*) mkdir -p "$DATA"/{train,test} && touch "$DATA"/{train,test}/wav.scp ;;
  *' train '*) mkdir -p "$4/model" && exit "${TRAIN_EXITS:-0}" ;;
  *' extract '*) mkdir -p "$5/embeddings/test" ;;
esac
"""


def run(
    recipe: Path, *options: str | Path, path: Path | None = None, **variables: str | Path
) -> subprocess.CompletedProcess[str]:
    """run.sh with `options`; `path` holds a python3 that hides the real one."""
    search = f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin"
    environment = {"PATH": search, "HOME": "/", **{k: str(v) for k, v in variables.items()}}
    return subprocess.run(
        ["bash", recipe / "run.sh", *options], env=environment, capture_output=True, text=True
    )


def dry_run(recipe: str, *options: str | Path) -> list[list[str]]:
    """The words of each command that the recipe would run."""
    done = run(ROOT / "egs" / recipe, "--dry-run", *options)
    assert (done.stderr, done.returncode) == ("", 0)
    commands = [line for line in done.stdout.splitlines() if line.startswith("python ")]
    return [shlex.split(line)[1:] for line in commands]


def values_of(option: str, command: Sequence[str]) -> list[str]:
    """The words between `option` and the next one."""
    rest = list(command)[list(command).index(option) + 1 :]
    end = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:end]


@every_recipe
def test_recipe_is_whole(recipe: str) -> None:
    there = {path.name for path in (ROOT / "egs" / recipe).iterdir()}
    assert {"run.sh", "recipe.sh", "prepare.py", "conf.yaml", "README.md"} <= there
    assert os.access(ROOT / "egs" / recipe / "run.sh", os.X_OK)


@every_recipe
def test_dry_run_prints_every_stage(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "python3").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    done = run(ROOT / "egs" / recipe, "--dry-run", "--data", "/d", path=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    assert not (tmp_path / "called").exists()
    titles = [line for line in done.stdout.splitlines() if line.startswith("# stage")]
    assert [f"# stage {n}:" in "".join(titles) for n in range(7)] == [True] * 7

    commands = [words[1:] for words in dry_run(recipe, "--data", "/d")]
    names = [words[1] if words[0] == "speakerlab" else " ".join(words[:1]) for words in commands]
    assert names == [
        "--download",
        "--data",
        "check",
        "check",
        "train",
        "extract",
        "extract",
        "score",
    ]


@every_recipe
def test_dry_run_names_the_right_files(recipe: str, tmp_path: Path) -> None:
    data, exp = tmp_path / "my data", tmp_path / "my exp"
    options = ("--data", data, "--exp", exp, "--hardware", "cpu", "--large-margin", "true")
    commands = dry_run(recipe, *options, "--noise", "/my noise", "--seed=7")
    download, prepare, look, decode, train, tune, *extract, score, score_tuned = commands

    script = str(ROOT / "egs" / recipe / "prepare.py")
    assert download[:2] == [script, "--download"]
    assert prepare[:5] == [script, "--noise", "/my noise", "--data", str(data)]
    checked = [f"{data}/train", f"{data}/test", f"{data}/noise"]
    assert look == ["-m", "speakerlab", "check", *checked, "--allow-rejected", "0"]
    assert decode[:7] == ["-m", "speakerlab", "check", *checked, "--decode"]

    assert values_of("--exp", train) == [str(exp)]
    assert "--init" not in train
    layers = values_of("--config", train)
    assert [Path(layer).relative_to(ROOT).as_posix() for layer in layers[1:]] == [
        f"egs/{recipe}/conf.yaml",
        "conf/hardware/cpu.yaml",
    ]
    assert values_of("--set", train) == [f"data.dir={data}", "seed=7"]

    assert values_of("--exp", tune) == [f"{exp}-lm"]
    assert values_of("--init", tune) == [f"{exp}/model"]
    overlay = str(ROOT / "conf/finetune/large_margin.yaml")
    assert values_of("--config", tune) == [*layers[:2], overlay, layers[2]]
    for layer in values_of("--config", tune):
        assert Path(layer).is_file(), layer

    assert len(extract) == 4
    assert [("--untrained" in words) for words in extract] == [False, True, False, True]
    assert {words[5 + 1] for words in extract} == {f"{data}/test"}
    assert values_of("--exp", score) == [str(exp)]
    assert values_of("--exp", score_tuned) == [f"{exp}-lm"]
    for trials in values_of("--trials", score):
        assert trials.startswith(f"{data}/test/trials")


@every_recipe
def test_help_names_every_option(recipe: str) -> None:
    done = run(ROOT / "egs" / recipe, "--help")
    assert done.returncode == 0
    for option in ("--stage", "--corpus", "--set", "--noise", "--rirs", "--gpus", "--dry-run"):
        assert option in done.stdout


def test_default_experiment_is_named_by_model_and_seed() -> None:
    (train, *_) = dry_run("mini", "--stage", "3", "--model", "campplus")
    assert values_of("--exp", train) == [str(ROOT / "egs/mini/exp/campplus_s0")]


def test_values_of_set_are_passed_on_unchanged() -> None:
    values = ["training.lr=0.2", "a.b=[1, 2]", 'c.d=it\'s $HOME `x` \\ "q" *']
    options = ("--stage", "3", "--stop-stage", "3")
    (train,) = dry_run("mini", *options, "--set", *values, "--seed", "3", "--set=e.f=g")
    assert values_of("--set", train)[1:] == ["seed=3", *values, "e.f=g"]


@pytest.mark.parametrize(
    "folder", ["with blank", "with'quote", "$(touch x)", "a&b", "Ünï", "-- x", "*"]
)
def test_odd_folders_stay_one_word(tmp_path: Path, folder: str) -> None:
    _, prepare, *_, score = dry_run(
        "mini", "--corpus", tmp_path / folder, "--data", tmp_path / folder
    )
    assert values_of("--corpus", prepare) == [f"{tmp_path}/{folder}"]
    assert values_of("--trials", score) == [f"{tmp_path}/{folder}/test/trials"]


def test_relative_folders_are_those_of_the_user(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "bash",
            ROOT / "egs/mini/run.sh",
            "--dry-run",
            "--stage",
            "6",
            "--exp",
            "a/b",
            "--data",
            "d",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert f"--exp {tmp_path}/a/b --trials {tmp_path}/d/test/trials" in done.stdout


def test_ranks_of_one_host() -> None:
    (train,) = dry_run("mini", "--stage", "3", "--stop-stage", "3", "--gpus", "2,3")
    launch = train[: train.index("speakerlab.bin.train")]
    assert launch[:2] == ["-m", "speakerlab.bin.launch"]
    assert values_of("--nproc-per-node", launch) == ["2"]
    assert "--standalone" in launch
    done = run(ROOT / "egs/mini", "--dry-run", "--gpus", "2 3")
    assert "export CUDA_VISIBLE_DEVICES=2\\,3\n" in done.stdout
    assert "export OMP_NUM_THREADS=" in done.stdout
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in done.stdout
    done = run(ROOT / "egs/mini", "--dry-run", "--nproc", "2", OMP_NUM_THREADS="5")
    assert "OMP_NUM_THREADS" not in done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_several_hosts(rank: int) -> None:
    where = ("--nnodes", "2", "--node-rank", str(rank), "--rdzv", "10.0.0.1:29400", "--nproc", "4")
    commands = dry_run("mini", *where)
    (train,) = [words for words in commands if "speakerlab.bin.train" in words]
    assert len(commands) == (8 if rank == 0 else 1)
    launch = train[: train.index("speakerlab.bin.train")]
    assert values_of("--nnodes", launch) == ["2"]
    assert values_of("--rdzv-endpoint", launch) == ["10.0.0.1:29400"]
    (settings,) = values_of("--rdzv-conf", launch)
    assert settings.split(",")[0] == f"is_host={1 - rank}"
    assert ("--local-addr" in launch) == (rank == 0)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--modle campplus", "unknown option, got --modle; did you mean --model?"),
        ("--stop 3", "unknown option, got --stop; did you mean --stop-stage?"),
        ("--Seed=3", "unknown option, got --Seed; did you mean --seed?"),
        ("--model", "--model: has no value; give one"),
        ("--model --seed 1", "--model: has no value; give one"),
        ("--corpus=", "--corpus: has no value; give one"),
        ("--set", "--set: has no value; give one"),
        ("--set training.lr", "--set: takes section.key=value, got training.lr"),
        ("--set seed=1", "--set seed=1: would miss the experiment's name; use --seed 1"),
        ("--set data.dir=x", "--set data.dir=x: would miss the other stages; use --data x"),
        ("here", "not an option, got here"),
        ("--dry-run=yes", "--dry-run: takes no value, got yes"),
        ("--model camplus", "--model: unknown name, got camplus; did you mean campplus?"),
        ("--hardware gpu", "--hardware: unknown name, got gpu; did you mean gpu_"),
        ("--stage 7", "--stage: is a whole number from 0 to 6, got 7"),
        ("--stage 3 --stop-stage 2", "--stop-stage: is a whole number from 3 to 6, got 2"),
        ("--seed -1", "--seed: is a whole number from 0 to"),
        ("--large-margin yes", "--large-margin: is true or false, got yes"),
        ("--features fbank", "--features fbank: not in this release; use wave"),
        ("--job 1/4", "--job 1/4: not in this release"),
        ("--task lid", "--task lid: not in this release; use sv"),
        ("--gpus 0,1 --nproc 3", "more ranks than --gpus has GPUs, got 3"),
        ("--nnodes 2 --rdzv a:1", "--node-rank: is a whole number from 0 to 1, got none"),
        ("--nnodes 2 --node-rank 1", "--rdzv: is HOST:PORT of node rank 0, got none"),
        ("--rdzv a:1", "add --nnodes N"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: str, line: str) -> None:
    done = run(ROOT / "egs/mini", *options.split(), "--dry-run")
    assert done.returncode == 1
    assert done.stdout == ""
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", ["--features wave --task sv", "--set a.b=c --stage=6"])
def test_what_this_release_has_is_accepted(options: str) -> None:
    assert dry_run("mini", *options.split())


# --- runs, in a recipe made here ---------------------------------------------------------------


class Toy:
    """A copy of the shell files around a small recipe, and the recorder of its commands."""

    def __init__(self, folder: Path) -> None:
        self.recipe = folder / "egs/toy"
        self.recipe.mkdir(parents=True)
        (folder / "egs/common").mkdir()
        for source in ROOT.glob("egs/common/*.sh"):
            shutil.copy(source, folder / "egs/common")
        shutil.copy(ROOT / "egs/mini/run.sh", self.recipe)
        (self.recipe / "recipe.sh").write_text("model=tiny\n")
        (self.recipe / "prepare.py").write_text("pass\n")
        (folder / "conf/hardware").mkdir(parents=True)
        (folder / "conf/tiny.yaml").touch()
        self.path = folder / "bin"
        self.path.mkdir()
        (self.path / "python3").write_text(PYTHON)
        (self.path / "python3").chmod(0o755)
        self.data, self.exp, self.calls = folder / "my data", folder / "my exp", folder / "calls"

    def run(self, options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        where = ("--data", self.data, "--exp", self.exp)
        known = {"CALLS": self.calls, "DATA": self.data, **variables}
        return run(self.recipe, *options.split(), *where, path=self.path, **known)

    def recorded(self) -> list[list[str]]:
        """The words of every command of the last run, the two process ids in front."""
        return [line.split("\t")[:-1] for line in self.calls.read_text().splitlines()]

    def commands(self) -> list[str]:
        """What kinds of commands ran last."""
        words = [call[4] if call[2] == "-m" else Path(call[2]).name for call in self.recorded()]
        return [word if word != "train" else f"train {self.recorded()[0][6]}" for word in words]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_all_stages_run_in_order(toy: Toy) -> None:
    done = toy.run("")
    assert (done.stderr, done.returncode) == ("", 0)
    names = [call[4] if call[2] == "-m" else Path(call[2]).name for call in toy.recorded()]
    prepare = ["prepare.py", "prepare.py", "check", "check"]
    assert names == [*prepare, "train", "extract", "extract", "score"]
    for number in range(7):
        assert f"stage {number}: " in done.stdout
        assert f"stage {number}: took " in done.stdout


def test_commands_are_children_of_the_shell_that_they_watch(toy: Toy) -> None:
    toy.run("--stop-stage 2")
    toy.run("--stage 3")
    for parent, watched, *_ in toy.recorded():
        assert parent == watched


@pytest.mark.parametrize(
    ("before", "stage", "line"),
    [
        (None, 2, "stage 2: stage 1 has to be run first, got no {data}/.stage1"),
        (None, 3, "stage 3: stage 1 has to be run first, got no {data}/.stage1"),
        (1, 3, "stage 3: stage 2 has to be run first, got no {data}/.stage2"),
        (2, 4, "stage 4: stage 3 has to be run first, got no {exp}/model"),
        (2, 5, "stage 5: stage 3 has to be run first, got no {exp}/model"),
        (3, 6, "stage 6: stage 5 has to be run first, got no {exp}/embeddings/test"),
    ],
)
def test_stage_before_the_one_it_needs(toy: Toy, before: int | None, stage: int, line: str) -> None:
    if before is not None:
        assert toy.run(f"--stop-stage {before}").returncode == 0
    done = toy.run(f"--stage {stage}")
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr.startswith(line.format(data=toy.data, exp=toy.exp))
    assert done.stderr.count("\n") == 1
    assert toy.recorded() == []


def test_finished_stages_are_not_redone_while_inputs_are_the_same(toy: Toy) -> None:
    def run_both(options: str = "") -> list[str]:
        assert toy.run(f"--stage 1 --stop-stage 2 {options}").returncode == 0
        return [call[4] if call[2] == "-m" else "prepare" for call in toy.recorded()]

    assert run_both() == ["prepare", "check", "check"]
    assert run_both() == []
    assert "stage 1: done before with the same inputs, skipped" in toy.run("--stop-stage 1").stdout
    assert run_both("--corpus /elsewhere") == ["prepare", "check", "check"]
    assert run_both("--corpus /elsewhere") == []
    (toy.recipe / "prepare.py").write_text("print(1)\n")
    assert run_both("--corpus /elsewhere") == ["prepare", "check", "check"]
    (toy.data / "train/wav.scp").write_text("a a.wav\n")
    assert run_both("--corpus /elsewhere") == ["check"]  # stage 2 alone reads it
    (toy.data / ".stage1").unlink()
    assert run_both("--corpus /elsewhere") == ["prepare", "check", "check"]
    (toy.data / "test/utt2dur").unlink()
    assert run_both("--corpus /elsewhere") == ["prepare", "check", "check"]


def test_stage_4_runs_when_asked_for_by_number(toy: Toy) -> None:
    toy.run("--stop-stage 3")
    done = toy.run("--stage 4")
    assert (done.stderr, done.returncode) == ("", 0)
    train, *extract, score, score_tuned = toy.recorded()
    assert train[5:7] == ["--exp", f"{toy.exp}-lm"]
    assert len(extract) == 4
    assert (score[6], score_tuned[6]) == (str(toy.exp), f"{toy.exp}-lm")
    toy.run("--stage 6")  # both systems are published now
    assert [call[6] for call in toy.recorded()] == [str(toy.exp), f"{toy.exp}-lm"]


def test_a_failed_command_ends_the_run_with_its_exit_code(toy: Toy) -> None:
    done = toy.run("", TRAIN_EXITS="3")
    assert done.returncode == 3
    assert done.stderr == "stage 3: failed with exit code 3\n"
    assert [call[4] for call in toy.recorded()][-1] == "train"


def test_without_python_one_line_says_what_to_do(toy: Toy) -> None:
    (toy.path / "python3").unlink()
    for name in ("bash", "dirname", "cat", "sha256sum", "rm"):
        (toy.path / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [toy.path / "bash", toy.recipe / "run.sh", "--stage", "0"],
        env={"PATH": str(toy.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "env: Python 3.10 or newer is needed" in done.stderr


def test_a_python_that_lacks_parts_is_passed_over(toy: Toy) -> None:
    """Its line says what is missing; .venv is used if it is whole, without being made again."""
    venv = toy.recipe.parents[1] / ".venv/bin"
    venv.mkdir(parents=True)
    shutil.move(toy.path / "python3", venv / "python")
    (toy.path / "python3").write_text("#!/bin/sh\necho \"No module named 'torch'\" >&2\nexit 1\n")
    (toy.path / "python3").chmod(0o755)
    done = toy.run("--stage 0 --stop-stage 0")
    assert done.returncode == 0
    assert f"env: not using {toy.path}/python3 (No module named 'torch')" in done.stdout
    assert f"env: using {venv.parent}" in done.stdout
    assert len(toy.recorded()) == 1
