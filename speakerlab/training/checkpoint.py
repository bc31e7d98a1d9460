"""Checkpoints on disk: written atomically, verified when read.

`checkpoints/step_00000100/` holds `state.pt`, and `note.json` with its sha256.
"""

import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from speakerlab.core.reading import read_json

log = logging.getLogger(__name__)
STATE, NOTE = "state.pt", "note.json"


@dataclass(frozen=True)
class Note:
    """What is known of a checkpoint without reading its tensors."""

    step: int
    attempt: int  # number of roll-backs before
    scheduled: bool  # at a multiple of training.checkpoint_every_steps: may be averaged
    valid_eer: float | None  # of this very step, if it was validated
    sha256: Mapping[str, str]  # of every other file
    bytes: int
    valid_error: float | None = None  # the same for an identification

    @property
    def metric(self) -> float | None:
        """Return the validation metric, EER or error; lower is better."""
        return self.valid_eer if self.valid_error is None else self.valid_error


def list_checkpoints(folder: Path) -> list[Path]:
    """Return finished checkpoints, oldest first; a later attempt at a step comes later."""
    return sorted(folder.glob("step_*"))


def was_begun(exp_dir: Path) -> bool:
    """Return whether an experiment has a checkpoint to resume from."""
    return bool(list_checkpoints(exp_dir / "checkpoints"))


def read_note(folder: Path) -> Note:
    """Read the note of a checkpoint; raise OSError or ValueError if it is missing or damaged."""
    return read_json(folder / NOTE, Note, fix="remove its folder")


def read_checked(folder: Path) -> bytes:
    """Read the state of a checkpoint; raise OSError or ValueError if it is missing or damaged."""
    note, data = read_note(folder), (folder / STATE).read_bytes()
    if note.sha256 != {STATE: hashlib.sha256(data).hexdigest()}:
        raise ValueError(f"{folder / STATE}: damaged, its sha256 differs")
    return data


def read_latest(folder: Path) -> tuple[Path, bytes] | None:
    """Return folder and state of the newest intact checkpoint; None if there are none at all.

    Raises ValueError if none is intact: a run must not silently start again over its checkpoints.
    """
    found = list_checkpoints(folder)
    for one in reversed(found):
        try:
            return one, read_checked(one)
        except (OSError, ValueError) as error:
            log.warning("%s; trying the previous one", error)
    if found:
        raise ValueError(
            f"{folder}: none of {len(found)} checkpoints is intact; restore the folder, or move it "
            "away to start again"
        )
    return None


def load_state(data: bytes, *, where: Path | str = "checkpoint") -> dict[str, Any]:
    """Return the dictionary in a checkpoint's bytes, on the CPU. Runs no code from the file."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling may raise anything
        # Not torch's text: it advises to load the file with all its code.
        raise ValueError(
            f"{where}: holds more than tensors and plain values ({type(error).__name__}); "
            "remove its folder to resume from the one before"
        ) from None


def snapshot(value: Any) -> Any:
    """Return a copy on the CPU of nested mappings and lists, which later steps do not change."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


def write_tensors(path: Path, value: Any) -> str:
    """Write a file that survives a power loss; return its sha256."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getbuffer()
    write_synced(path, data)
    return hashlib.sha256(data).hexdigest()


def write_synced(path: Path, data: Any) -> None:
    """Write bytes, and return when they are on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def finish(partial: Path, final: Path, note: Note) -> None:
    """Write the note, the last file of a checkpoint, and give the folder its final name."""
    write_synced(partial / NOTE, json.dumps(asdict(note), indent=1).encode())
    old = final.with_name(f".{final.name}.replaced")  # damaged, or without its validation
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.replace(old)
    partial.replace(final)
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: Path, *, keep: int) -> None:
    """Keep the newest checkpoint, the `keep` newest scheduled ones and the best validated one."""
    notes: dict[Path, Note] = {}
    for one in list_checkpoints(folder):
        try:
            notes[one] = read_note(one)
        except (OSError, ValueError):
            shutil.rmtree(one, ignore_errors=True)
    scheduled = [one for one, note in notes.items() if note.scheduled]
    validated = [one for one, note in notes.items() if note.metric is not None]
    best = sorted(validated, key=lambda one: (notes[one].metric, notes[one].step))[:1]
    kept = {*list(notes)[-1:], *scheduled[-keep:], *best}
    for one in notes.keys() - kept:
        shutil.rmtree(one, ignore_errors=True)
