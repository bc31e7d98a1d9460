"""The most memory that work takes, or that a process has held.

Imports torch only for a GPU, since it would count in the memory of what does not use it.
"""

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROC = Path("/proc/self")
RESET_PEAK = "5"  # linux/Documentation/filesystems/proc.rst, clear_refs


@contextmanager
def peak_memory(device: "torch.device") -> Iterator[list[int]]:
    """Collect, at the end, the bytes that the block took at most; nothing where that is unknown.

    On a GPU what torch allocated; on a CPU how much the process grew (Linux only).
    """
    peak_bytes: list[int] = []
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak_bytes
        peak_bytes.append(torch.cuda.max_memory_allocated(device) - before)
        return
    try:
        # glibc: freed memory would hide what is taken now.
        ctypes.CDLL(None).malloc_trim(0)
        (PROC / "clear_refs").write_text(RESET_PEAK)
    except (OSError, AttributeError):
        yield peak_bytes
        return
    before = status_bytes("VmRSS")
    yield peak_bytes
    peak_bytes.append(status_bytes("VmHWM") - before)


def status_bytes(name: str) -> int:
    """Return a memory line of the process's status (Linux), e.g. `VmHWM`, the peak so far."""
    match = re.search(
        rf"^{name}:\s+(\d+) kB$", (PROC / "status").read_text(), re.MULTILINE
    )
    assert match is not None
    return 1024 * int(match[1])
