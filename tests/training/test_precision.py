"""The format is chosen by the capability of the GPU, not by what its driver claims."""

import os
from types import SimpleNamespace

import pytest
import torch
from refusals import refuses

from speakerlab.core import system
from speakerlab.training.precision import (
    ALLOCATOR_VARIABLES,
    Card,
    apply_backend_settings,
    card_of,
    resolve_precision,
)

CUDA = torch.device("cuda", 3)
T4 = Card(False, "capability 7.5")
A100 = Card(True, "capability 8.0")


@pytest.mark.parametrize(
    ("name", "capability", "hip", "expected"),
    [
        ("GTX 1080 Ti", (6, 1), None, "fp32"),
        ("V100", (7, 0), None, "fp32"),
        ("T4, RTX 2080 Ti, GTX 1660", (7, 5), None, "fp32"),
        ("A100", (8, 0), None, "bf16"),
        ("L4, RTX 4090", (8, 9), None, "bf16"),
        ("H100, H200", (9, 0), None, "bf16"),
        ("RTX 5090", (12, 0), None, "bf16"),
        # on ROCm the architecture decides
        ("gfx906:sramecc+:xnack-", (9, 0), "6.2", "fp32"),  # MI50
        ("gfx90a:sramecc+:xnack-", (9, 0), "6.2", "bf16"),  # MI200: the same capability
        ("gfx1030", (10, 3), "6.2", "fp32"),
        ("gfx1100", (11, 0), "6.2", "bf16"),
    ],
)
def test_auto_by_card(name, capability, hip, expected, monkeypatch):
    """The driver of every simulated GPU claims to support bf16."""
    properties = SimpleNamespace(gcnArchName=name)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda *_a, **_k: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    card = card_of(CUDA)
    assert card is not None
    used = resolve_precision("auto", CUDA, [card])
    major, minor = capability
    description = f"capability {major}.{minor}"
    if hip:
        description = name.partition(":")[0]
    verb = "has" if expected == "bf16" else "lacks"
    assert used.name == expected
    assert used.reason == f"auto: {description} {verb} bf16"


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_by_cpu(has_bf16, monkeypatch):
    name = "_is_avx512_bf16_supported"
    monkeypatch.setattr(torch.cpu, name, lambda: has_bf16)
    card = card_of(torch.device("cpu"))
    assert card is not None
    used = resolve_precision("auto", "cpu", [card])
    assert used.name == ("bf16" if has_bf16 else "fp32")

    # an older torch does not have the function
    monkeypatch.delattr(torch.cpu, name)
    without = card_of(torch.device("cpu"))
    assert without == (False, *card[1:])


def test_the_least_capable_rank_decides():
    used = resolve_precision("auto", CUDA, [A100, T4, A100, A100])
    reason = "auto: capability 7.5, the least capable of 4 ranks, lacks bf16"
    assert used.name == "fp32"
    assert used.reason == reason


@pytest.mark.parametrize("asked", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("card", "verb", "best"),
    [(T4, "lacks", "fp32"), (A100, "has", "bf16")],
)
def test_a_format_that_is_asked_for_is_used_and_a_better_one_named(
    asked, card, verb, best
):
    used = resolve_precision(asked, CUDA, [card, card])
    reason = "as configured"
    if asked != best:
        reason += f"; {card.text} {verb} bf16, auto would take {best}"
    assert used.name == asked
    assert used.reason == reason
    assert used.scales_loss == (asked == "fp16")


@pytest.mark.parametrize(
    ("device", "kind"),
    [("cpu", "cpu"), ("cuda:3", "cuda"), (CUDA, "cuda")],
)
def test_only_the_type_reaches_autocast(device, kind):
    used = resolve_precision("bf16", device)
    assert used.device_type == kind
    autocast = used.autocast()
    assert ":" not in getattr(autocast, "device")  # noqa: B009


@pytest.mark.parametrize("device", ["0", "", "cuda:x", "gpu"])
def test_an_unknown_device_and_fp16_without_cuda_are_errors(device):
    with refuses("device", device):
        resolve_precision("auto", device)
    with refuses("runtime.precision", "fp16", "cpu"):
        resolve_precision("fp16", "cpu")
    assert card_of(torch.device("mps")) is None
    assert resolve_precision("auto", "mps").name == "fp32"


@pytest.mark.parametrize("name", [None, *ALLOCATOR_VARIABLES])
def test_segments_of_gpu_memory_grow_unless_the_user_decides(name, monkeypatch):
    for each in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(each, "")  # also restores them
        monkeypatch.delenv(each)
    monkeypatch.setattr(system, "is_on_wsl", lambda: False)
    if name:
        monkeypatch.setenv(name, "backend:native")
    apply_backend_settings(deterministic=False)
    variables = {}
    for each in ALLOCATOR_VARIABLES:
        if each in os.environ:
            variables[each] = os.environ[each]
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if name:
        expected = {name: "backend:native"}
    assert variables == expected


def test_segments_do_not_grow_on_wsl(monkeypatch):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # also restores them
        monkeypatch.delenv(name)
    monkeypatch.setattr(system, "is_on_wsl", lambda: True)
    apply_backend_settings(deterministic=False)
    assert not any(name in os.environ for name in ALLOCATOR_VARIABLES)


@pytest.mark.parametrize("conv_tf32", [False, True])
def test_backend_settings_can_be_read_back(conv_tf32):
    apply_backend_settings(deterministic=False, conv_tf32=conv_tf32)
    try:
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.allow_tf32 is False
        assert torch.backends.cudnn.allow_tf32 is conv_tf32
        assert torch.backends.cudnn.benchmark
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        apply_backend_settings(deterministic=False)
