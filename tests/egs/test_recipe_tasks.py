"""`--task`: the stages of a task other than speaker verification."""

from pathlib import Path

import pytest
from refusals import refused
from test_recipes import RECIPES, ROOT, VERIFYING, dry_run, extractions, run, values_of

from speakerlab.config.schema import load_config

TASKS = sorted(path.parent.relative_to(ROOT / "egs") for path in ROOT.glob("egs/*/lid/prepare.py"))
METHODS = sorted(path.stem for path in ROOT.glob("conf/ssl/*.yaml"))
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


def test_diarization_uses_the_model_of_verification(tmp_path: Path) -> None:
    options = ("--task", "diar", "--hardware", "cpu", "--noise", "none", "--rirs", "none")
    data, exp = tmp_path / "data", tmp_path / "exp"
    options = (*options, "--data", str(data), "--exp", str(exp))
    download, prepare, look, decode, *rest = dry_run("mini", *options)
    script = str(ROOT / "egs/mini/diar/prepare.py")
    assert download == [script, "--download", "--data", str(data)]
    assert prepare == [script, "--data", str(data)]
    assert look[2:5] == ["check", f"{data}/dev", f"{data}/test"]
    assert decode[2:5] == look[2:5] and "--decode" in decode
    verification = ("--exp", str(exp), *options[2:8], "--stop-stage", "3")
    assert rest[:-9] == dry_run("mini", *verification)

    (exp / "model").mkdir(parents=True)
    (data / "dev").mkdir(parents=True)
    (data / "dev/wav.scp").write_text("a /x/a.wav\nb /x/b c.wav\n")
    *_, learn, oracle, energy, _, _, score, _, _, _ = words = dry_run("mini", *options)
    assert words[:4] == [download, prepare, look, decode] and len(words) == 4 + 9
    assert learn[2:] == [
        *("calibrate", "--for", "diarization", "--model", str(exp), "--data", f"{data}/dev"),
        *("--out", str(exp), "--force"),
    ]
    files = ["/x/a.wav", "/x/b c.wav"]
    assert oracle[2:] == [
        *("diarize", *files, "--model", str(exp), "--vad", f"{data}/dev/ref.rttm"),
        *("--out", f"{exp}/diarization/dev/oracle"),
    ]
    assert energy[2:] == [
        *("diarize", *files, "--model", str(exp), "--vad", "energy"),
        *("--out", f"{exp}/diarization/dev/energy"),
    ]
    assert score[2:5] == ["der", f"{data}/dev/ref.rttm", f"{exp}/diarization/dev/oracle"]


@pytest.mark.parametrize("recipe", ["voxconverse", "ami"])
def test_a_given_model_diarizes(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/ref.uem").touch()
    options = ("--init", "/m/campplus_s0/model", "--data", str(tmp_path))
    commands = dry_run(recipe, *options)
    assert [w[0] == str(ROOT / "egs" / recipe / "diar/prepare.py") for w in commands[:2]] == [
        True
    ] * 2
    kinds = ["check"] * 2 + ["calibrate"] + ["diarize"] * 4 + ["der"] * 4
    assert [words[2] for words in commands[2:]] == kinds
    exp = ROOT / "egs" / recipe / "exp/campplus_s0"
    assert values_of("--model", commands[4]) == ["/m/campplus_s0/model"]
    assert values_of("--out", commands[4]) == values_of("--model", commands[5]) == [str(exp)]
    assert values_of("--out", commands[5]) == [f"{exp}/diarization/dev/oracle"]
    assert values_of("--uem", commands[9]) == [f"{tmp_path}/dev/ref.uem"]
    assert "--uem" not in commands[11]
    assert values_of("--data", commands[9]) == [f"{tmp_path}/dev"]
    (first, *_) = [words for words in dry_run(recipe) if "calibrate" in words]
    assert values_of("--model", first) == ["hub:voxceleb_resnet34_LM"]


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


@pytest.mark.parametrize("recipe", VERIFYING)
@pytest.mark.parametrize("method", METHODS)
def test_without_labels_only_training_and_back_ends_differ(recipe: str, method: str) -> None:
    options = ("--hardware", "cpu", "--noise", "none", "--rirs", "none", "--seed", "4")
    *others, score = dry_run(recipe, *options)
    commands = dry_run(recipe, *options, "--task", "ssl", "--method", method)
    assert commands[:5] == others[:5]  # the data directories
    model = values_of("--config", others[5])[0]
    exp = values_of("--exp", others[5])[0].replace("_s4", f"_{method}_s4")
    own = ROOT / "egs" / recipe / "conf"
    names = ("ssl", method, f"{Path(model).stem}_{method}")
    *layers, hardware = values_of("--config", others[5])
    assert values_of("--config", commands[5]) == [
        *(*layers, str(ROOT / f"conf/ssl/{method}.yaml")),
        *(str(own / f"{name}.yaml") for name in names if (own / f"{name}.yaml").is_file()),
        hardware,
    ]
    assert values_of("--set", commands[5]) == values_of("--set", others[5])
    assert "--init" not in commands[5]
    extracted = [Path(*values_of("--data", words)).name for words in commands[6:-1]]
    assert extracted == [name for name, _ in extractions(recipe) if name == "test"]
    assert {*values_of("--exp", commands[-1]), *values_of("--exp", commands[5])} == {exp}
    assert values_of("--trials", commands[-1]) == values_of("--trials", score)
    assert values_of("--backend", commands[-1]) == ["cosine"]
    assert "--development" not in commands[-1]


@pytest.mark.parametrize(("recipe", "method"), [("librispeech", "dino"), ("own", "simclr")])
def test_a_method_is_the_default(recipe: str, method: str) -> None:
    options = ("--task", "ssl", "--hardware", "cpu")
    assert dry_run(recipe, *options) == dry_run(recipe, *options, "--method", method)


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {*VERIFYING}))
def test_a_recipe_without_training_data_names_those_that_have_it(recipe: str) -> None:
    for task in ("ssl", "sv"):
        done = run(recipe, "--task", task, "--dry-run")
        assert (done.stdout, done.returncode) == ("", 1)
        assert refused(done.stderr, f"--task {task}", recipe, " ".join(VERIFYING)), done.stderr


@pytest.mark.parametrize("recipe", [name for name in RECIPES if Path(name, "lid") not in TASKS])
def test_a_recipe_without_the_task_names_those_that_have_it(recipe: str) -> None:
    done = run(recipe, "--task", "lid", "--dry-run")
    assert (done.stdout, done.returncode) == ("", 1)
    names = " ".join(task.parent.name for task in TASKS)
    assert refused(done.stderr, "--task lid", recipe, names), done.stderr
