"""run.sh of every recipe: the commands that a dry run prints, and the refused options."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from refusals import refused

from speakerlab.config.layers import find_layer

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in ROOT.glob("egs/*/run.sh"))
VERIFYING = sorted(path.parent.name for path in ROOT.glob("egs/*/prepare.py"))
PUBLISHED = ["3dspeaker", "cnceleb", "voxblink2", "voxceleb"]
SCRIPTS = sorted(path.relative_to(ROOT / "egs") for path in ROOT.glob("egs/*/run*.sh"))
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=str)
every_verification = pytest.mark.parametrize("recipe", VERIFYING)

# Recipe -> its trial lists below data/test.
TRIALS = {
    "3dspeaker": [
        "trials_cross_device",
        "trials_cross_distance",
        "trials_cross_dialect",
    ],
    "cnceleb": ["trials_concat", "trials_average"],
    "librispeech": ["trials*"],  # one for each test subset
    "mini": ["trials"],
    "own": ["trials"],
    "voxblink2": ["trials_O", "trials_E", "trials_H"],
    "voxceleb": ["trials_O", "trials_E", "trials_H"],
}
# Recipe -> its test set, and what stage 4 trains on, where those are not its own.
TEST_DIRS = {"voxblink2": f"{ROOT}/egs/voxceleb/data/test"}
TUNED_ON = {"voxblink2": f"{ROOT}/egs/voxceleb/data/train"}
MEAN_AND_NORM = ["cosine", "mean+cosine", "mean+cosine+asnorm"]
BACKENDS = {
    **dict.fromkeys(PUBLISHED, MEAN_AND_NORM),
    "librispeech": [*MEAN_AND_NORM, "mean+cosine+asnorm+qmf"],
    "mini": ["cosine"],
    "own": ["cosine"],
}
# Recipe -> (data directory, option) of each extraction of stage 5.
TESTED = [("test", "")]
UNTRAINED = [("test", "--untrained")]
DEVELOPMENT = [("train", "--per-speaker")]
EXTRACTIONS = {
    **dict.fromkeys(PUBLISHED, TESTED + DEVELOPMENT),
    "librispeech": TESTED + UNTRAINED + DEVELOPMENT,
    "mini": TESTED + UNTRAINED,
    "own": TESTED + UNTRAINED,
}
# What is rejected in stage 1 without an error, where that is not nothing.
ALLOWED = {
    "own": ["0.05"],
    "voxblink2": ["0.01"],
    "voxceleb": ["0.001"],
}

# Commands of a dry run, as functions of a shell that print their words.
FUNCTIONS = """
show() { printf '%s\\t' "$@" && echo; }
speakerlab() { show speakerlab "$@"; }
python() { show python "$@"; }
bash() { show bash "$@"; }
"""


def run(
    script: str | Path, *options: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run run.sh of a recipe, or egs/`script`, with only PATH and `variables` as environment."""
    path = ROOT / "egs" / script
    if path.is_dir():
        path /= "run.sh"
    return subprocess.run(
        ["bash", path, *options],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
    )


def dry_run(script: str | Path, *options: str | Path) -> list[list[str]]:
    """Return the words of each command of a dry run."""
    done = run(script, "--dry-run", *options)
    assert done.stderr == ""
    assert done.returncode == 0
    read = subprocess.run(
        ["bash", "-c", FUNCTIONS + done.stdout],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = read.stdout.splitlines()
    # A tab follows every word, the last one too: an empty word is not lost.
    return [line.split("\t")[:-1] for line in lines]


def dry_stage(script: str | Path, stage: int, *options: str | Path) -> list[list[str]]:
    """Return the words of each command of one stage."""
    stages = ("--stage", str(stage), "--stop-stage", str(stage))
    return dry_run(script, *stages, *options)


def select(commands: list[list[str]], *names: str) -> list[list[str]]:
    """Return the commands of speakerlab with these names, in order."""
    return [command for command in commands if command[1] in names]


def values_of(option: str, command: Sequence[str]) -> list[str]:
    """Return the values of an option."""
    position = command.index(option)
    values = []
    for word in command[position + 1 :]:
        if word.startswith("--"):
            break
        values.append(word)
    return values


def layers_of(command: Sequence[str]) -> list[str]:
    """Return the layers of --config: names in conf/, and paths from the root."""
    layers = values_of("--config", command)
    return [layer.removeprefix(f"{ROOT}/") for layer in layers]


def names_of(paths: Sequence[str]) -> list[str]:
    """Return the last part of each path."""
    return [Path(path).name for path in paths]


# All commands of a run


@every_script
def test_a_dry_run_prints_every_stage_and_runs_nothing(script, tmp_path):
    # A recipe calls Python to find its environment; a dry run must not even do that.
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexit 1\n")
    python.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    # A trained model in the usual place would leave out a stage.
    done = run(script, "--dry-run", "--data", "/d", "--exp", "/e", PATH=path)
    assert done.stderr == ""
    assert done.returncode == 0
    assert not (tmp_path / "called").exists()

    has_training = script.parent.name in VERIFYING or script.stem != "run"
    stages = [0, 1, 2, 3, 5, 6] if has_training else [0, 1, 2, 5, 6]
    if script.stem == "run_pretrained":
        stages = [0, 1, 2, 3, 4, 5, 6]
    lines = done.stdout.splitlines()
    titles = [line for line in lines if line.startswith("# stage")]
    assert len(titles) == len(stages)
    for title, stage in zip(titles, stages):
        assert title.startswith(f"# stage {stage}:")


@every_script
def test_every_command_is_one_of_speakerlab_or_a_script_of_the_recipe(script):
    recipe = ROOT / "egs" / script.parent
    for command in dry_run(script):
        program, name = command[:2]
        if program == "speakerlab":
            assert (ROOT / f"speakerlab/bin/{name}.py").is_file(), command
        else:
            assert program in ("python", "bash")
            assert Path(name).is_relative_to(recipe)
            assert Path(name).is_file()


@every_verification
def test_the_commands_name_the_right_files(recipe, tmp_path):
    data = tmp_path / "my data"
    exp = tmp_path / "my exp"
    options = ("--data", data, "--exp", exp, "--seed=7")
    training = ("--hardware", "cpu", "--large-margin", "true")
    sources = ["--noise", "/my noise", "--rirs", "none"]
    commands = dry_run(recipe, *options, *training, *sources)
    download, prepare, check, pack, decode, train, tune, *_ = commands

    script = str(ROOT / "egs" / recipe / "prepare.py")
    place = ["--data", str(data)]
    assert download == ["python", script, "--download", *sources, *place]
    assert prepare[:8] == ["python", script, *sources, *place]

    rate = ["--sample-rate", "16000"]
    train_dir = f"{data}/train"
    test_dir = TEST_DIRS.get(recipe, f"{data}/test")
    noise_dir = f"{data}/noise"
    folders = [train_dir, test_dir, noise_dir]
    assert check[:7] == ["speakerlab", "check", *folders, *rate]
    expected = []
    if recipe in ALLOWED:
        expected = ["--allow-rejected", *ALLOWED[recipe]]
    assert check[7:] == expected

    # The training set is decoded when it is packed; the other sets only here.
    assert decode[:2] == ["speakerlab", "check"]
    assert sorted(decode[2:4]) == sorted([test_dir, noise_dir])
    assert decode[4:7] == [*rate, "--decode"]
    assert pack[:3] == ["speakerlab", "pack", train_dir]
    assert pack[3:5] == ["--codec", "pcm"]
    assert pack[5:7] == rate

    settings = [f"data.dir={data}", "seed=7", "augment.room_prob=0"]
    for command in (train, tune):
        assert command[:2] == ["speakerlab", "train"]
    assert values_of("--set", train) == settings
    if recipe in TUNED_ON:
        settings.append(f'data.train=[{{dir: "{TUNED_ON[recipe]}"}}]')
    assert values_of("--set", tune) == settings
    assert values_of("--exp", train) == [str(exp)]
    assert "--init" not in train
    assert values_of("--exp", tune) == [f"{exp}-lm"]
    assert values_of("--init", tune) == [f"{exp}/model"]


@every_verification
def test_each_system_is_tested_with_the_right_files(recipe):
    options = ("--stage", "5", "--large-margin", "true")
    commands = dry_run(recipe, *options, "--data", "/my data", "--exp", "/my exp")
    *extract, score, score_tuned = commands
    test_dir = TEST_DIRS.get(recipe, "/my data/test")
    # System -> what it was trained on.
    trained_on = {
        "/my exp": "/my data/train",
        "/my exp-lm": TUNED_ON.get(recipe, "/my data/train"),
    }
    for system, train_dir in trained_on.items():
        folders = {"test": test_dir, "train": train_dir}
        extractions = []
        for command in extract:
            if values_of("--exp", command) == [system]:
                extractions.append(command)
        assert len(extractions) == len(EXTRACTIONS[recipe])
        for command, (name, option) in zip(extractions, EXTRACTIONS[recipe]):
            assert values_of("--data", command) == [folders[name]]
            for special in ("--untrained", "--per-speaker"):
                assert (special in command) == (special == option)

    lists = [f"{test_dir}/{name}" for name in TRIALS[recipe]]
    for command, system in ((score, "/my exp"), (score_tuned, "/my exp-lm")):
        assert command[:2] == ["speakerlab", "score"]
        assert command[2:4] == ["--exp", system]
        assert values_of("--trials", command) == lists
        assert values_of("--backend", command) == BACKENDS[recipe]
        # All back ends but the cosine learn a mean, a cohort or a fusion.
        learns = len(BACKENDS[recipe]) > 1
        assert ("--development" in command) == learns
        if learns:
            assert values_of("--development", command) == [trained_on[system]]


@every_verification
@pytest.mark.parametrize("model", ["", "campplus", "resnet34", "eres2netv2"])
def test_layers_are_the_model_the_recipe_its_own_and_the_hardware(recipe, model):
    options = ("--hardware", "cpu", "--large-margin", "true")
    if model:
        options += ("--model", model)
    commands = dry_run(recipe, *options)
    train, tune = select(commands, "train")

    name, *layers, hardware = layers_of(train)
    assert name == (model or name)
    expected = [f"egs/{recipe}/conf.yaml"]
    layer = f"egs/{recipe}/conf/{name}.yaml"
    has_layer = (ROOT / layer).is_file()
    if recipe in PUBLISHED and has_layer:
        expected.append(layer)
    assert layers == expected
    assert find_layer(Path(hardware)).file == ROOT / "conf/hardware/cpu.yaml"

    # Fine-tuning adds one layer between those of the training and the hardware, on another corpus
    # a second one.
    *before, tuning, last = layers_of(tune)
    if recipe == "voxblink2":
        assert tuning == "egs/voxblink2/voxceleb2.yaml"
        *before, tuning = before
    assert before == [name, *layers]
    assert last == hardware
    assert tuning.startswith("finetune/large_margin")

    for command in (train, tune):
        for layer in values_of("--config", command):
            assert find_layer(Path(layer)).file.is_file(), layer


def test_a_published_fine_tuning_overrides_the_general_one():
    training = ("--large-margin", "true", "--hardware", "cpu")
    commands = dry_run("cnceleb", "--model", "resnet34", *training)
    _, tune = select(commands, "train")
    assert layers_of(tune)[:4] == [
        "resnet34",
        "egs/cnceleb/conf.yaml",
        "egs/cnceleb/conf/resnet34.yaml",
        "finetune/large_margin_wespeaker",
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_complete(recipe):
    files = {"run.sh", "README.md"}
    if recipe in VERIFYING:
        files |= {"prepare.py", "conf.yaml"}
    else:
        files |= {"diar"}
    folder = ROOT / "egs" / recipe
    assert files <= {path.name for path in folder.iterdir()}


@every_script
def test_a_script_can_be_started_by_its_name_and_by_sh(script):
    path = ROOT / "egs" / script
    assert os.access(path, os.X_OK)
    command = ["sh", str(path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


# Stages of their own


def test_a_published_fine_tuning_that_is_there_is_extracted_and_scored(tmp_path):
    exp = tmp_path / "exp"
    (tmp_path / "exp-lm/model").mkdir(parents=True)
    commands = dry_run("mini", "--stage", "5", "--exp", exp)
    *extract, score, score_tuned = commands

    system = [str(exp)]
    tuned = [f"{exp}-lm"]
    systems = [values_of("--exp", command) for command in extract]
    assert systems == [system, system, tuned, tuned]
    assert values_of("--exp", score) == system
    assert values_of("--exp", score_tuned) == tuned


def test_stage_4_runs_when_asked_for_by_number():
    train, *rest = dry_run("mini", "--stage", "4", "--exp", "/e")
    assert values_of("--exp", train) == ["/e-lm"]
    names = [command[1] for command in rest]
    assert names == ["extract"] * 4 + ["score"] * 2


def test_stage_2_stores_the_features_of_the_layers_that_are_trained_with():
    stages = ("--stage", "2", "--stop-stage", "3")
    features = ("--features", "fbank", "--model", "eres2net")
    setting = "frontend.num_mel_bins=64"
    commands = dry_run("mini", *stages, *features, "--set", setting)
    pack, decode, train = commands

    assert decode[1] == "check"
    assert values_of("--features", pack) == ["fbank"]
    assert layers_of(pack)[-1] == "features/fbank"
    assert layers_of(pack) == layers_of(train)
    settings = values_of("--set", pack)
    assert settings[-1] == setting
    assert settings == values_of("--set", train)
    exp = ROOT / "egs/mini/exp/eres2net_fbank_s0"
    assert values_of("--exp", train) == [str(exp)]


def test_another_sample_rate_reaches_every_command_that_reads_audio():
    options = ("--stop-stage", "2", "--set", "frontend.sample_rate=8000")
    commands = dry_run("mini", *options)
    reading = select(commands, "check", "pack")
    assert len(reading) == 3
    for command in reading:
        assert values_of("--sample-rate", command) == ["8000"]


def test_a_job_of_stage_2_packs_its_part():
    pack, _ = dry_stage("mini", 2, "--codec", "flac", "--job", "3/3")
    assert values_of("--job", pack) == ["3/3"]
    assert values_of("--codec", pack) == ["flac"]


def test_a_job_of_stage_5_extracts_its_part_and_waits_for_nobody():
    commands = dry_stage("mini", 5, "--job", "2/3")
    assert len(commands) == 2
    for command in commands:
        assert values_of("--job", command) == ["2/3"]
        assert "--wait-minutes" not in command


# Values of options


def test_values_of_set_are_passed_on_unchanged():
    values = ["training.lr=0.2", "a.b=[1, 2]", 'c.d=it\'s $HOME `x` \\ "q" *']
    options = ("--set", *values, "--seed", "3", "--set=e.f=g")
    (train,) = dry_stage("mini", 3, *options)
    _, *settings = values_of("--set", train)
    assert settings == ["seed=3", *values, "e.f=g"]


@pytest.mark.parametrize(
    "folder",
    [
        "with blank",
        "with'quote",
        "$(touch x)",
        "a&b",
        "Ünï",
        "-- x",
        "*",
        "-d 'x' [y]{z}",
    ],
)
def test_odd_folders_stay_one_word(tmp_path, folder):
    path = tmp_path / folder
    path.mkdir()
    commands = dry_run("mini", "--corpus", path, "--data", path)
    prepare = commands[1]
    score = commands[-1]
    assert values_of("--corpus", prepare) == [f"{tmp_path}/{folder}"]
    assert values_of("--trials", score) == [f"{tmp_path}/{folder}/test/trials"]


def test_relative_folders_are_those_of_the_user(tmp_path):
    options = ["--stage", "6", "--exp", "a/b", "--data", "d"]
    command = ["bash", ROOT / "egs/mini/run.sh", "--dry-run", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert f"--exp {tmp_path}/a/b --trials {tmp_path}/d/test/trials" in done.stdout


def test_a_recipe_runs_from_any_folder_with_any_cdpath(tmp_path):
    # With CDPATH, `cd egs/mini` may change to another folder and print its name.
    (tmp_path / "egs/mini").mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"],
        "CDPATH": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "egs/mini/run.sh", "--dry-run"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert str(tmp_path) not in done.stdout
    assert f"--data {ROOT}/egs/mini/data" in done.stdout


def test_the_initial_model_may_be_a_published_one():
    (train,) = dry_stage("mini", 3, "--init", "hub:campplus-zh-200k")
    assert values_of("--init", train) == ["hub:campplus-zh-200k"]


def test_own_recordings_are_named_after_a_published_model():
    for model in (
        "hub:campplus-zh-200k",
        f"hub:campplus-zh-200k@sha256:{64 * 'a'}",
        "hf:ann/campplus-zh-200k@v1.0",
    ):
        (train,) = dry_stage("own", 3, "--init", model)
        exp = ROOT / "egs/own/exp/campplus-zh-200k_own_data_s0"
        assert values_of("--exp", train) == [str(exp)]


def test_own_recordings_are_trained_with_the_configuration_of_the_initial_model():
    model = "/m/campplus_s0/model"
    (train,) = dry_stage("own", 3, "--init", f"{model}/", "--exp", "/e")
    assert values_of("--init", train) == ["/m/campplus_s0/model"]
    assert layers_of(train) == [
        "/m/campplus_s0/model/config.yaml",
        "egs/own/conf.yaml",
        "finetune/own_data",
    ]
    (train,) = dry_stage("own", 3, "--init", model)
    exp = ROOT / "egs/own/exp/campplus_s0_own_data_s0"
    assert values_of("--exp", train) == [str(exp)]


def test_hardware_may_be_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.touch()
    (train,) = dry_stage("mini", 3, "--hardware", file)
    assert layers_of(train)[-1] == str(file)


@pytest.mark.parametrize("option", [("--gpus", ""), ("--hardware", "cpu")])
def test_the_cpu_can_be_chosen(option):
    commands = dry_run("mini", *option)
    using_a_device = select(commands, "train", "extract", "score")
    assert len(using_a_device) == 4
    for command in using_a_device:
        assert values_of("--gpus", command) == [""]


def test_parts_from_a_folder_reach_every_training(tmp_path):
    (train,) = dry_stage("mini", 3, "--plugins", tmp_path)
    assert values_of("--plugins", train) == [str(tmp_path)]


# Noise and rooms

NO_NOISE = "augment.noise_prob=0"
NO_ROOMS = "augment.room_prob=0"


def augmentation(recipe: str, *options: str | Path) -> list[str]:
    """Return the settings of augmentation of stage 3."""
    (train,) = dry_stage(recipe, 3, *options)
    settings = values_of("--set", train)
    return [value for value in settings if value.startswith("augment.")]


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_noise_is_searched_or_downloaded_by_default(recipe):
    download, prepare, check, *_ = dry_run(recipe)
    for command in (download, prepare):
        assert values_of("--noise", command) == ["auto"]
        assert values_of("--rirs", command) == ["auto"]
    assert names_of(check[2:6]) == ["train", "test", "noise", "rirs"]
    assert augmentation(recipe) == []


@pytest.mark.parametrize("recipe", ["librispeech", "own"])
def test_noise_is_not_used_by_default_unless_stage_1_has_prepared_it(recipe, tmp_path):
    download, prepare, check, *_ = dry_run(recipe)
    for command in (download, prepare):
        assert values_of("--noise", command) == ["none"]
        assert values_of("--rirs", command) == ["none"]
    assert names_of(check[2:4]) == ["train", "test"]
    assert check[4] == "--sample-rate"
    assert augmentation(recipe) == [NO_NOISE, NO_ROOMS]

    (tmp_path / "noise").mkdir()
    assert augmentation(recipe, "--data", tmp_path) == [NO_ROOMS]
    options = ("--noise", "x", "--rirs", "none")
    assert augmentation(recipe, *options) == [NO_ROOMS]


@pytest.mark.parametrize("script", ["mini/run.sh", "mini/run_lid.sh"])
def test_noise_of_mini_is_made_with_its_corpus(script):
    download, prepare, check, *_ = dry_run(script)
    for command in (download, prepare):
        assert "--noise" not in command
        assert "--rirs" not in command
    assert names_of(check[2:6]) == ["train", "test", "noise", "rirs"]
    assert augmentation(script) == []


@every_verification
def test_without_noise_the_probabilities_are_zero(recipe):
    options = ("--noise", "none", "--rirs", "none")
    assert augmentation(recipe, *options) == [NO_NOISE, NO_ROOMS]


@pytest.mark.parametrize("recipe", ["3dspeaker", "cnceleb", "librispeech", "own"])
def test_with_a_corpus_only_missing_noise_is_downloaded(recipe):
    download, prepare, *_ = dry_run(recipe, "--corpus", "/c")
    assert download[2] == "--download-noise"
    assert values_of("--corpus", download) == ["/c"]
    assert values_of("--corpus", prepare) == ["/c"]


# Folds of speakers


def test_folds_repeat_the_recipe_without_the_speakers_of_each():
    options = ("--folds", "2", "--init", "/m", "--data", "/d", "--exp", "/e")
    own = ("--noise", "/n", "--set", "data.valid_speakers=1")
    commands = dry_run("own", *options, *own)
    trainings = select(commands, "train")
    exps = [values_of("--exp", command) for command in trainings]
    assert exps == [["/e-fold1"], ["/e-fold2"], ["/e"]]
    for training, folder in zip(trainings, ("fold1", "fold2", "all")):
        settings = values_of("--set", training)
        assert f"data.dir=/d/{folder}" in settings
        # All speakers train, unless the user wants others.
        assert settings.index("data.valid_speakers=0") < settings.index(own[-1])
        assert "augment.noise_prob=0" not in settings
    tested = [values_of("--data", command) for command in select(commands, "extract")]
    assert tested == [["/d/fold1/test"]] * 2 + [["/d/fold2/test"]] * 2
    (comparison,) = select(commands, "compare")
    assert values_of("--trials", comparison)[0] == "/d/all/test/trials"


@pytest.mark.parametrize(
    ("stages", "trainings"), [((0, 1), 0), ((0, 2), 0), ((3, 3), 3), ((5, 6), 0)]
)
def test_folds_keep_to_the_stages_that_are_asked_for(stages, trainings):
    first, last = map(str, stages)
    options = ("--folds", "2", "--init", "/m", "--stage", first, "--stop-stage", last)
    commands = dry_run("own", *options)
    assert len(select(commands, "train")) == trainings
    packed = (
        2 + 1 + 1 if stages == (0, 2) else 0
    )  # the folds, all, and before the split
    assert len(select(commands, "pack")) == packed
    assert len(select(commands, "extract", "compare")) == (5 if last == "6" else 0)


# Ranks and hosts


def test_ranks_of_one_host_are_options_of_the_commands():
    commands = dry_run("mini", "--gpus", "2,3")
    for command in select(commands, "train", "extract", "score"):
        assert values_of("--gpus", command) == ["2,3"]

    (train,) = dry_stage("mini", 3, "--gpus", "0 1", "--nproc", "2")
    assert values_of("--gpus", train) == ["0 1"]
    assert values_of("--nproc", train) == ["2"]
    assert "--nnodes" not in train


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_several_hosts(rank):
    group = {
        "--nnodes": "2",
        "--node-rank": str(rank),
        "--rdzv": "10.0.0.1:29400",
        "--nproc": "4",
    }
    options = [word for option in group.items() for word in option]
    commands = dry_run("mini", *options)
    is_first = rank == 0
    # The other hosts only train and extract.
    assert len(commands) == (9 if is_first else 3)

    (train,) = select(commands, "train")
    for option, value in group.items():
        assert values_of(option, train) == [value]

    extract = select(commands, "extract")
    assert len(extract) == 2
    for command in extract:
        assert values_of("--job", command) == [f"{rank + 1}/2"]
        assert ("--wait-minutes" in command) == is_first
        assert "--nnodes" not in command


# Refused options; those of every recipe are tested in test_recipe_setup.py.

REFUSED = {  # options of mini -> subject of the message, values that it names
    "--modle campplus": ("run.sh", "--modle", "--model"),
    "--epochs 3": ("run.sh", "--epochs; see --help"),
    "--seed -1": ("--seed", "0-4294967295", -1),
    "--features mfcc": ("--features", "wave|fbank", "mfcc"),
    "--codec mp3": ("--codec", "pcm|flac", "mp3"),
    "--task asr": ("--task", "sv|ssl|distil|lid|diar", "asr"),
    "--task diar --nnodes 2 --node-rank 0 --rdzv a:1": (
        "--job, --nnodes",
        "--task diar",
    ),
    "--task diar --stage 5 --stop-stage 5 --job 1/2": (
        "--job, --nnodes",
        "--task diar",
    ),
    "--task diar --init X --large-margin true": ("--large-margin, --stage 4", "--init"),
    "--task diar --init X --stage 4": ("--large-margin, --stage 4", "--init"),
    "--task lid --large-margin true": ("run_lid.sh", "--large-margin"),
    "--method sdpn": ("--method sdpn", "--task ssl"),
    "--task ssl --method moco": ("--method", "moco", "sdpn"),
    "--task ssl --stage 4": ("--large-margin, --stage 4", "--task ssl"),
    "--task ssl --large-margin true": ("--large-margin, --stage 4", "--task ssl"),
}


@pytest.mark.parametrize(
    "options",
    [
        "--folds 5",
        "--folds 5 --init M --task ssl",
        "--folds 5 --init M --large-margin true",
        "--folds 5 --init M --stage 2 --stop-stage 2 --job 1/2",
        "--folds 5 --init M --nnodes 2 --node-rank 0 --rdzv a:1",
    ],
)
def test_folds_need_a_model_and_one_host(options):
    done = run("own", *options.split(), "--dry-run")
    assert done.stdout == ""
    assert done.returncode == 1
    assert refused(done.stderr, "--folds", "--init")


def test_an_initial_model_has_its_own_settings():
    done = run("own", "--init", "/m", "--model", "eres2net", "--dry-run")
    assert done.returncode == 1
    assert refused(done.stderr, "--model eres2net", "--init")
    # Without labels, the settings are not those of the initial model.
    options = ("--init", "/m", "--model", "eres2net", "--task", "ssl")
    (train,) = dry_stage("own", 3, *options)
    assert layers_of(train)[0] == "eres2net"


@pytest.mark.parametrize("options", REFUSED)
def test_wrong_options_are_refused_in_one_line(options):
    done = run("mini", *options.split(), "--dry-run")
    assert done.stdout == ""
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert refused(done.stderr, *REFUSED[options]), done.stderr


def test_a_wrong_model_is_refused_before_any_work(tmp_path):
    options = ("--model", "ERes2Nett")
    folders = ("--data", tmp_path / "data", "--exp", tmp_path / "exp")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run("mini", *options, *folders, PATH=path)
    assert done.stdout == "", done.stderr
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert refused(done.stderr, "ERes2Nett", "did you mean eres2net?")
    assert [*tmp_path.iterdir()] == []


@every_script
def test_every_training_is_checked_before_the_first_stage(script):
    text = (ROOT / "egs" / script).read_text()
    if "run speakerlab train" in text:
        check = text.index("\ncheck_training ")
        assert check < text.index("if stage 0")


@every_script
def test_help_begins_with_what_the_recipe_is_for(script):
    text = (ROOT / "egs" / script).read_text()
    second_line = text.splitlines()[1]
    first_line, *lines = run(script, "--help").stdout.splitlines()
    assert first_line == second_line.removeprefix("# ")
    assert any(line.startswith("  bash egs/") for line in lines[:4])


def test_default_values_are_accepted():
    assert dry_run("mini", "--features", "wave", "--task", "sv")
