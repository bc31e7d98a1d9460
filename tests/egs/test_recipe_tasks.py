"""`--task`: tasks other than speaker verification with labels, and the scripts of their stages."""

from pathlib import Path

import pytest
from refusals import refused
from test_recipes import (
    EXTRACTIONS,
    RECIPES,
    ROOT,
    VERIFYING,
    dry_run,
    dry_stage,
    layers_of,
    names_of,
    run,
    select,
    values_of,
)

from speakerlab.config.schema import load_config

LID = sorted(path.parents[1].name for path in ROOT.glob("egs/*/lid/prepare.py"))
METHODS = sorted(path.stem for path in ROOT.glob("conf/ssl/*.yaml"))
SILENT = ("--noise", "none", "--rirs", "none")
# A recipe and a task that has a script of its own.
HANDED_OVER = [(recipe, "lid") for recipe in LID]
HANDED_OVER.append(("mini", "diar"))
# Of stages 5 and 6: dev and test, each with the true and with detected regions of speech.
DIARIZATION = ["calibrate"] + ["diarize"] * 4 + ["der"] * 4
RUN_SH_OF_MINI = str(ROOT / "egs/mini/run.sh")

with_lid = pytest.mark.parametrize("recipe", LID)
MEETINGS = ["aishell4", "alimeeting", "ami", "voxconverse"]
of_diarization_only = pytest.mark.parametrize("recipe", MEETINGS)


def kinds_of(commands: list[list[str]]) -> list[str]:
    """Return the name of each command of speakerlab."""
    return [command[1] for command in commands]


# Language identification


@with_lid
def test_language_identification_has_its_data_its_layers_and_its_scores(recipe):
    options = ("--data", "/d", "--exp", "/e", "--hardware", "cpu", *SILENT)
    commands = dry_run(f"{recipe}/run_lid.sh", *options)
    download, prepare, check, pack, decode, train, extract, classify = commands
    script = str(ROOT / f"egs/{recipe}/lid/prepare.py")
    assert download[:3] == ["python", script, "--download"]
    assert prepare[:2] == ["python", script]
    assert prepare[-2:] == ["--data", "/d"]
    for command in (download, prepare):
        assert values_of("--noise", command) == ["none"]
        assert values_of("--rirs", command) == ["none"]
    assert check[1:4] == ["check", "/d/train", "/d/test"]
    assert pack[1:3] == ["pack", "/d/train"]
    assert decode[1:3] == ["check", "/d/test"]
    assert "--decode" in decode
    assert layers_of(train)[1] == f"egs/{recipe}/lid/conf.yaml"
    assert len(layers_of(train)) == 3
    places = ["--exp", "/e", "--data", "/d/test", "--gpus", ""]
    assert extract == ["speakerlab", "extract", *places]
    assert classify == ["speakerlab", "classify", *places]


@pytest.mark.parametrize(("recipe", "task"), HANDED_OVER)
def test_run_sh_hands_a_task_over_with_all_options(recipe, task):
    model = ("--model", "eres2net", "--seed", "3")
    options = (*model, "--set", "training.lr=0.1", "--data", "a b")
    expected = dry_run(f"{recipe}/run_{task}.sh", *options)
    assert dry_run(recipe, "--task", task, *options) == expected
    assert dry_run(recipe, *options, f"--task={task}") == expected


@with_lid
def test_folders_are_apart_from_those_of_verification(recipe):
    (train,) = dry_stage(recipe, 3, "--task", "lid", "--seed", "4")
    (verification,) = dry_stage(recipe, 3, "--seed", "4")

    (exp,) = values_of("--exp", train)
    (verification_exp,) = values_of("--exp", verification)
    assert exp == verification_exp.replace("_s4", "_lid_s4")

    folder = ROOT / "egs" / recipe
    assert values_of("--set", train)[0] == f"data.dir={folder}/data_lid"
    assert values_of("--set", verification)[0] == f"data.dir={folder}/data"


@with_lid
@pytest.mark.parametrize("model", ["campplus", "eres2net", "ecapa_tdnn"])
def test_the_yaml_is_an_identification_with_any_model(recipe, model):
    layers = [ROOT / f"conf/{model}.yaml", ROOT / f"egs/{recipe}/lid/conf.yaml"]
    config = load_config(layers)
    assert config.task == "identification"
    assert config.data.labels == "utt2lang"
    if config.head.name == "softmax":
        # A softmax head has no margin.
        assert config.training.margin.initial == 0
        assert config.training.margin.final == 0


# Diarization


def test_diarization_trains_the_model_of_verification(tmp_path):
    data = tmp_path / "data"
    exp = tmp_path / "exp"
    options = ("--hardware", "cpu", *SILENT, "--exp", exp)
    commands = dry_run("mini/run_diar.sh", *options, "--data", data)
    download, prepare, check, decode, train, *rest = commands

    script = str(ROOT / "egs/mini/diar/prepare.py")
    assert download == ["python", script, "--download", "--data", str(data)]
    assert prepare == ["python", script, "--data", str(data)]
    assert check[1:4] == ["check", f"{data}/dev", f"{data}/test"]
    assert decode == [*check, "--decode"]
    assert kinds_of(rest) == DIARIZATION

    # The model is trained by run.sh of verification, with its own data.
    assert train[:2] == ["bash", RUN_SH_OF_MINI]
    verification = dry_run("mini", *train[2:])
    expected = dry_stage("mini", 3, *options)
    assert select(verification, "train") == expected


def test_diarization_uses_the_model_of_verification(tmp_path):
    data = tmp_path / "data"
    exp = tmp_path / "exp"
    options = ("--hardware", "cpu", *SILENT, "--data", data, "--exp", exp)
    commands_without_model = dry_run("mini/run_diar.sh", *options)
    (exp / "model").mkdir(parents=True)
    (data / "dev").mkdir(parents=True)
    (data / "dev/wav.scp").write_text("a /x/a.wav\nb /x/b c.wav\n")
    commands = dry_run("mini/run_diar.sh", *options)

    # The model exists: nothing is trained.
    assert commands[:4] == commands_without_model[:4]
    assert kinds_of(commands[4:]) == DIARIZATION
    calibration, oracle, energy = commands[4:7]
    score = commands[9]

    assert calibration[1:] == [
        "calibrate",
        "--for",
        "diarization",
        "--model",
        str(exp),
        "--data",
        f"{data}/dev",
        "--out",
        str(exp),
        "--force",
        "--gpus",
        "",
    ]
    files = ["/x/a.wav", "/x/b c.wav"]
    diarize = ["diarize", *files, "--model", str(exp), "--vad"]
    folder = f"{exp}/diarization/dev"
    places = ["--out", f"{folder}/oracle", "--gpus", ""]
    expected = [*diarize, f"{data}/dev/ref.rttm", *places]
    assert oracle[1:] == expected
    places = ["--out", f"{folder}/energy", "--gpus", ""]
    expected = [*diarize, "energy", *places]
    assert energy[1:] == expected
    expected = ["der", f"{data}/dev/ref.rttm", f"{folder}/oracle"]
    assert score[1:4] == expected


def test_diarization_with_a_fine_tuned_model_is_done_with_both(tmp_path):
    exp = tmp_path / "exp"
    commands = dry_run("mini/run_diar.sh", "--large-margin", "true", "--exp", exp)
    systems = [str(exp), f"{exp}-lm"]
    (training,) = select(commands, RUN_SH_OF_MINI)
    assert values_of("--stop-stage", training) == ["4"]

    verification = dry_run("mini", *training[2:])
    trainings = select(verification, "train")
    calibrations = select(commands, "calibrate")
    assert len(trainings) == len(calibrations) == 2
    for system, train, calibration in zip(systems, trainings, calibrations):
        assert values_of("--exp", train) == [system]
        assert values_of("--out", calibration) == [system]


@of_diarization_only
def test_a_given_model_diarizes(recipe, tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/ref.uem").touch()
    model = "/m/campplus_s0/model"
    options = ("--init", model, "--data", tmp_path)
    download, prepare, *commands = dry_run(recipe, *options)

    script = str(ROOT / "egs" / recipe / "diar/prepare.py")
    assert download[:3] == ["python", script, "--download"]
    assert prepare[:2] == ["python", script]
    assert kinds_of(commands[:2]) == ["check", "check"]
    assert kinds_of(commands[2:]) == DIARIZATION

    calibration, oracle = commands[2:4]
    exp = ROOT / "egs" / recipe / "exp/campplus_s0"
    assert values_of("--model", calibration) == [model]
    assert values_of("--out", calibration) == [str(exp)]
    assert values_of("--model", oracle) == [str(exp)]
    assert values_of("--out", oracle) == [f"{exp}/diarization/dev/oracle"]

    score_dev = commands[7]
    score_test = commands[9]
    assert values_of("--data", score_dev) == [f"{tmp_path}/dev"]
    assert values_of("--uem", score_dev) == [f"{tmp_path}/dev/ref.uem"]
    assert "--uem" not in score_test  # there is no test/ref.uem


@of_diarization_only
def test_vbx_is_compared_where_its_speakers_are_given(recipe):
    (calibration,) = select(dry_run(recipe, "--development", "/d/train"), "calibrate")
    assert values_of("--development", calibration) == ["/d/train"]
    (calibration,) = select(dry_run(recipe), "calibrate")
    assert "--development" not in calibration


@of_diarization_only
def test_a_published_model_diarizes_by_default(recipe):
    commands = dry_run(recipe)
    (calibration,) = select(commands, "calibrate")
    assert values_of("--model", calibration) == ["hub:voxceleb_resnet34_LM"]


@of_diarization_only
def test_the_default_task_of_a_recipe_may_be_named(recipe):
    expected = dry_run(recipe)
    assert dry_run(recipe, "--task", "diar") == expected


# Segmentation


@of_diarization_only
def test_a_network_is_trained_on_the_meetings_and_compared_with_none(recipe, tmp_path):
    data = tmp_path / "data"
    (data / "test").mkdir(parents=True)
    (data / "test/wav.scp").write_text("a /x/a.wav\nb /x/b c.wav\n")
    (data / "test/ref.uem").touch()
    options = ("--data", data, "--exp", "/e", "--hardware", "cpu", "--seed", "3")
    commands = dry_run(f"{recipe}/run_segmentation.sh", *options)
    assert dry_run(recipe, "--task", "segmentation", *options) == commands
    download, prepare, check, decode, train, *rest = commands

    script = str(ROOT / "egs" / recipe / "diar/prepare.py")
    assert download[:3] == ["python", script, "--download"]
    assert prepare[:2] == ["python", script]
    # VoxConverse has no training part: its development part is the training set.
    learned_from = "dev" if recipe == "voxconverse" else "train"
    for command in (download, prepare):
        assert ("--train" in command) == (recipe != "voxconverse")
    assert f"{data}/{learned_from}" in check
    assert decode == [*check, "--decode"]
    assert layers_of(train) == ["segmentation/pyannet", "hardware/cpu"]
    assert values_of("--set", train) == [
        f"data.dir={data}",
        f"data.train=[{learned_from}]",
        "seed=3",
        "augment.room_prob=0",
        "augment.noise_prob=0",
    ]
    assert "--init" not in train

    # Nothing that was learned from is scored.
    num_scored = 1 if recipe == "voxconverse" else 2
    assert kinds_of(rest) == ["diarize"] * 2 * num_scored + ["der"] * 2 * num_scored
    energy, trained = select(rest, "diarize")[-2:]
    files = ["/x/a.wav", "/x/b c.wav"]
    model = "hub:voxceleb_resnet34_LM"
    for command in (energy, trained):
        assert command[2:4] == files
        assert values_of("--model", command) == [model]
    assert values_of("--vad", energy) == ["energy"]
    assert values_of("--segmentation", trained) == ["/e"]
    scored = select(rest, "der")[-2:]
    for command, diarized in zip(scored, (energy, trained)):
        out = values_of("--out", diarized)
        assert command[2:4] == [f"{data}/test/ref.rttm", *out]
        assert values_of("--uem", command) == [f"{data}/test/ref.uem"]


@pytest.mark.parametrize("recipe", [*MEETINGS, "mini"])
def test_a_fine_tuned_network_is_also_compared_with_the_initial_one(recipe):
    options = ("--task", "segmentation", "--init", "/n", "--embedder", "/m")
    commands = dry_run(recipe, *options, "--exp", "/e", "--hardware", "cpu")
    (train,) = select(commands, "train")
    assert values_of("--init", train) == ["/n"]
    assert layers_of(train)[0] == "segmentation/pyannet_finetune"
    energy, trained, initial, *others = select(commands, "diarize")
    assert len(others) == (0 if recipe == "voxconverse" else 3)
    assert values_of("--segmentation", trained) == ["/e"]
    assert values_of("--segmentation", initial) == ["/n"]
    outs = []
    for command in (energy, trained, initial, *others):
        assert values_of("--model", command) == ["/m"]
        outs += values_of("--out", command)
    assert len({*outs}) == len(outs)
    scored = [command[3] for command in select(commands, "der")]
    assert scored == outs


@pytest.mark.parametrize("recipe", [*MEETINGS, "mini"])
def test_the_embeddings_of_segmentation_are_of_no_other_task(recipe):
    done = run(recipe, "--dry-run", "--embedder", "/m")
    assert done.returncode == 1
    assert refused(done.stderr, "--embedder", "--task segmentation")


def test_mini_trains_both_networks_on_the_recordings_of_verification(tmp_path):
    data = tmp_path / "data"
    options = ("--data", data, "--noise", "none", "--hardware", "cpu", "--exp", "/e")
    model = ("--model", "eres2net", "--seed", "4")
    commands = dry_run("mini/run_segmentation.sh", *options, *model)
    download, prepare, converse, check, decode, embeddings, train, *rest = commands

    verification = dry_run("mini", *options)
    assert [download, prepare] == verification[:2]
    script = str(ROOT / "egs/mini/diar/prepare.py")
    assert converse == ["python", script, "--data", f"{data}_diar"]
    folders = [f"{data}/train", f"{data}_diar/dev", f"{data}_diar/test", f"{data}/rirs"]
    assert check[2:6] == folders
    assert decode == [*check, "--decode"]

    # The embeddings come from run.sh of verification, with the same data.
    embedder = str(ROOT / "egs/mini/exp/eres2net_s4")
    assert embeddings[:2] == ["bash", RUN_SH_OF_MINI]
    (trained,) = select(dry_run("mini", *embeddings[2:]), "train")
    assert values_of("--exp", trained) == [embedder]
    assert values_of("--set", trained)[:2] == [f"data.dir={data}", "seed=4"]
    assert layers_of(train)[1] == "egs/mini/diar/segmentation.yaml"
    expected = [f"data.dir={data}", "seed=4", "augment.noise_prob=0"]
    assert values_of("--set", train) == expected
    for command in select(rest, "diarize"):
        assert values_of("--model", command) == [embedder]


@pytest.mark.parametrize("base", ["pyannet", "pyannet_finetune"])
def test_the_yaml_of_mini_is_a_segmentation_of_batches_that_train_quickly(base):
    layers = [Path(f"segmentation/{base}"), ROOT / "egs/mini/diar/segmentation.yaml"]
    config = load_config(layers)
    assert config.task == "segmentation"
    assert config.training.global_batch == 16


# Verification without labels


@pytest.mark.parametrize("recipe", VERIFYING)
@pytest.mark.parametrize("method", METHODS)
def test_without_labels_only_training_and_back_ends_differ(recipe, method):
    options = ("--hardware", "cpu", *SILENT, "--seed", "4")
    commands = dry_run(recipe, *options, "--stop-stage", "5")
    train, extract_test = commands[5:7]
    (score,) = dry_stage(recipe, 6, *options)
    task = ("--task", "ssl", "--method", method)
    ssl_commands = dry_run(recipe, *options, *task)
    ssl_train, *ssl_extract, ssl_score = ssl_commands[5:]
    assert ssl_commands[:5] == commands[:5]

    *layers, hardware = layers_of(train)
    folder = f"egs/{recipe}/conf"
    overlays = []
    for name in ("ssl", method, f"{layers[0]}_{method}"):
        overlay = f"{folder}/{name}.yaml"
        if (ROOT / overlay).is_file():
            overlays.append(overlay)
    expected = [*layers, f"ssl/{method}", *overlays, hardware]
    assert layers_of(ssl_train) == expected
    assert values_of("--set", ssl_train) == values_of("--set", train)
    assert "--init" not in ssl_train

    (labelled_exp,) = values_of("--exp", train)
    exp = labelled_exp.replace("_s4", f"_{method}_s4")
    for command in (ssl_train, *ssl_extract, ssl_score):
        assert values_of("--exp", command) == [exp]

    assert extract_test[1] == "extract"
    assert ssl_extract[0][1] == "extract"
    tested = [name for name, _ in EXTRACTIONS[recipe] if name == "test"]
    assert len(ssl_extract) == len(tested)
    for command in ssl_extract:
        folders = values_of("--data", command)
        assert names_of(folders) == ["test"]

    assert values_of("--trials", ssl_score) == values_of("--trials", score)
    assert values_of("--backend", ssl_score) == ["cosine"]
    assert "--development" not in ssl_score


DEFAULT_METHODS = dict.fromkeys(VERIFYING, "dino")
DEFAULT_METHODS |= {"mini": "simclr", "own": "simclr"}


@pytest.mark.parametrize(("recipe", "method"), DEFAULT_METHODS.items())
def test_a_method_is_the_default(recipe, method):
    options = ("--task", "ssl", "--hardware", "cpu")
    commands = dry_run(recipe, *options)
    expected = dry_run(recipe, *options, "--method", method)
    assert commands == expected


# Verification that is learned from a teacher


@pytest.mark.parametrize("recipe", VERIFYING)
def test_a_student_differs_in_its_overlay_its_teacher_and_its_back_ends(recipe):
    options = ("--hardware", "cpu", *SILENT, "--seed", "4")
    commands = dry_run(recipe, *options, "--stop-stage", "5")
    train = commands[5]
    (score,) = dry_stage(recipe, 6, *options)
    task = ("--task", "distil", "--teacher", "/t/big")
    distil_commands = dry_run(recipe, *options, *task)
    distil_train, *distil_extract, distil_score = distil_commands[5:]
    assert distil_commands[:5] == commands[:5]

    *layers, hardware = layers_of(train)
    assert layers_of(distil_train) == [*layers, "distil", hardware]
    assert values_of("--teacher", distil_train) == ["/t/big"]
    assert values_of("--set", distil_train) == values_of("--set", train)

    (labelled_exp,) = values_of("--exp", train)
    exp = labelled_exp.replace("_s4", "_distil_s4")
    for command in (distil_train, *distil_extract, distil_score):
        assert values_of("--exp", command) == [exp]
    for command in distil_extract:
        assert names_of(values_of("--data", command)) == ["test"]
    assert values_of("--trials", distil_score) == values_of("--trials", score)
    assert values_of("--backend", distil_score) == ["cosine"]


# Tasks that a recipe does not have


def tasks_of(recipe: str) -> list[str]:
    """Return the tasks that a recipe has."""
    if recipe not in VERIFYING:
        return ["diar"]
    tasks = ["sv", "ssl", "distil"]
    if recipe in LID:
        tasks.append("lid")
    if recipe == "mini":
        tasks.append("diar")
    return tasks


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_task_that_a_recipe_does_not_have_is_refused_with_those_that_it_has(recipe):
    tasks = tasks_of(recipe)
    allowed = "|".join(tasks)
    other_tasks = {"sv", "ssl", "distil", "lid", "diar"} - set(tasks)
    for task in other_tasks:
        done = run(recipe, "--task", task, "--dry-run")
        assert done.stdout == ""
        assert done.returncode == 1
        assert refused(done.stderr, "--task", allowed, f"'{task}'"), done.stderr
