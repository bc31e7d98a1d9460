"""Choose number formats.

The hardware decides: the driver's "bf16 supported" also counts emulation, which is slower than
fp32. fp16 is never chosen automatically. Convolutions may use TF32, matrix products may not.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

NATIVE_BF16 = (8, 0)  # Ampere
# AMD's capability is no measure: gfx906, which lacks bf16, and gfx90a, which has it, are 9.0.
ROCM_WITHOUT_BF16 = ("gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx908", "gfx909", "gfx10")
OF_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second: of older torch
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Card(NamedTuple):
    """Capabilities of a GPU or CPU; the minimum of several is the least capable one."""

    has_bf16: bool  # in hardware
    text: str  # "capability 8.0", or AMD's "gfx90a"


@dataclass(frozen=True)
class Precision:
    """The format of the backbone's forward pass; parameters and the fp32 islands stay fp32."""

    name: str  # fp32, bf16 or fp16
    device_type: str  # the type alone ("cuda"): an index would switch torch's own checks off
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def scales_loss(self) -> bool:
        """Return whether gradients may vanish in this format."""
        return self.name == "fp16"

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context; it keeps no copies of weights, which a CUDA graph would use again."""
        enabled = self.name != "fp32"
        return torch.autocast(self.device_type, self.dtype, enabled, cache_enabled=False)  # noqa: TID251


def card_of(device: torch.device) -> Card | None:
    """Return the capabilities of a CPU, or of a GPU of CUDA or ROCm; None for another device."""
    if device.type == "cpu":
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)  # or AMX
        return Card(supported(), "this CPU")
    if device.type != "cuda":
        return None
    if torch.version.hip:
        arch: str = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return Card(not arch.startswith(ROCM_WITHOUT_BF16), arch)
    major, minor = torch.cuda.get_device_capability(device)
    return Card((major, minor) >= NATIVE_BF16, f"capability {major}.{minor}")


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
        raise ValueError(f"device: unknown device '{device}'; use cpu, cuda or cuda:0") from None
    if asked == "fp16" and kind != "cuda":
        raise ValueError(
            f"runtime.precision: fp16 needs a CUDA device, not {kind}; use auto, fp32 or bf16"
        )
    known = [card for card in cards if card is not None]
    if not known:
        if asked == "auto":
            return Precision("fp32", kind, f"auto on {kind}")
        return Precision(asked, kind, "as configured")
    card = min(known)
    least = f", the least capable of {len(known)} ranks," if len(set(known)) > 1 else ""
    found = f"{card.text}{least} {'has' if card.has_bf16 else 'lacks'} bf16"
    best = "bf16" if card.has_bf16 else "fp32"
    if asked == "auto":
        return Precision(best, kind, f"auto: {found}")
    differs = "" if asked == best else f"; {found}, auto would take {best}"
    return Precision(asked, kind, f"as configured{differs}")


def apply_backend_settings(*, deterministic: bool, conv_tf32: bool = True) -> None:
    """Allow TF32 for convolutions at most; autotune them unless runs must be deterministic.

    Call it before a GPU is used. Uses torch's older setters: after its newer ones
    (`fp32_precision`) the getters raise, and so does torch.compile.
    """
    if not any(name in os.environ for name in OF_ALLOCATOR):
        # Else memory cut into pieces of other sizes, as in validation, is lost to training.
        os.environ[OF_ALLOCATOR[0]] = "expandable_segments:True"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS insists on it
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = conv_tf32
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic)


@contextmanager
def without_autotuning() -> Iterator[None]:
    """Choose cuDNN's kernels without timing them, which takes longer where shapes vary."""
    cudnn = torch.backends.cudnn  # its own context manager would also set what it is not given
    tunes, cudnn.benchmark = cudnn.benchmark, False
    try:
        yield
    finally:
        cudnn.benchmark = tunes
