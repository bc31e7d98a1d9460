"""Parts from a folder outside of the repository, in every command; nothing else is imported."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused, refuses
from safetensors.numpy import load_file
from tiny import BARE, ROOT, cut, losses, rows, weights

import speakerlab
from speakerlab.bin import embed
from speakerlab.checkpoints.published import load_published
from speakerlab.config.schema import load_config
from speakerlab.core.registry import PLUGINS_VARIABLE, outside_part, use_plugins
from speakerlab.data.convert import read_wave

MODEL = "my_parts.toys:Model"
PARTS = [
    f"model={{name: {MODEL}, args: {{embed_dim: 16}}}}",
    "head.name=my_parts.toys:Head",
    "augment.more.clip={name: my_parts.toys:Clipping, args: {prob: 0.5}}",
    "optimizer={name: my_parts.toys:Momentum, args: {momentum: 0.5}}",
    "schedule={name: my_parts.toys:halving, args: {epochs: 3.0}}",
    *("training.lr=0.02", "training.warmup_epochs=0", "training.num_epochs=2"),
    *("runtime.micro_batch=4", "training.bn_batch=4", "augment.speed_classes=off", *BARE),
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
    (head,) = load_file(toy / "model/head.safetensors").values()
    assert head.shape == (6, 16)
    rates = [row["lr"] for row in rows(toy, "train")]
    assert rates == pytest.approx([0.02 * 8 / 32 * 0.5 ** (k / 6 / 3) for k in range(12)])
    exp = cut(toy, tmp_path / "cut")
    assert "resuming from step" in train(exp, *PARTS, "--plugins", folder).stderr
    assert weights(exp) == weights(toy) and losses(exp) == losses(toy)
    unclipped = [part for part in PARTS if not part.startswith("augment.more")]
    assert refused(
        train(exp, *unclipped, "--plugins", folder, code=1).stderr, f"{exp}/config.yaml", "Clipping"
    )


def test_two_ranks_learn_from_the_same_crops(toy, tmp_path, train, folder):
    exp = tmp_path / "two"
    train(exp, *PARTS, "training.num_epochs=1", "--plugins", folder, ranks=2)
    assert losses(exp) == pytest.approx({step: losses(toy)[step] for step in range(1, 7)}, rel=1e-4)


def test_the_model_is_extracted_scored_exported_averaged_and_loaded(
    toy, tmp_path, data, run, folder
):
    plugins = ("--plugins", folder)
    for more in ((), ("--untrained",)):
        words = ("extract", "--exp", toy, "--data", data / "test", "--precision", "auto", *more)
        run("-m", "speakerlab", *words, *plugins)
    trials = data / "test/trials"
    run("-m", "speakerlab", "score", "--exp", toy, "--trials", trials, "--durations", "1", *plugins)
    assert (toy / "report.html").exists()
    run("-m", "speakerlab", "average", toy, "--out", tmp_path / "mean", *plugins)
    words = ("calibrate", "--model", tmp_path / "mean", "--data", data / "test")
    run("-m", "speakerlab", *words, *plugins)
    wav = next(data.glob("**/*.wav"))
    embed.main([str(wav), "--model", str(toy), "--out", str(tmp_path / "e"), *map(str, plugins)])
    model = speakerlab.load(toy, plugins=folder)
    assert f"({MODEL}" in repr(model) and model.embed_dim == 16
    emb_D, plain = model.embed(wav), load_published(toy).embedder
    with torch.no_grad():
        wave_S = torch.from_numpy(read_wave(wav, sample_rate=16000))
        np.testing.assert_allclose(emb_D, plain(wave_S[None])[0], rtol=1e-4, atol=1e-5)
    found = speakerlab.load(tmp_path / "mean", plugins=folder).embed(wav)
    assert np.abs(found - emb_D).max() > 0  # another model: the mean
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    run("-m", "speakerlab", "export", toy, "--out", tmp_path / "toy.onnx", *plugins)
    exported = speakerlab.load(tmp_path / "toy.onnx").embed(wav)  # it needs no class
    np.testing.assert_allclose(exported, emb_D, rtol=1e-3, atol=1e-4)


def test_the_speakers_of_a_recording_by_a_clustering_method(toy, data, run, folder):
    wav = next(data.glob("**/*.wav"))
    words = ("diarize", wav, "--model", toy, "--method", "my_parts.toys:Clustering")
    assert "SPEAKER" in run("-m", "speakerlab", *words, "--plugins", folder).stdout


def test_a_recipe_passes_the_folder_on(folder):
    words = ["bash", ROOT / "egs/mini/run.sh", "--plugins", folder, "--dry-run", "--stage", "3"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"export {PLUGINS_VARIABLE}=" in done.stdout


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """trap() -> whether the module `trapped`, which Python would find, was imported."""
    marker = tmp_path / "imported"
    (tmp_path / "anywhere").mkdir()
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Model: pass\n"
    (tmp_path / "anywhere/trapped.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "anywhere")])
    yield marker.exists
    sys.modules.pop("trapped", None)


def rename(exp: Path, copy: Path, name: str) -> Path:
    shutil.copytree(exp / "model", copy)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(MODEL, name))
    return copy


def test_a_model_with_a_class_from_outside_loads_nothing_by_itself(
    toy, tmp_path, train, folder, trap
):
    model = rename(toy, tmp_path / "model", "trapped:Model")
    subject = f"{model}/config.yaml"
    with refuses(subject, "trapped:Model", "--plugins DIR"):
        speakerlab.load(model)
    with refuses(subject, "trapped:Model", folder):  # of another folder
        speakerlab.load(model, plugins=folder)
    assert not trap()
    use_plugins(tmp_path / "anywhere")
    outside_part("trapped:Model")
    assert trap()
    done = train(tmp_path / "new", *PARTS, code=1)
    assert MODEL in done.stderr and "--plugins DIR" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "subprocess:Popen", "json:loads", "speakerlab.models.campplus:CAMPPlus"),
        *("my_parts.toys:torch", "my_parts.toys:AMSoftmax", "my_parts.toys:Modle", "my_parts.no:M"),
        *(
            "missing:Model",
            ":Model",
            "my_parts.toys:",
            ".toys:Model",
            "a b:c",
            "my_parts:toys.Model",
        ),
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
    ("part", "more", "code"),
    [
        pytest.param("Model", ["--set", "channels=4", "embed_dim=12"], 0, marks=pytest.mark.slow),
        pytest.param("DependsOnItsBatch", ["--set", "embed_dim=12"], 1, marks=pytest.mark.slow),
        pytest.param("Head", [], 0, marks=pytest.mark.slow),
        pytest.param("Clipping", ["--set", "prob=0.6"], 0, marks=pytest.mark.slow),
        pytest.param("Momentum", [], 0, marks=pytest.mark.slow),
        pytest.param("Clustering", [], 0, marks=pytest.mark.slow),
        ("halving", ["--set", "epochs=3.0"], 0),
        pytest.param("halving", ["--set", "epochs=-0.001"], 1, marks=pytest.mark.slow),
    ],
)
def test_check_part(part, more, code, run, folder):
    words = ("check-part", f"my_parts.toys:{part}", "--plugins", folder, *more)
    done = run("-m", "speakerlab", *words, code=code)
    assert ("failed" if code else "passed") in done.stdout
    assert bool(code) == ("failed" in done.stdout)
