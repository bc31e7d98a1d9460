"""Files of enrolled speakers. In and out: name -> unit vector (D,), of one model.

A file is safetensors: the tensor `unit_ND`; as metadata the names, a JSON list, and the sha256 that
names the space of the embeddings: of the model or, for a student, of its teacher
(`model_files.space_of`). Letters: N speakers, D embedding dimensions.
"""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from speakerlab.core.atomic import alone, replacing
from speakerlab.core.reading import parse_json

Speakers = Mapping[str, np.ndarray]
# The lock of a file is between processes; this one is between the threads of a process.
_one_thread = threading.Lock()


def write_speakers(path: Path, speakers: Speakers, *, space: str) -> None:
    """Write a file atomically, in place of an older one."""
    metadata = {
        "model_sha256": space,
        "names": json.dumps(list(speakers)),
    }
    unit_ND = np.stack(list(speakers.values()))
    with replacing(path) as partial_file:
        save_file({"unit_ND": unit_ND}, partial_file, metadata)


def add_speakers(path: Path, speakers: Speakers, *, space: str) -> None:
    """Add speakers to a file; replace speakers of the same names, keep the others.

    Several processes and threads may do so at the same time. Raises ValueError if the file is of
    another model.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A link and its target are one file, with one lock.
    path = path.resolve()
    lock = path.with_name(f".{path.name}.lock")
    with _one_thread, alone(lock):
        # Read under the lock: another process may have added speakers a moment ago.
        stored: Speakers = {}
        if path.exists():
            stored = read_speakers(path, space=space)
        write_speakers(path, {**stored, **speakers}, space=space)


def read_speakers(path: Path, *, space: str) -> dict[str, np.ndarray]:
    """Read a file; ValueError if it is damaged, or made with another model."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; enrol speakers first")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            unit_ND = file.get_tensor("unit_ND")
        digest = metadata["model_sha256"]
        names = parse_json(metadata["names"], list[str], where=path)
        # NaN, another number of vectors, or vectors of another length: each is a ValueError.
        finite_ND = np.asarray_chkfinite(unit_ND).astype("f8")
        finite_ND = finite_ND.reshape(len(names), -1)
        norm_N = np.linalg.norm(finite_ND, axis=1)
        has_unit_length_N = np.isclose(norm_N, 1, atol=1e-3)
        if not has_unit_length_N.all():
            raise ValueError("vectors are not of length 1")
    # safetensors, JSON and numpy raise different errors for a damaged file.
    except (
        SafetensorError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(
            f"{path}: holds no speakers ({error}); enrol them again"
        ) from error
    # Embeddings of different models cannot be compared, even if their dimensions are equal.
    if digest != space:
        raise ValueError(
            f"{path}: was made with model {digest[:12]}, not with {space[:12]}"
            " (sha256); enrol the speakers with this model"
        )
    return dict(zip(names, unit_ND))
