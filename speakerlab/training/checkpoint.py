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
STATE = "state.pt"
NOTE = "note.json"


@dataclass(frozen=True)
class Note:
    """Facts about a checkpoint that can be read without its tensors."""

    step: int
    attempt: int  # number of roll-backs before
    scheduled: bool  # at a multiple of training.checkpoint_every_steps: may be averaged
    valid_eer: float | None  # of exactly this step, if it was validated
    sha256: Mapping[str, str]  # of every other file
    bytes: int
    valid_error: float | None = None  # instead of the EER, for an identification

    @property
    def metric(self) -> float | None:
        """Return the validation metric, EER or error; lower is better."""
        if self.valid_error is not None:
            return self.valid_error
        return self.valid_eer


def list_checkpoints(folder: Path) -> list[Path]:
    """Return finished checkpoints, oldest first; a later attempt at a step comes later."""
    # Names have the step with zeros in front. An unfinished checkpoint has a dot in front.
    return sorted(folder.glob("step_*"))


def read_step(folder: Path) -> int:
    """Return the step in the name of a checkpoint: 30 of `step_00000030_attempt_1`."""
    parts = folder.name.split("_")
    return int(parts[1])


def was_begun(exp_dir: Path) -> bool:
    """Return whether an experiment has a checkpoint to resume from."""
    return bool(list_checkpoints(exp_dir / "checkpoints"))


def read_note(folder: Path) -> Note:
    """Read the note of a checkpoint; raise OSError or ValueError if it is missing or damaged."""
    return read_json(folder / NOTE, Note, fix="remove its folder")


def read_checked(folder: Path) -> bytes:
    """Read the state of a checkpoint; raise OSError or ValueError if it is missing or damaged."""
    note = read_note(folder)
    data = (folder / STATE).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if note.sha256 != {STATE: digest}:
        raise ValueError(f"{folder / STATE}: damaged, its sha256 differs")
    return data


def read_latest(folder: Path) -> tuple[Path, bytes] | None:
    """Return folder and state of the newest intact checkpoint; None if there are none at all.

    Raises ValueError if none is intact: a run must not silently start again over its checkpoints.
    """
    checkpoints = list_checkpoints(folder)
    # The newest one may be damaged, for example by a power loss.
    for checkpoint in reversed(checkpoints):
        try:
            return checkpoint, read_checked(checkpoint)
        except (OSError, ValueError) as error:
            log.warning("%s; trying the previous one", error)
    if checkpoints:
        raise ValueError(
            f"{folder}: none of {len(checkpoints)} checkpoints is intact; restore the folder,"
            " or move it away to start again"
        )
    return None


def load_state(data: bytes, *, where: Path | str = "checkpoint") -> dict[str, Any]:
    """Return the dictionary in a checkpoint's bytes, on the CPU. Runs no code from the file."""
    file = io.BytesIO(data)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling may raise anything
        # Omit torch's text: it advises loading the file with all its code.
        raise ValueError(
            f"{where}: holds more than tensors and plain values"
            f" ({type(error).__name__}); remove its folder to resume from the one"
            " before"
        ) from None


def snapshot(value: Any) -> Any:
    """Return a copy on the CPU of nested mappings and lists, which later steps do not change."""

    def copy_to_cpu(tensor: Tensor) -> Tensor:
        # `copy`: without it, a tensor that is on the CPU already would be returned as it is.
        return tensor.detach().to("cpu", copy=True)

    return tree_map_only(Tensor, copy_to_cpu, value)


def write_tensors(path: Path, value: Any) -> str:
    """Write a file that survives a power loss; return its sha256."""
    # Serialised in memory first, so that the digest does not depend on the disk.
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
    facts = asdict(note)
    text = json.dumps(facts, indent=1)
    write_synced(partial / NOTE, text.encode())

    # An earlier checkpoint of this step is damaged, or was saved before its validation.
    # A folder cannot be replaced in one move, so the old one is moved out of the way first.
    old = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.replace(old)
    partial.replace(final)
    shutil.rmtree(old, ignore_errors=True)

    # A power loss must not undo the renaming: the folder is synced, too.
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: Path, *, keep: int) -> None:
    """Keep the newest checkpoint, the `keep` newest scheduled ones and the best validated one."""
    notes: dict[Path, Note] = {}
    for checkpoint in list_checkpoints(folder):
        try:
            notes[checkpoint] = read_note(checkpoint)
        # Without its note, a checkpoint cannot be verified, and so a run cannot resume from it.
        except (OSError, ValueError):
            shutil.rmtree(checkpoint, ignore_errors=True)

    newest = list(notes)[-1:]
    scheduled: list[Path] = []
    validated: list[tuple[float, int, Path]] = []
    for path, note in notes.items():
        if note.scheduled:
            scheduled.append(path)
        if note.metric is not None:
            validated.append((note.metric, note.step, path))
    # Of equal metrics, the earliest step is the best, and its first attempt.
    validated.sort()
    best = [path for _, _, path in validated[:1]]

    retained = {*newest, *scheduled[-keep:], *best}
    for checkpoint in notes.keys() - retained:
        shutil.rmtree(checkpoint, ignore_errors=True)
