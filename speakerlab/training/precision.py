"""The one place that decides number formats. In: what was asked and the devices. Out: `Precision`.

Decided from the CUDA capability: the driver's "bf16 supported" also counts emulation, which is
slower than fp32. fp16 is only ever asked for. Convolutions may use TF32, matrix products may not.
"""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch

NATIVE_BF16 = (8, 0)  # Ampere
TENSOR_CORES = (7, 0)  # Volta
# AMD's capability is no measure: gfx906, which lacks bf16, and gfx90a, which has it, are 9.0.
ROCM_WITHOUT_BF16 = ("gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx908", "gfx909", "gfx10")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Card(NamedTuple):
    """What decides on a GPU. The smallest of several is the least capable one."""

    has_bf16: bool  # in hardware
    capability: tuple[int, int]
    text: str  # "capability 8.0", or AMD's "gfx90a"


@dataclass(frozen=True)
class Precision:
    """The format of the backbone's forward pass; parameters and the fp32 islands stay fp32."""

    name: str  # fp32, bf16 or fp16
    device_type: str  # the type alone ("cuda"): an index would switch torch's own checks off
    reason: str
    remarks: tuple[str, ...] = ()  # lines for the log: what a user may want to change

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def scales_loss(self) -> bool:
        """Whether gradients could vanish in this format."""
        return self.name == "fp16"

    def autocast(self) -> AbstractContextManager[object]:
        """Around the backbone only."""
        enabled = self.name != "fp32"
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=enabled)


def as_device(device: torch.device | str) -> torch.device:
    """A device from its name; ValueError, one line, for what is none."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device: must be a type and perhaps a number, got '{device}'; use cpu, cuda or cuda:0"
        ) from None


def card_of(device: torch.device) -> Card | None:
    """What decides on this device; None where it is no GPU of CUDA or ROCm."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip:
        arch: str = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return Card(not arch.startswith(ROCM_WITHOUT_BF16), (major, minor), arch)
    return Card((major, minor) >= NATIVE_BF16, (major, minor), f"capability {major}.{minor}")


def resolve_precision(
    asked: str,
    device: torch.device | str,
    cards: Sequence[Card] | None = None,
    *,
    conv_tf32: bool = True,
) -> Precision:
    """`auto`, fp32, bf16 or fp16 -> what is used, and why.

    cards: of every rank, the least capable decides; None where there are none. conv_tf32: only told
    in a remark. Raises ValueError for what is no device, and for fp16 without CUDA.
    """
    kind = as_device(device).type
    if asked == "fp16" and kind != "cuda":
        raise ValueError(
            f"runtime.precision: fp16 needs a CUDA device, got {kind}; use auto, fp32 or bf16"
        )
    card = min(cards) if cards and kind == "cuda" else None
    remarks = _remarks(asked, cards, conv_tf32) if cards and card is not None else ()
    if asked != "auto":
        return Precision(asked, kind, "asked for", tuple(remarks))
    if card is None:
        return Precision("fp32", kind, f"auto on {kind}")
    name, verb = ("bf16", "has") if card.has_bf16 else ("fp32", "lacks")
    return Precision(name, kind, f"auto: {card.text} {verb} bf16", tuple(remarks))


def _remarks(asked: str, cards: Sequence[Card], conv_tf32: bool) -> list[str]:
    """Lines on what was asked for, given the cards of all ranks."""
    lines, card = [], min(cards)
    if len(set(cards)) > 1:
        counts = sorted(Counter(cards).items())
        told = ", ".join(f"{kind.text} on {count} of {len(cards)}" for kind, count in counts)
        lines.append(f"ranks have different GPUs, got {told}; the least capable decides")
    if asked == "bf16" and not card.has_bf16:
        lines.append(
            f"runtime.precision: {card.text} only emulates bf16, which is slower than fp32, got "
            "bf16; use auto, or fp16"
        )
    if asked == "fp16" and card.capability < TENSOR_CORES:
        lines.append(
            f"runtime.precision: {card.text} has no tensor cores, fp16 saves memory but hardly "
            "time, got fp16; use auto"
        )
    if asked == "fp32" and card.has_bf16:
        lines.append(
            f"runtime.precision: {card.text} has bf16, which auto takes: faster, with half the "
            f"memory for activations; now convolutions use TF32: {'yes' if conv_tf32 else 'no'}, "
            "matrix products: no"
        )
    return lines


def apply_backend_settings(*, deterministic: bool, conv_tf32: bool = True) -> None:
    """TF32 for convolutions at most; autotuned kernels unless runs must repeat bit for bit.

    Only torch's older setters: after its newer ones (`fp32_precision`) the getters raise, and with
    them torch.compile.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS insists on it
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = conv_tf32
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)
