"""Apple's GPUs, which have no fp64: no tensor of fp64 is made there, and embeddings are compared.

There is none here. Tensors without data on another device show what is computed where.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from refusals import refuses
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from voices import make_noise

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
sys.path.append(str(Path(__file__).parents[1] / "models"))

import fake_gpu
from fake_kernels import FAKE
from members import SMALL

from speakerlab.core import full_precision
from speakerlab.frontend.encoder_inputs import StackedFbank
from speakerlab.inference.torch_model import check_against_cpu, choose_device
from speakerlab.models import MODELS
from speakerlab.models.folding import fold_batchnorm

GPU = torch.device("cuda", 0)  # stands for mps
FP64 = (torch.float64, torch.complex128)


class NoFloat64(TorchDispatchMode):
    """Refuses each operation that makes a tensor of fp64 on the GPU, as an Apple GPU does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.device.type == GPU.type:
                assert value.dtype not in FP64, f"{func} makes fp64 on the GPU"
        return result


@contextmanager
def apple_gpu():
    """Let GPU be a device without fp64, on which tensors have no data."""
    fake = sys.modules[FAKE]
    with (
        fake.FakeTensorMode(allow_non_fake_inputs=True),
        NoFloat64(),
        torch.inference_mode(),
    ):
        yield


@pytest.fixture(autouse=True)
def needs_fake_tensors(monkeypatch):
    reason = fake_gpu.why_not()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(full_precision, "WITHOUT_FLOAT64", (GPU.type,))


def to_gpu(module: nn.Module) -> nn.Module:
    """Replace the weights of a module by tensors without data on the GPU."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                on_gpu = torch.empty_like(parameter, device=GPU)
                part._parameters[name] = nn.Parameter(on_gpu, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=GPU)
    return module


def test_fp64_on_the_gpu_is_found():
    with apple_gpu(), pytest.raises(AssertionError, match="fp64 on the GPU"):
        torch.empty(2, device=GPU).double()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_no_model_uses_fp64(name):
    model = fold_batchnorm(MODELS[name](**SMALL[name]).eval())
    with apple_gpu():
        to_gpu(model)
        emb_BD = model(torch.empty(2, 200, model.feat_dim, device=GPU))
    assert emb_BD.device == GPU
    assert emb_BD.dtype == torch.float32


@pytest.mark.parametrize(
    "settings", ["seed=1", "frontend.kind=tfmel", "frontend.snip_edges=false"]
)
def test_no_front_end_uses_fp64(settings, make_embedder):
    embedder = make_embedder(settings).for_inference()
    with apple_gpu():
        to_gpu(embedder)
        emb_BD = embedder.embed_window(torch.empty(2, 16000, device=GPU))
    assert emb_BD.device == GPU


def test_features_that_need_fp64_are_computed_on_the_cpu():
    features = StackedFbank(sampling_rate=16000, num_mel_bins=80, stride=2)
    with apple_gpu():
        to_gpu(features)
        feats_BTF = features.compute(torch.empty(2, 16000, device=GPU))
    assert feats_BTF.device == GPU
    assert feats_BTF.dtype == torch.float32


def test_they_are_the_same_there():
    """The CPU has the values of constants that are on a GPU."""
    wave_BS = make_noise(1.0, rows=2)
    features = StackedFbank(sampling_rate=16000, num_mel_bins=80, stride=2)
    expected = features.fbank(wave_BS)
    for name, _ in list(features.fbank.named_buffers()):
        features.fbank._buffers[name] = torch.empty(0, device="meta")
    computed = full_precision.where_float64_exists(features.fbank, wave_BS)
    assert torch.equal(computed, expected)


class OtherLater(nn.Module):
    """Backbone whose output changes after its first pass, as that of a wrong device."""

    embed_dim = 16
    min_frames = 2

    def __init__(self, error: float) -> None:
        super().__init__()
        self.error = error
        self.num_passes = 0

    def forward(self, feats_BTF: torch.Tensor) -> torch.Tensor:
        emb_BD = feats_BTF[..., :16].amax(1)
        generator = torch.Generator().manual_seed(self.num_passes)
        self.num_passes += 1
        noise_BD = torch.randn(emb_BD.shape, generator=generator)
        return emb_BD + self.error * emb_BD.norm() * noise_BD


def test_a_device_must_compute_the_embeddings_of_the_cpu(make_embedder):
    cpu = torch.device("cpu")
    embedder = make_embedder()
    check_against_cpu(embedder, cpu)
    embedder.backbone = OtherLater(1e-4)
    check_against_cpu(embedder, cpu)
    for error in (0.1, float("nan")):
        embedder.backbone = OtherLater(error)
        with refuses("device", "cpu", "cosine"):
            check_against_cpu(embedder, cpu)


def test_mps_is_chosen_by_name_only(monkeypatch):
    with refuses("device", "mps"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps") == torch.device("mps")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
