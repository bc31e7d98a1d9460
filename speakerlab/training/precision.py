"""The one place that decides number formats. In: what was asked and the device. Out: `Precision`.

Decided from the CUDA capability: the driver's "bf16 supported" also counts emulation, which is
slower than fp32. fp16 is only ever asked for. Convolutions may use TF32, matrix products may not.
"""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.amp.grad_scaler import GradScaler

NATIVE_BF16 = (8, 0)  # Ampere


@dataclass(frozen=True)
class Precision:
    """The format of the backbone's forward pass; parameters and the fp32 islands stay fp32."""

    name: str  # fp32, bf16 or fp16
    device_type: str  # the type alone ("cuda"): an index would switch torch's own checks off
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.name]

    def autocast(self) -> AbstractContextManager[object]:
        """Around the backbone only."""
        enabled = self.name != "fp32"
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=enabled)

    def scaler(self) -> GradScaler:
        """Scales losses in fp16; passes everything through otherwise."""
        return GradScaler(self.device_type, enabled=self.name == "fp16")


def resolve_precision(
    asked: str, device: torch.device, capability: tuple[int, int] | None
) -> Precision:
    """`auto`, fp32, bf16 or fp16 -> what is used, and why.

    capability: (major, minor) of the CUDA device, the lowest over the ranks; None elsewhere.
    """
    kind = device.type
    if asked == "fp16" and kind != "cuda":
        raise ValueError(
            f"runtime.precision: fp16 needs a CUDA device, got {kind}; use auto, fp32 or bf16"
        )
    if asked != "auto":
        return Precision(asked, kind, "asked for")
    if kind != "cuda" or capability is None:
        return Precision("fp32", kind, f"auto on {kind}")
    name = "bf16" if capability >= NATIVE_BF16 else "fp32"
    verb = "has" if name == "bf16" else "lacks"
    major, minor = capability
    return Precision(name, kind, f"auto: capability {major}.{minor} {verb} bf16")


def apply_backend_settings(*, deterministic: bool) -> None:
    """TF32 for convolutions only; autotuned kernels unless runs must repeat bit for bit."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS insists on it
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)
