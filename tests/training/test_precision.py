"""The format follows from the capability, never from what a driver claims to support."""

import pytest
import torch

from speakerlab.training.precision import apply_backend_settings, resolve_precision

CUDA, CPU = torch.device("cuda", 3), torch.device("cpu")


@pytest.mark.parametrize(
    ("card", "capability", "name"),
    [
        ("P100", (6, 0), "fp32"),
        ("V100", (7, 0), "fp32"),
        ("T4, 2080Ti", (7, 5), "fp32"),
        ("A100", (8, 0), "bf16"),
        ("RTX 3090", (8, 6), "bf16"),
        ("L4, RTX 4090", (8, 9), "bf16"),
        ("H100", (9, 0), "bf16"),
        ("B200", (10, 0), "bf16"),
    ],
)
def test_auto_by_card(card, capability, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_a, **_k: True)  # emulated
    assert resolve_precision("auto", CUDA, capability).name == name, card


def test_auto_on_a_cpu_is_fp32():
    assert resolve_precision("auto", CPU, None).name == "fp32"


def test_only_the_type_reaches_autocast():
    assert resolve_precision("bf16", CUDA, (8, 0)).device_type == "cuda"


def test_fp16_needs_cuda():
    with pytest.raises(ValueError, match=r"fp16 needs a CUDA device, got cpu; use auto, fp32 or"):
        resolve_precision("fp16", CPU, None)


def test_bf16_autocast_casts_products_and_fp32_does_not():
    x = torch.ones(2, 2)
    with resolve_precision("bf16", CPU, None).autocast():
        assert (x @ x).dtype == torch.bfloat16
    with resolve_precision("fp32", CPU, None).autocast():
        assert (x @ x).dtype == torch.float32


def test_the_scaler_works_in_fp16_only():
    assert not resolve_precision("bf16", CPU, None).scaler().is_enabled()
    assert not resolve_precision("fp32", CPU, None).scaler().is_enabled()


def test_backend_settings_can_be_read_back():
    apply_backend_settings(deterministic=False)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert torch.backends.cudnn.allow_tf32 is True
