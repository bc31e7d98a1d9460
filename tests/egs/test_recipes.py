"""run.sh of every recipe: the commands of a dry run, and the refused options."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from refusals import refused

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in ROOT.glob("egs/*/recipe.sh"))
VERIFYING = [name for name in RECIPES if (ROOT / "egs" / name / "prepare.py").is_file()]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def run(recipe: str, *options: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run run.sh with `options` and only PATH and `variables` in its environment."""
    return subprocess.run(
        ["bash", ROOT / "egs" / recipe / "run.sh", *options],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
    )


def dry_run(recipe: str, *options: str | Path) -> list[list[str]]:
    """Return the arguments of each command of a dry run."""
    done = run(recipe, "--dry-run", *options)
    assert (done.stderr, done.returncode) == ("", 0)
    # The output is a script with comments and exports.
    script = "python() { printf '%s\\t' \"$@\"; echo; }\n" + done.stdout
    read = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return [line.split("\t")[:-1] for line in read.stdout.splitlines()]


def values_of(option: str, command: Sequence[str]) -> list[str]:
    """Return the values of an option."""
    rest = list(command)[list(command).index(option) + 1 :]
    end = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:end]


def extractions(recipe: str) -> list[tuple[str, list[str]]]:
    """Return (data directory, more options) of each extraction of stage 5."""
    text = (ROOT / "egs" / recipe / "recipe.sh").read_text()
    found = [("test", [])] if "untrained=false" in text else [("test", []), ("test", ["untrained"])]
    return found + ([("train", ["per-speaker"])] if "development=true" in text else [])


@every_recipe
def test_dry_run_prints_every_stage(recipe: str, tmp_path: Path) -> None:
    parser = f'case "$*" in *options.py*|*version_info*) exec {sys.executable} "$@";; esac'
    (tmp_path / "python3").write_text(f"#!/bin/sh\n{parser}\ntouch {tmp_path}/called\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    done = run(recipe, "--dry-run", "--data", "/d", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (done.stderr, done.returncode) == ("", 0)
    assert not (tmp_path / "called").exists()
    titles = [line for line in done.stdout.splitlines() if line.startswith("# stage")]
    assert [f"# stage {n}:" in "".join(titles) for n in range(7)] == [True] * 7


@pytest.mark.parametrize("recipe", VERIFYING)
def test_dry_run_names_the_right_files(recipe: str, tmp_path: Path) -> None:
    data, exp = tmp_path / "my data", tmp_path / "my exp"
    options = ("--data", data, "--exp", exp, "--hardware", "cpu", "--large-margin", "true")
    commands = dry_run(recipe, *options, "--noise", "/my noise", "--rirs", "none", "--seed=7")
    download, prepare, look, decode, pack, train, tune, *extract, score, score_tuned = commands

    script = str(ROOT / "egs" / recipe / "prepare.py")
    assert download[:2] == [script, "--download"]
    assert prepare[:5] == [script, "--noise", "/my noise", "--data", str(data)]
    checked = [f"{data}/train", f"{data}/test", f"{data}/noise"]
    rate = ["--sample-rate", "16000"]
    assert look[:-1] == ["-m", "speakerlab", "check", *checked, *rate, "--allow-rejected"]
    assert 0 <= float(look[-1]) <= 0.05
    assert decode[:6] == ["-m", "speakerlab", "check", *checked[1:], "--decode"]
    assert pack[:4] == ["-m", "speakerlab", "pack", checked[0]]
    assert (values_of("--codec", pack), pack[6:8]) == (["pcm"], rate)

    assert values_of("--exp", train) == [str(exp)]
    assert "--init" not in train
    layers = values_of("--config", train)
    own = ROOT / "egs" / recipe / "conf" / Path(layers[0]).name
    assert [Path(layer).relative_to(ROOT).as_posix() for layer in layers[1:]] == [
        f"egs/{recipe}/conf.yaml",
        *([own.relative_to(ROOT).as_posix()] if own.is_file() else []),
        "conf/hardware/cpu.yaml",
    ]
    assert values_of("--set", train) == [f"data.dir={data}", "seed=7", "augment.room_prob=0"]

    assert values_of("--exp", tune) == [f"{exp}-lm"]
    assert values_of("--init", tune) == [f"{exp}/model"]
    overlay = str(ROOT / "conf/finetune/large_margin.yaml")
    assert values_of("--config", tune) == [*layers[:-1], overlay, layers[-1]]
    for layer in values_of("--config", tune):
        assert Path(layer).is_file(), layer

    assert [
        (
            *values_of("--data", words),
            [name for name in ("untrained", "per-speaker") if f"--{name}" in words],
        )
        for words in extract
    ] == 2 * [(f"{data}/{name}", options) for name, options in extractions(recipe)]
    assert [values_of("--exp", words) for words in extract] == [
        [path] for path in (str(exp), f"{exp}-lm") for _ in extractions(recipe)
    ]
    assert values_of("--exp", score) == [str(exp)]
    assert values_of("--exp", score_tuned) == [f"{exp}-lm"]
    for trials in values_of("--trials", score):
        assert trials.startswith(f"{data}/test/trials")


def test_a_recipes_own_layers_override_the_general_ones() -> None:
    options = ("--model", "resnet34", "--large-margin", "true", "--hardware", "cpu")
    tune = [words for words in dry_run("cnceleb", *options) if "train" in words][1]
    assert [Path(path).relative_to(ROOT).as_posix() for path in values_of("--config", tune)] == [
        "conf/resnet34.yaml",
        "egs/cnceleb/conf.yaml",
        "egs/cnceleb/conf/resnet34.yaml",
        "conf/finetune/large_margin.yaml",
        "egs/cnceleb/conf/resnet34_large_margin.yaml",
        "conf/hardware/cpu.yaml",
    ]


@every_recipe
def test_recipe_is_complete(recipe: str) -> None:
    there = {path.name for path in (ROOT / "egs" / recipe).iterdir()}
    own = {"prepare.py", "conf.yaml"} if recipe in VERIFYING else {"diar"}
    assert {"run.sh", "recipe.sh", "README.md", *own} <= there
    assert os.access(ROOT / "egs" / recipe / "run.sh", os.X_OK)


def test_stage_2_stores_the_features_of_the_layers_that_are_trained_with() -> None:
    options = ("--stage", "2", "--stop-stage", "3", "--features", "fbank", "--model", "eres2net")
    decode, pack, train = dry_run("mini", *options, "--set", "frontend.num_mel_bins=64")
    assert decode[2] == "check"
    assert values_of("--features", pack) == ["fbank"]
    assert values_of("--config", pack) == values_of("--config", train)
    assert values_of("--config", pack)[-1] == str(ROOT / "conf/features/fbank.yaml")
    assert values_of("--set", pack)[1:] == ["frontend.num_mel_bins=64"]
    assert values_of("--exp", train) == [str(ROOT / "egs/mini/exp/eres2net_fbank_s0")]


def test_a_job_of_stage_2_packs_its_part_and_only_the_first_decodes() -> None:
    options = ("--stage", "2", "--stop-stage", "2", "--codec", "flac")
    check, first = dry_run("mini", *options, "--job", "1/3")
    (other,) = dry_run("mini", *options, "--job", "3/3")
    assert check[2] == "check"
    assert (values_of("--job", first), values_of("--job", other)) == (["1/3"], ["3/3"])
    assert values_of("--codec", other) == ["flac"]


def test_a_job_of_stage_5_extracts_its_part_and_waits_for_nobody() -> None:
    commands = dry_run("mini", "--stage", "5", "--stop-stage", "5", "--job", "2/3")
    assert [values_of("--job", words) for words in commands] == [["2/3"], ["2/3"]]
    assert not any("--wait-minutes" in words for words in commands)


def test_values_of_set_are_passed_on_unchanged() -> None:
    values = ["training.lr=0.2", "a.b=[1, 2]", 'c.d=it\'s $HOME `x` \\ "q" *']
    options = ("--stage", "3", "--stop-stage", "3")
    (train,) = dry_run("mini", *options, "--set", *values, "--seed", "3", "--set=e.f=g")
    assert values_of("--set", train)[1:] == ["seed=3", *values, "e.f=g"]


@pytest.mark.parametrize(
    "folder", ["with blank", "with'quote", "$(touch x)", "a&b", "Ünï", "-- x", "*"]
)
def test_odd_folders_stay_one_word(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder
    path.mkdir()
    _, prepare, *_, score = dry_run("mini", "--corpus", path, "--data", path)
    assert values_of("--corpus", prepare) == [f"{tmp_path}/{folder}"]
    assert values_of("--trials", score) == [f"{tmp_path}/{folder}/test/trials"]


def test_relative_folders_are_those_of_the_user(tmp_path: Path) -> None:
    options = ["--dry-run", "--stage", "6", "--exp", "a/b", "--data", "d"]
    command = ["bash", ROOT / "egs/mini/run.sh", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert f"--exp {tmp_path}/a/b --trials {tmp_path}/d/test/trials" in done.stdout


def test_initial_model_may_be_a_published_one(tmp_path: Path) -> None:
    name = "hub:campplus-zh-200k"
    (train,) = dry_run("mini", "--stage", "3", "--stop-stage", "3", "--init", name)
    assert values_of("--init", train) == [name]
    done = run("mini", "--init", "hub:nothing", "--data", tmp_path / "data", "--stop-stage", "1")
    assert done.returncode == 1 and refused(done.stderr, "hub:nothing", "import --list")
    assert not (tmp_path / "data").exists()


def test_ranks_of_one_host() -> None:
    (train,) = dry_run("mini", "--stage", "3", "--stop-stage", "3", "--gpus", "2,3")
    launch = train[: train.index("train") - 2]
    assert launch[:3] == ["-m", "speakerlab", "launch"]
    assert values_of("--nproc-per-node", launch) == ["2"]
    assert "--standalone" in launch
    done = run("mini", "--dry-run", "--gpus", "2 3")
    assert "export CUDA_VISIBLE_DEVICES=2\\,3\n" in done.stdout
    assert "export OMP_NUM_THREADS=" in done.stdout
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in done.stdout
    done = run("mini", "--dry-run", "--nproc", "2", OMP_NUM_THREADS="5")
    assert "OMP_NUM_THREADS" not in done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_several_hosts(rank: int) -> None:
    where = ("--nnodes", "2", "--node-rank", str(rank), "--rdzv", "10.0.0.1:29400", "--nproc", "4")
    commands = dry_run("mini", *where)
    (train,) = [words for words in commands if "train" in words]
    assert len(commands) == (9 if rank == 0 else 3)
    for words in commands[1 if rank else 6 :][:2]:
        assert (words[2], values_of("--job", words)) == ("extract", [f"{rank + 1}/2"])
        assert ("--wait-minutes" in words) == (rank == 0)
    launch = train[: train.index("train") - 2]
    assert values_of("--nnodes", launch) == ["2"]
    assert values_of("--rdzv-endpoint", launch) == ["10.0.0.1:29400"]
    (settings,) = values_of("--rdzv-conf", launch)
    assert settings.split(",")[0] == f"is_host={1 - rank}"
    assert ("--local-addr" in launch) == (rank == 0)


REFUSED = {  # options -> subject of the message, values that it names
    "--modle campplus": ("run.sh", "--modle", "--model"),
    "--stop 3": ("run.sh", "--stop", "--stop-stage"),
    "--Seed=3": ("run.sh", "--Seed", "--seed"),
    "--zzz": ("run.sh", "--zzz; see --help"),
    "here": ("run.sh", "here"),
    "--model": ("--model",),
    "--model --seed 1": ("--model",),
    "--corpus=": ("--corpus",),
    "--set": ("--set",),
    "--set training.lr": ("--set", "training.lr"),
    "--set seed=1": ("--set seed=1", "--seed 1"),
    "--set data.dir=x": ("--set data.dir=x", "--data x"),
    "--dry-run=yes": ("--dry-run", "yes"),
    "--model camplus": ("--model", "camplus", "campplus"),
    "--model ERes2Net": ("--model", "did you mean eres2net?"),
    "--hardware gpu": ("--hardware", "gpu", "gpu_"),
    "--hardware no.yaml": ("--hardware", "no.yaml", "gpu_"),
    "--stage 7": ("--stage", 7),
    "--stage 3 --stop-stage 2": ("--stop-stage", 2, 3),
    "--seed -1": ("--seed", -1),
    "--large-margin yes": ("--large-margin", "yes"),
    "--features mfcc": ("--features", "mfcc"),
    "--codec mp3": ("--codec", "mp3"),
    "--task asr": ("--task", "asr"),
    "--job 1/4": ("--job 1/4", "0 to 6", "--stage 2"),
    "--stage 5 --job 1/4": ("--job 1/4", "5 to 6"),
    "--stage 2 --stop-stage 2 --job 5/4": ("--job", "5/4"),
    "--stage 2 --stop-stage 2 --job 1": ("--job", 1),
    "--stage 5 --stop-stage 5 --job 1/2 --nnodes 2 --node-rank 0 --rdzv a:1": (
        "--job 1/2",
        "--nnodes 2",
    ),
    "--task diar --nnodes 2 --node-rank 0 --rdzv a:1": ("--nnodes", "--task diar"),
    "--task diar --stage 5 --stop-stage 5 --job 1/2": ("--job", "--task diar"),
    "--task diar --init X --large-margin true": ("--large-margin, --stage 4", "--init X"),
    "--task diar --init X --stage 4": ("--large-margin, --stage 4", "--init X"),
    "--method sdpn": ("--method sdpn", "--task ssl"),
    "--task ssl --method moco": ("--method", "moco", "sdpn"),
    "--task ssl --stage 4": ("--large-margin, --stage 4", "--task ssl"),
    "--task ssl --large-margin true": ("--large-margin, --stage 4", "--task ssl"),
    "--wait-minutes soon": ("--wait-minutes", "soon"),
    "--gpus 0,1 --nproc 3": ("--nproc", 3),
    "--gpus 0,x": ("--gpus", "'0,x'"),
    "--gpus 1,1": ("--gpus", "'1,1'"),
    "--gpus 0 --hardware cpu": ("--hardware cpu", "--gpus"),
    "--stage 4 --large-margin false": ("--large-margin false", "4 to 6"),
    "--nnodes 2 --rdzv a:1": ("--node-rank",),
    "--nnodes 2 --node-rank 1": ("--rdzv",),
    "--rdzv a:1": ("--node-rank, --rdzv", "--nnodes"),
}


@pytest.mark.parametrize("options", REFUSED)
def test_wrong_options_are_refused_in_one_line(options: str) -> None:
    done = run("mini", *options.split(), "--dry-run")
    assert (done.stdout, done.returncode, done.stderr.count("\n")) == ("", 1, 1)
    assert refused(done.stderr, *REFUSED[options]), done.stderr


def test_before_the_first_stage(tmp_path: Path) -> None:
    """A dry run, too, misses the corpus and says that --set changes both trainings."""
    done = run("3dspeaker", "--dry-run", "--corpus", tmp_path / "none")
    assert done.returncode == 1 and refused(done.stderr, "--corpus", tmp_path / "none")
    done = run("mini", "--dry-run", "--large-margin", "true", "--set", "training.lr=1")
    assert "--set: training.lr=1" in done.stdout.partition("# stage 0")[0]


def test_hardware_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.touch()
    (train,) = dry_run("mini", "--stage", "3", "--stop-stage", "3", "--hardware", file)
    assert values_of("--config", train)[-1] == str(file)


@pytest.mark.parametrize("options", ["--features wave --task sv", "--set a.b=c --stage=6"])
def test_default_values_are_accepted(options: str) -> None:
    assert dry_run("mini", *options.split())
