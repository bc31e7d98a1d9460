"""The most memory that something takes. In: a device, while a `with` lasts. Out: bytes.

On a GPU what torch allocated; on a CPU how much the process grew, where the system (Linux) can
begin to count anew.
"""

import ctypes
import gc
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

PROC = Path("/proc/self")
RESET_PEAK = "5"  # linux/Documentation/filesystems/proc.rst, clear_refs


class PeakMemory:
    """`with PeakMemory(device) as peak: ...`, then `peak.bytes`; None where it cannot be known."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None
        self._before: int | None = None

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._before = _begin_host()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._before is None:
            return
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else _status("VmHWM")
        self.bytes = peak - self._before


def _begin_host() -> int | None:
    """What the process holds now, from which its peak is counted anew; None where it cannot be."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: what was freed would hide what is taken now
        (PROC / "clear_refs").write_text(RESET_PEAK)
        return _status("VmRSS")
    return None


def _status(name: str) -> int:
    """A line of the process's status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", (PROC / "status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
