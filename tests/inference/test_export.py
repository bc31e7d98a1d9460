"""The ONNX file: the same numbers, what it says of its model, and no file where they differ."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from models_on_disk import CALIBRATION, publish_xvector
from refusals import refuses
from torch import nn

import speakerlab
from speakerlab.checkpoints.published import load_published
from speakerlab.config.embedder import Embedder
from speakerlab.frontend.fbank import Fbank
from speakerlab.inference.export import export_onnx, speech_like, write_onnx
from speakerlab.inference.onnx_model import Facts, OnnxModel

ROOT = Path(__file__).parents[2]
FACTS = Facts(16000, 4, 400, 1920000, "00ff", "small", {"window": "povey"})


@pytest.fixture(scope="module")
def exp(tmp_path_factory) -> Path:
    return publish_xvector(tmp_path_factory.mktemp("a folder of mine") / "exp", CALIBRATION)


@pytest.fixture(scope="module")
def file(exp: Path) -> Path:
    return export_onnx(exp, exp.parent / "new folder" / "model.onnx")


# 1000 samples are repeated, 40000 and 112000 are cut in two windows and in four
@pytest.mark.parametrize("num_samples", [2, 1000, 2800, 31999, 32000, 40000, 112000])
def test_any_length_gives_what_pytorch_gives(exp, file, num_samples):
    wave_BS = speech_like(1, num_samples)
    with torch.inference_mode():
        wanted_BD = load_published(exp).embedder(torch.from_numpy(wave_BS)).numpy()
    emb_D = speakerlab.load(file).embed(wave_BS[0])
    assert emb_D.shape == (16,) and emb_D.dtype == np.float32
    assert np.abs(emb_D - wanted_BD[0]).max() < 1e-5 * np.abs(wanted_BD).max()


def test_what_the_file_says(exp, file):
    published, model = load_published(exp), OnnxModel(file)
    assert (model.sample_rate, model.embed_dim) == (16000, 16)
    assert (model.min_samples, model.max_samples) == (published.embedder.min_samples, 32000)
    assert model.sha256 == published.sha256 and len(model.sha256) == 64
    assert model.calibration == CALIBRATION and model.vad is None
    assert model.facts.architecture == "xvector"
    assert model.facts.frontend == published.config.frontend
    session = model._session
    assert (
        session.get_modelmeta().custom_metadata_map["producer"]
        == f"speakerlab {speakerlab.__version__}"
    )
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("wave", "tensor(float)", ["batch", "samples"])
    ]
    assert [(o.name, o.shape) for o in session.get_outputs()] == [("embedding", ["batch", 16])]


def test_equal_models_give_equal_bytes_and_the_command_is_quiet(exp, file, tmp_path):
    shutil.copytree(exp / "model", tmp_path / "elsewhere")
    out = tmp_path / "b.onnx"
    words = ["-m", "speakerlab", "export", tmp_path / "elsewhere", "--out", out]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == file.read_bytes()
    for word in (str(exp.parent), str(ROOT), sys.prefix, ".py", "stack_trace", "pkg.torch"):
        assert word.encode() not in file.read_bytes(), word
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.onnx", "elsewhere"]
    lines = done.stderr.splitlines()
    assert done.stdout == "" and 1 <= len(lines) <= 2, done.stderr
    assert re.search(r"b\.onnx: equal to PyTorch at 7 lengths, cosine >= [01]\.\d{7}", lines[0])


class Odd(nn.Module):
    """Turns the channels round where somebody looks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if torch.compiler.is_compiling() else x


class Backbone(nn.Module):
    embed_dim, min_frames = 4, 1

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle = nn.Linear(80, 8), nn.Sequential(middle)
        self.after = nn.Linear(8, 4)

    def forward(self, feats_BTF: torch.Tensor) -> torch.Tensor:
        return self.after(self.middle(self.before(feats_BTF)).square().mean(1))


def test_where_they_differ_nothing_is_written_and_the_lengths_are_named(tmp_path):
    torch.manual_seed(0)
    embedder = Embedder(fbank=Fbank(), backbone=Backbone(Odd()))
    out = tmp_path / "model.onnx"
    out.write_bytes(b"of before")
    with refuses(str(out), "400 (", "480000 ("):
        write_onnx(embedder, out, facts=FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert out.read_bytes() == b"of before"


def test_what_cannot_be_traced_is_one_line(tmp_path):
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    embedder = Embedder(fbank=Fbank(), backbone=Backbone(Branching()))
    with refuses("model") as caught:
        write_onnx(embedder, tmp_path / "model.onnx", facts=FACTS)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_the_matrix_is_the_fourier_transform():
    wave_BS = torch.from_numpy(speech_like(2, 48123))
    for fbank in (Fbank(mean_norm=False), Fbank(sample_rate=8000, num_mel_bins=40, scale=32768.0)):
        program = torch.export.export(fbank, (wave_BS,))
        assert not any("fft" in str(node.target) for node in program.graph.nodes)
        assert (program.module()(wave_BS) - fbank(wave_BS)).abs().max() < 3e-4
    exact_LK = torch.fft.rfft(torch.eye(400, dtype=torch.float64), n=512)
    exact_LC = torch.view_as_real(exact_LK).flatten(1)
    assert (Fbank().get_buffer("dft_LC") - exact_LC).abs().max() < 6e-8


@pytest.mark.parametrize("extra", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_names_the_extra(monkeypatch, exp, tmp_path, extra):
    monkeypatch.setitem(sys.modules, extra, None)
    with refuses("export", f"{extra} is not installed", error=ModuleNotFoundError):
        export_onnx(exp, tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_a_torch_that_cannot_export_is_refused(monkeypatch, exp, tmp_path):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.8.0+cpu"))
    with refuses("export", "2.8.0+cpu", "pip install"):
        export_onnx(exp, tmp_path / "a.onnx")
