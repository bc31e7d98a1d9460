"""Files of enrolled speakers. In and out: name -> unit vector (D,), of one model.

A file is safetensors: the tensor `unit_ND`; as metadata the names, a JSON list, the sha256 of the
model, and the sha256 that names the space of its embeddings (`model_files.space_of`): a student
reads the file of its teacher. Letters: N speakers, D embedding dimensions.
"""

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from speakerlab.core.atomic import locked, replacing
from speakerlab.core.reading import parse_json, refuse_twins
from speakerlab.data.tables import CONTROLS

Speakers = Mapping[str, np.ndarray]
# The lock of a file is between processes; this one is between the threads of a process.
_one_thread = threading.Lock()


class Enrolled(NamedTuple):
    """Content of a file."""

    speakers: dict[str, np.ndarray]
    model_sha256: str  # of the model that enrolled them


def check_name(name: Any, enrolled: Iterable[str]) -> None:
    """Raise ValueError unless a speaker may have this name beside those who are enrolled."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"enrol: a speaker needs a name, got {name!r}")
    if CONTROLS.search(name):
        raise ValueError(
            f"enrol: a name must be one line without control characters, got {name!r}"
        )
    if name != name.strip():
        raise ValueError(
            f"enrol: a name must not begin or end with a blank, got {name!r}"
        )
    refuse_twins([*enrolled, name], where="enrol", kind="speakers")


def write_speakers(
    path: Path,
    speakers: Speakers,
    *,
    model_sha256: str,
    space: str,
) -> None:
    """Write a file atomically, in place of an older one."""
    metadata = {
        "model_sha256": model_sha256,
        "space": space,
        "names": json.dumps(list(speakers)),
    }
    unit_ND = np.stack(list(speakers.values()))
    content = save({"unit_ND": unit_ND}, metadata)
    # Not `save_file`, whose error on a full disk is no OSError.
    with replacing(path) as partial_file:
        partial_file.write_bytes(content)


def add_speakers(
    path: Path,
    speakers: Speakers,
    *,
    model_sha256: str,
    space: str,
) -> None:
    """Add speakers to a file; replace speakers of the same names, keep the others.

    Several processes and threads may do so at the same time. Raises ValueError if the file is of
    another model, also of the same space: scores of a speaker depend on the model that enrolled it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A link and its target are one file, with one lock.
    path = path.resolve()
    lock = path.with_name(f".{path.name}.lock")
    with _one_thread, locked(lock):
        # Read under the lock: another process may have added speakers a moment ago.
        stored: Speakers = {}
        if path.exists():
            enrolled = read_speakers(path, space=space)
            _refuse_other_model(path, enrolled.model_sha256, model_sha256)
            stored = enrolled.speakers
        write_speakers(
            path,
            {**stored, **speakers},
            model_sha256=model_sha256,
            space=space,
        )


def read_speakers(path: Path, *, space: str) -> Enrolled:
    """Read a file; ValueError if it is damaged, or made with a model of another space."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; enrol speakers first")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            unit_ND = file.get_tensor("unit_ND")
        model_sha256 = metadata["model_sha256"]
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
    # Embeddings of different spaces cannot be compared, even if their dimensions are equal. Older
    # files lack the space of their model.
    if space not in (model_sha256, metadata.get("space")):
        _refuse_other_model(path, model_sha256, space)
    return Enrolled(dict(zip(names, unit_ND)), model_sha256)


def _refuse_other_model(path: Path, theirs: str, ours: str) -> None:
    """Raise ValueError if a file was made with another model."""
    if theirs != ours:
        raise ValueError(
            f"{path}: was made with model {theirs[:12]}, not with {ours[:12]} (sha256);"
            " enrol the speakers with this model"
        )
