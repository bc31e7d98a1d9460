"""Training state on disk: written whole or not at all, verified when read.

`checkpoints/step_00000100/` holds `state.pt` and `sha256`. In: a dictionary of state dicts and
plain values. Out: the same, from the newest directory that is intact.
"""

import hashlib
import io
import logging
import math
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one experiment; only global rank 0 holds one of these."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the state of `step`, then drop all but the newest `keep`.

        Raises ValueError, and keeps what there is, if a tensor of the state is not finite.
        """
        for name in ("task", "optimizer"):
            for path in _non_finite(state[name], name):
                raise ValueError(f"step {step}: state is not finite, got {path}; nothing was saved")
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        data = buffer.getbuffer()
        final = self.folder / f"step_{step:08d}"
        fresh = self.folder / f".{final.name}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        _write_synced(fresh / "state.pt", data)
        _write_synced(fresh / "sha256", hashlib.sha256(data).hexdigest().encode())
        shutil.rmtree(final, ignore_errors=True)
        fresh.replace(final)
        _sync_folder(self.folder)
        for old in self.list()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def list(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(self.folder.glob("step_????????"))

    def read_latest(self) -> bytes | None:
        """The newest intact state as bytes for `load_state`; None where there is none."""
        for folder in reversed(self.list()):
            try:
                data = (folder / "state.pt").read_bytes()
                wanted = (folder / "sha256").read_text(encoding="ascii")
            except OSError as error:
                log.warning("%s: cannot be read (%s); trying the one before", folder, error)
                continue
            if hashlib.sha256(data).hexdigest() == wanted:
                return data
            log.warning("%s: is damaged (sha256 differs); trying the one before", folder)
        return None


def load_state(data: bytes) -> dict[str, Any]:
    """Bytes of a checkpoint -> its dictionary, on the CPU. Runs no code from the file."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        # Not torch's text: it advises to load the file with code and all.
        raise ValueError(
            "checkpoint: holds more than tensors and plain values, got "
            f"{type(error).__name__}; remove its folder to go on from the one before"
        ) from None


def _non_finite(value: Any, path: str) -> list[str]:
    if isinstance(value, Tensor):
        return [] if not value.is_floating_point() or bool(value.isfinite().all()) else [path]
    if isinstance(value, float):
        return [] if math.isfinite(value) else [path]
    items = value.items() if isinstance(value, Mapping) else []
    return [bad for key, item in items for bad in _non_finite(item, f"{path}.{key}")]


def _write_synced(path: Path, data: Any) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
