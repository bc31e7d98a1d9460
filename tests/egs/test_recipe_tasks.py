"""`--task`: the stages of a task other than speaker verification."""

from pathlib import Path

import pytest
from refusals import refused
from test_recipes import RECIPES, ROOT, dry_run, run, values_of

from speakerlab.config.schema import load_config

TASKS = sorted(path.parent.relative_to(ROOT / "egs") for path in ROOT.glob("egs/*/lid/prepare.py"))
every_task = pytest.mark.parametrize("task", TASKS, ids=str)


@every_task
def test_the_same_stages_run(task: Path, tmp_path: Path) -> None:
    recipe, name = task.parts
    options = ("--task", name, "--data", "/d", "--exp", "/e", "--hardware", "cpu")
    options += ("--noise", "none", "--rirs", "none")
    download, prepare, look, decode, pack, train, extract, classify = dry_run(recipe, *options)
    script = str(ROOT / "egs" / task / "prepare.py")
    assert download == [script, "--download", "--data", "/d"]
    assert prepare == [script, "--data", "/d"]
    assert look[2:5] == ["check", "/d/train", "/d/test"]
    assert (decode[2], pack[2:4]) == ("check", ["pack", "/d/train"])
    layers = [Path(layer).relative_to(ROOT).as_posix() for layer in values_of("--config", train)]
    assert layers[1:] == [f"egs/{task}/conf.yaml", "conf/hardware/cpu.yaml"]
    assert extract[2:] == ["extract", "--exp", "/e", "--data", "/d/test", "--nproc", "1"]
    assert classify == ["-m", "speakerlab", "classify", "--exp", "/e", "--data", "/d/test"]


@every_task
def test_folders_are_apart_from_those_of_verification(task: Path) -> None:
    recipe, name = task.parts
    (train,) = dry_run(recipe, "--task", name, "--stage", "3", "--stop-stage", "3", "--seed", "4")
    (other,) = dry_run(recipe, "--stage", "3", "--stop-stage", "3", "--seed", "4")
    (exp,), (other_exp,) = values_of("--exp", train), values_of("--exp", other)
    assert exp == other_exp.replace("_s4", f"_{name}_s4")
    data = ROOT / "egs" / recipe
    assert values_of("--set", train)[0] == f"data.dir={data}/data_{name}"
    assert values_of("--set", other)[0] == f"data.dir={data}/data"


@every_task
@pytest.mark.parametrize("model", ["campplus", "eres2net", "ecapa_tdnn"])
def test_the_yaml_is_an_identification_with_any_model(task: Path, model: str) -> None:
    config = load_config([ROOT / f"conf/{model}.yaml", ROOT / "egs" / task / "conf.yaml"])
    assert (config.task, config.data.labels) == ("identification", "utt2lang")
    if config.head.name == "softmax":
        assert config.training.margin.initial == config.training.margin.final == 0


@pytest.mark.parametrize("recipe", [name for name in RECIPES if Path(name, "lid") not in TASKS])
def test_a_recipe_without_the_task_names_those_that_have_it(recipe: str) -> None:
    done = run(recipe, "--task", "lid", "--dry-run")
    assert (done.stdout, done.returncode) == ("", 1)
    names = " ".join(task.parent.name for task in TASKS)
    assert refused(done.stderr, "--task lid", recipe, names), done.stderr
