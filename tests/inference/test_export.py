"""The ONNX file: the same numbers, what it says of its model, and no file where they differ."""

import io
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models_on_disk import CALIBRATION, publish_xvector
from refusals import refuses
from torch import nn

import speakerlab
from speakerlab.checkpoints.published import load_published
from speakerlab.embedder import Embedder
from speakerlab.frontend.fbank import Fbank
from speakerlab.inference import export
from speakerlab.inference.export import export_onnx, speech_like, write_onnx
from speakerlab.inference.onnx_model import Facts, OnnxModel

ROOT = Path(__file__).parents[2]
FACTS = Facts(
    sample_rate=16000,
    embed_dim=4,
    min_samples=400,
    max_samples=1920000,
    sha256="00ff",
    architecture="small",
    frontend={"window": "povey"},
)


@pytest.fixture(scope="module")
def exp(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("a folder of mine")
    return publish_xvector(folder / "exp", CALIBRATION)


@pytest.fixture(scope="module")
def file(exp: Path) -> Path:
    return export_onnx(exp, exp.parent / "new folder" / "model.onnx")


# 1000 samples are repeated, 40000 and 112000 are cut in two windows and in four.
@pytest.mark.parametrize("num_samples", [2, 1000, 2800, 31999, 32000, 40000, 112000])
def test_any_length_gives_what_pytorch_gives(exp, file, num_samples):
    wave_BS = speech_like(1, num_samples)
    embedder = load_published(exp).embedder
    with torch.inference_mode():
        (expected_D,) = embedder(torch.from_numpy(wave_BS)).numpy()
    emb_D = speakerlab.load(file).embed(wave_BS[0])
    assert emb_D.shape == (16,)
    assert emb_D.dtype == np.float32
    error_D = np.abs(emb_D - expected_D)
    largest = np.abs(expected_D).max()
    assert error_D.max() < 1e-5 * largest


def test_what_the_file_says(exp, file):
    published = load_published(exp)
    model = OnnxModel(file)
    assert model.sample_rate == 16000
    assert model.embed_dim == 16
    assert model.min_samples == published.embedder.min_samples
    assert model.max_samples == 32000
    assert model.sha256 == published.sha256
    assert len(model.sha256) == 64
    assert model.calibration == replace(CALIBRATION, model_sha256=model.sha256)
    assert model.vad is None
    assert model.facts.architecture == "xvector"
    assert model.facts.frontend == published.config.frontend

    session = model._session
    texts = session.get_modelmeta().custom_metadata_map
    assert texts["producer"] == f"speakerlab {speakerlab.__version__}"
    (wave,) = session.get_inputs()
    assert wave.name == "wave"
    assert wave.type == "tensor(float)"
    assert wave.shape == ["batch", "samples"]
    (embedding,) = session.get_outputs()
    assert embedding.name == "embedding"
    assert embedding.shape == ["batch", 16]


@pytest.mark.slow
def test_equal_models_give_equal_bytes_and_the_command_is_quiet(exp, file, tmp_path):
    copied = tmp_path / "elsewhere"
    shutil.copytree(exp / "model", copied)
    out = tmp_path / "b.onnx"
    command = [
        sys.executable,
        "-m",
        "speakerlab",
        "export",
        str(copied),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["b.onnx", "elsewhere"]

    # Nothing of this machine is in the file.
    content = file.read_bytes()
    assert out.read_bytes() == content
    for text in (
        str(exp.parent),
        str(ROOT),
        sys.prefix,
        ".py",
        "stack_trace",
        "pkg.torch",
    ):
        assert text.encode() not in content, text

    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 2, done.stderr
    pattern = r"b\.onnx: equal to PyTorch at 7 lengths, cosine >= [01]\.\d{7}"
    assert re.search(pattern, lines[0])


class Odd(nn.Module):
    """Reverses the channels, but only in the exported program."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if torch.compiler.is_compiling() else x


class Backbone(nn.Module):
    embed_dim = 4
    min_frames = 1

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(80, 8)
        self.middle = nn.Sequential(middle)
        self.after = nn.Linear(8, 4)

    def forward(self, feats_BTF: torch.Tensor) -> torch.Tensor:
        middle_BTC = self.middle(self.before(feats_BTF))
        power_BC = middle_BTC.square().mean(1)
        return self.after(power_BC)


def test_where_they_differ_nothing_is_written_and_the_lengths_are_named(tmp_path):
    torch.manual_seed(0)
    backbone = Backbone(Odd())
    embedder = Embedder(frontend=Fbank(), backbone=backbone)
    out = tmp_path / "model.onnx"
    out.write_bytes(b"of before")
    with refuses(str(out), "400 (", "480000 ("):
        write_onnx(embedder, out, facts=FACTS)
    names = [path.name for path in tmp_path.iterdir()]
    assert names == ["model.onnx"]
    assert out.read_bytes() == b"of before"


def test_progress_is_shown_on_a_terminal(monkeypatch, tmp_path):
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setattr(export, "SECONDS_PER_TICK", 0.05)
    embedder = Embedder(frontend=Fbank(), backbone=Backbone(nn.Identity()))
    write_onnx(embedder, tmp_path / "model.onnx", facts=FACTS)
    text = output.getvalue()
    # The seconds are counted while the first step, the longest, lasts.
    assert text.count("tracing the network:   0%") > 2
    assert "simplifying the graph: 100%" in text
    assert re.search(r"comparing with PyTorch: 100%\|.*7/7", text)


def test_what_cannot_be_traced_is_one_line(tmp_path):
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    backbone = Backbone(Branching())
    embedder = Embedder(frontend=Fbank(), backbone=backbone)
    with refuses("model") as caught:
        write_onnx(embedder, tmp_path / "model.onnx", facts=FACTS)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_matrix_is_the_fourier_transform():
    wave_BS = torch.from_numpy(speech_like(2, 48123))
    for fbank in (
        Fbank(mean_norm=False),
        Fbank(sample_rate=8000, num_mel_bins=40, scale=32768.0),
    ):
        program = torch.export.export(fbank, (wave_BS,))
        for node in program.graph.nodes:
            assert "fft" not in str(node.target)
        exported = program.module()(wave_BS)
        error = exported - fbank(wave_BS)
        assert error.abs().max() < 3e-4

    identity_LL = torch.eye(400, dtype=torch.float64)
    exact_LK = torch.fft.rfft(identity_LL, n=512)
    exact_LC = torch.view_as_real(exact_LK).flatten(1)
    error_LC = Fbank().get_buffer("dft_LC") - exact_LC
    assert error_LC.abs().max() < 6e-8


@pytest.mark.parametrize("extra", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_names_the_extra(monkeypatch, exp, tmp_path, extra):
    monkeypatch.setitem(sys.modules, extra, None)
    with refuses("export", f"{extra} is not installed", error=ModuleNotFoundError):
        export_onnx(exp, tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_a_torch_that_cannot_export_is_refused(monkeypatch, exp, tmp_path):
    version = type(torch.__version__)("2.8.0+cpu")
    monkeypatch.setattr(torch, "__version__", version)
    with refuses("export", "2.8.0+cpu", "pip install"):
        export_onnx(exp, tmp_path / "a.onnx")
