"""Parts from a folder outside of the repository, in every command; nothing else is imported."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused, refuses
from safetensors.numpy import load_file
from tiny import BARE, ROOT, cut, losses, rows, slow, weights

import speakerlab
from speakerlab.bin import embed
from speakerlab.checkpoints.published import load_published
from speakerlab.config.schema import load_config
from speakerlab.core.registry import PLUGINS_VARIABLE, import_plugin, use_plugins
from speakerlab.data.convert import read_wave

MODEL = "my_parts.toys:Model"
PARTS = [
    f"model={{name: {MODEL}, args: {{embed_dim: 16}}}}",
    "head.name=my_parts.toys:Head",
    "augment.more.clip={name: my_parts.toys:Clipping, args: {prob: 0.5}}",
    "optimizer={name: my_parts.toys:Momentum, args: {momentum: 0.5}}",
    "schedule={name: my_parts.toys:halving, args: {epochs: 3.0}}",
    "training.lr=0.02",
    "training.warmup_epochs=0",
    "training.num_epochs=2",
    "runtime.micro_batch=4",
    "training.bn_batch=4",
    "augment.speed_classes=off",
    *BARE,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plug ins")
    (folder / "my_parts").mkdir()
    shutil.copy(ROOT / "tests/toy_parts.py", folder / "my_parts/toys.py")
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory, train, folder) -> Path:
    exp = tmp_path_factory.mktemp("toy") / "exp"
    train(exp, *PARTS, "--plugins", folder)
    return exp


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """Undo what `use_plugins` does to this process."""
    monkeypatch.setenv(PLUGINS_VARIABLE, "")
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_all_parts_are_used_and_a_resume_is_bit_identical(toy, tmp_path, train, folder):
    (head_CD,) = load_file(toy / "model/head.safetensors").values()
    assert head_CD.shape == (6, 16)

    # The learning rate for a batch of 8 instead of 32, halved every 3 epochs of 6 steps.
    initial_lr = 0.02 * 8 / 32
    expected = [initial_lr * 0.5 ** (step / 6 / 3) for step in range(12)]
    rates = [row["lr"] for row in rows(toy, "train")]
    assert rates == pytest.approx(expected)

    exp = cut(toy, tmp_path / "cut")
    plugins = ("--plugins", folder)
    done = train(exp, *PARTS, *plugins)
    assert "resuming from step" in done.stderr
    assert weights(exp) == weights(toy)
    assert losses(exp) == losses(toy)

    unclipped = [part for part in PARTS if not part.startswith("augment.more")]
    text = train(exp, *unclipped, *plugins, code=1).stderr
    assert refused(text, f"{exp}/config.yaml", "Clipping")


def test_two_ranks_learn_from_the_same_crops(toy, tmp_path, train, folder):
    exp = tmp_path / "two"
    train(exp, *PARTS, "training.num_epochs=1", "--plugins", folder, ranks=2)
    losses_of_one = losses(toy)
    expected = {step: losses_of_one[step] for step in range(1, 7)}
    assert losses(exp) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_model_is_extracted_scored_exported_averaged_and_loaded(
    toy, tmp_path, data, run, folder
):
    def speakerlab_run(*arguments):
        run("-m", "speakerlab", *arguments, "--plugins", folder)

    test_set = ("--data", data / "test")
    extract = ("extract", "--exp", toy, *test_set, "--precision", "auto")
    speakerlab_run(*extract)
    speakerlab_run(*extract, "--untrained")
    trials = ("--trials", data / "test/trials")
    speakerlab_run("score", "--exp", toy, *trials, "--durations", "1")
    assert (toy / "report.html").exists()
    mean = tmp_path / "mean"
    speakerlab_run("average", toy, "--out", mean)
    speakerlab_run("calibrate", "--model", mean, *test_set)
    wav = next(data.glob("**/*.wav"))
    options = ["--model", toy, "--out", tmp_path / "e", "--plugins", folder]
    embed.main([str(argument) for argument in (wav, *options)])

    model = speakerlab.load(toy, plugins=folder)
    assert f"({MODEL}" in repr(model)
    assert model.embed_dim == 16
    emb_D = model.embed(wav)
    embedder = load_published(toy).embedder
    wave_S = torch.from_numpy(read_wave(wav, sample_rate=16000))
    with torch.no_grad():
        expected_D = embedder(wave_S[None])[0]
    np.testing.assert_allclose(emb_D, expected_D, rtol=1e-4, atol=1e-5)

    # The mean of checkpoints is another model.
    mean_D = speakerlab.load(mean, plugins=folder).embed(wav)
    assert np.abs(mean_D - emb_D).max() > 0

    # An exported model needs no class.
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    onnx = tmp_path / "toy.onnx"
    speakerlab_run("export", toy, "--out", onnx)
    exported_D = speakerlab.load(onnx).embed(wav)
    np.testing.assert_allclose(exported_D, emb_D, rtol=1e-3, atol=1e-4)


def test_the_speakers_of_a_recording_by_a_clustering_method(toy, data, run, folder):
    wav = next(data.glob("**/*.wav"))
    method = ("--method", "my_parts.toys:Clustering", "--plugins", folder)
    done = run("-m", "speakerlab", "diarize", wav, "--model", toy, *method)
    assert "SPEAKER" in done.stdout


def test_a_recipe_passes_the_folder_on(folder):
    run_sh = ["bash", ROOT / "egs/mini/run.sh", "--dry-run", "--stage", "3"]
    command = [*run_sh, "--plugins", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    (train,) = [line for line in lines if line.startswith("speakerlab train")]
    options = shlex.split(train)
    assert options[options.index("--plugins") + 1] == str(folder)


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """trap() -> whether the module `trapped`, which Python would find, was imported."""
    marker = tmp_path / "imported"
    place = tmp_path / "anywhere"
    place.mkdir()
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Model: pass\n"
    (place / "trapped.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    yield marker.exists
    sys.modules.pop("trapped", None)


def rename(exp: Path, copy: Path, name: str) -> Path:
    shutil.copytree(exp / "model", copy)
    config = copy / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace(MODEL, name))
    return copy


def test_a_model_with_a_class_from_outside_loads_nothing_by_itself(
    toy, tmp_path, train, folder, trap
):
    model = rename(toy, tmp_path / "model", "trapped:Model")
    subject = f"{model}/config.yaml"
    with refuses(subject, "trapped:Model", "--plugins DIR"):
        speakerlab.load(model)
    # The class is in another folder.
    with refuses(subject, "trapped:Model", folder):
        speakerlab.load(model, plugins=folder)
    assert not trap()

    # Only what the user names is imported.
    use_plugins(tmp_path / "anywhere")
    import_plugin("trapped:Model")
    assert trap()

    done = train(tmp_path / "new", *PARTS, code=1)
    assert MODEL in done.stderr
    assert "--plugins DIR" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "json:loads",
        "speakerlab.models.campplus:CAMPPlus",
        "my_parts.toys:torch",
        "my_parts.toys:AMSoftmax",
        "my_parts.toys:Modle",
        "my_parts.no:M",
        "missing:Model",
        ":Model",
        "my_parts.toys:",
        ".toys:Model",
        "a b:c",
        "my_parts:toys.Model",
    ],
)
def test_only_what_the_folder_defines_is_a_part(name, folder):
    use_plugins(folder)
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        load_config([], [f"model.name='{name}'"])
    assert name in str(caught.value)


def test_a_folder_that_is_missing_is_refused(tmp_path):
    with refuses("--plugins", tmp_path / "no"):
        use_plugins(tmp_path / "no")


@pytest.mark.parametrize(
    ("part", "options", "code"),
    [
        slow("Model", ["--set", "channels=4", "embed_dim=12"], 0),
        slow("DependsOnItsBatch", ["--set", "embed_dim=12"], 1),
        slow("Head", [], 0),
        slow("Clipping", ["--set", "prob=0.6"], 0),
        slow("Momentum", [], 0),
        slow("Clustering", [], 0),
        ("halving", ["--set", "epochs=3.0"], 0),
        slow("halving", ["--set", "epochs=-0.001"], 1),
    ],
)
def test_check_part(part, options, code, run, folder):
    arguments = ("check-part", f"my_parts.toys:{part}", "--plugins", folder, *options)
    done = run("-m", "speakerlab", *arguments, code=code)
    fails = code != 0
    assert ("failed" in done.stdout) == fails
    if not fails:
        assert "passed" in done.stdout
