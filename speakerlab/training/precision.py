"""Choose number formats.

The hardware decides: the driver's "bf16 supported" also counts emulation, which is slower than
fp32. fp16 is never chosen automatically. Convolutions may use TF32, matrix products may not.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from speakerlab.core import system

# NVIDIA's capability of Ampere, the first generation that computes in bf16.
NATIVE_BF16 = (8, 0)
# AMD's capability is no measure: gfx906, which lacks bf16, and gfx90a, which has it, are both 9.0.
ROCM_WITHOUT_BF16 = (
    "gfx8",
    "gfx900",
    "gfx902",
    "gfx904",
    "gfx906",
    "gfx908",
    "gfx909",
    "gfx10",
)
# Settings of torch's GPU memory allocator; older versions read the second variable.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Card(NamedTuple):
    """Capabilities of a GPU or CPU; the minimum of several is the least capable one."""

    has_bf16: bool  # in hardware
    text: str  # "capability 8.0", or AMD's "gfx90a"


@dataclass(frozen=True)
class Precision:
    """The format of the backbone's forward pass; parameters and the fp32 islands stay fp32."""

    name: str  # fp32, bf16 or fp16
    # The type alone ("cuda"): an index would switch torch's own checks off.
    device_type: str
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def scales_loss(self) -> bool:
        """Return whether small gradients become 0 in this format unless the loss is scaled."""
        return self.name == "fp16"

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the backbone runs."""
        # Without a cache of converted weights: a CUDA graph would use the outdated copies again.
        return torch.autocast(  # noqa: TID251
            device_type=self.device_type,
            dtype=self.dtype,
            enabled=self.name != "fp32",
            cache_enabled=False,
        )


def card_of(device: torch.device) -> Card | None:
    """Return the capabilities of a CPU, or of a GPU of CUDA or ROCm; None for another device."""
    if device.type == "cpu":
        # Older versions of torch lack this function, and so cannot tell. A CPU with AMX has
        # AVX512-BF16, too.
        is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        has_bf16 = is_supported is not None and is_supported()
        return Card(has_bf16, "this CPU")
    if device.type != "cuda":
        return None
    if torch.version.hip:
        # The full name has features behind a colon: `gfx90a:sramecc+:xnack-`.
        full_name: str = torch.cuda.get_device_properties(device).gcnArchName
        arch, _, _ = full_name.partition(":")
        return Card(not arch.startswith(ROCM_WITHOUT_BF16), arch)
    major, minor = torch.cuda.get_device_capability(device)
    has_bf16 = (major, minor) >= NATIVE_BF16
    return Card(has_bf16, f"capability {major}.{minor}")


def resolve_precision(
    asked: str, device: torch.device | str, cards: Sequence[Card | None] = ()
) -> Precision:
    """Resolve auto, fp32, bf16 or fp16 to the format in use, and why.

    cards: of every rank, None if unknown; the least capable decides; without any, auto is fp32.
    Raises ValueError for an invalid device, and for fp16 without CUDA.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(
            f"device: unknown device '{device}'; use cpu, cuda or cuda:0"
        ) from None
    if asked == "fp16" and kind != "cuda":
        raise ValueError(
            f"runtime.precision: fp16 needs a CUDA device, not {kind}; use auto, fp32"
            " or bf16"
        )
    known_cards = [card for card in cards if card is not None]
    if not known_cards:
        if asked == "auto":
            return Precision("fp32", kind, f"auto on {kind}")
        return Precision(asked, kind, "as configured")

    # All ranks use one format, which the least capable card must have in hardware.
    card = min(known_cards)
    capability = _describe_least_capable(known_cards)
    best = "bf16" if card.has_bf16 else "fp32"
    if asked == "auto":
        return Precision(best, kind, f"auto: {capability}")
    differs = "" if asked == best else f"; {capability}, auto would take {best}"
    return Precision(asked, kind, f"as configured{differs}")


def _describe_least_capable(cards: Sequence[Card]) -> str:
    """Return whether the least capable card has bf16: "capability 7.0 lacks bf16"."""
    card = min(cards)
    rank_note = ""
    if len(set(cards)) > 1:
        rank_note = f", the least capable of {len(cards)} ranks,"
    verb = "has" if card.has_bf16 else "lacks"
    return f"{card.text}{rank_note} {verb} bf16"


def apply_backend_settings(*, deterministic: bool, conv_tf32: bool = True) -> None:
    """Allow TF32 for convolutions at most; autotune them unless runs must be deterministic.

    Call it before a GPU is used. Uses torch's older setters: after its newer ones
    (`fp32_precision`) the getters raise, and so does torch.compile.
    """
    # Without expandable segments, validation fragments the memory, and training cannot use the
    # pieces. On WSL, the first allocation fails with them
    # (github.com/pytorch/pytorch/issues/192330).
    is_configured = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    if not is_configured and not system.is_on_wsl():
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    # cuBLAS is deterministic only with a workspace of fixed size; torch raises without it.
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = conv_tf32
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)
