"""A pretrained model on disk, as Hugging Face stores it: its description and its weights.

In: a folder, or `hf:owner/name`. Out: plain values of `config.json` and
`preprocessor_config.json`, and tensors. Nothing in a file is run: weights are safetensors, or a
`pytorch_model.bin` that is read as tensors only.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from speakerlab.core import huggingface
from speakerlab.core.atomic import file_sha256
from speakerlab.core.reading import read_json

HUB = huggingface.PREFIX
ARCHITECTURE = "config.json"
PREPROCESSING = "preprocessor_config.json"
# The weights, in the order in which they are looked for. Those of large models are split over
# several files, which an index lists.
SAFE = "model.safetensors"
SAFE_INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


class Description(NamedTuple):
    """What a pretrained model is, without its weights."""

    architecture: dict[str, Any]  # of config.json
    preprocessing: dict[str, Any]  # of preprocessor_config.json


def find_folder(model: str, *, needs_weights: bool = True) -> Path:
    """Return the folder of a pretrained model; models of a hub are downloaded on first use.

    model: a folder, or `hf:owner/name`, also with a revision, `hf:owner/name@revision`.
    needs_weights: not only the description. Raises ValueError with one line if there is none.
    """
    if model.startswith(HUB):
        return _download(model, needs_weights=needs_weights)
    folder = Path(model)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(
            f"frontend.model: {model} {problem}; give the folder of a model, with its"
            f" {ARCHITECTURE}, or {HUB}owner/name"
        )
    return folder


def describe(model: str) -> Description:
    """Read the description of a pretrained model; ValueError if a file is missing or unreadable."""
    folder = find_folder(model, needs_weights=False)
    for name in (ARCHITECTURE, PREPROCESSING):
        if (folder / name).exists():
            continue
        reason = ""
        if name == PREPROCESSING:
            reason = ", which says how its input is normalised"
        raise ValueError(
            f"{folder}: has no {name}{reason}; copy it from the page of the model"
        )
    return Description(
        architecture=_read_object(folder / ARCHITECTURE),
        preprocessing=_read_object(folder / PREPROCESSING),
    )


def weights_sha256(folder: Path) -> str:
    """Return the sha256 of the weights; of several files, that of their digests in a row."""
    digests = [file_sha256(path) for path in find_weights(folder)]
    if len(digests) == 1:
        return digests[0]
    in_a_row = "".join(digests).encode()
    return hashlib.sha256(in_a_row).hexdigest()


def find_weights(folder: Path) -> list[Path]:
    """Return the files of the weights; ValueError if there are none, or one of them is missing."""
    if (folder / SAFE).exists():
        return [folder / SAFE]
    if (folder / SAFE_INDEX).exists():
        index = _read_object(folder / SAFE_INDEX)
        names = sorted(set(index.get("weight_map", {}).values()))
        for name in names:
            if not (folder / name).exists():
                raise ValueError(
                    f"{folder / name}: is missing, but listed in {SAFE_INDEX}; the"
                    " download is incomplete: download the model again"
                )
        return [folder / name for name in names]
    if (folder / PICKLED).exists():
        return [folder / PICKLED]
    raise ValueError(
        f"{folder}: has no weights ({SAFE} or {PICKLED}); download the model again"
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a pretrained model; ValueError with one line for a damaged file."""
    tensors: dict[str, Tensor] = {}
    for path in find_weights(folder):
        try:
            if path.name == PICKLED:
                tensors |= torch.load(path, map_location="cpu", weights_only=True)
            else:
                tensors |= load_file(path)
        except OSError:
            raise
        # A damaged file raises errors of many kinds, and torch advises running its code.
        except Exception as error:
            raise ValueError(
                f"{path}: cannot be read as tensors ({type(error).__name__}); the"
                " download may be incomplete: download the model again"
            ) from None
    return tensors


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object."""
    values = read_json(path, fix="download the model again")
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: is not a description of a model; download the model again"
        )
    return values


def _download(model: str, *, needs_weights: bool) -> Path:
    """Return the folder of a model of huggingface.co in the cache of `huggingface_hub`."""
    description = (ARCHITECTURE, PREPROCESSING)
    try:
        if not needs_weights:
            return huggingface.fetch(model, description)
        safe = (SAFE, SAFE_INDEX, "model-*.safetensors")
        folder = huggingface.fetch(model, (*description, *safe))
        has_safe_weights = (folder / SAFE).exists() or (folder / SAFE_INDEX).exists()
        if not has_safe_weights:
            folder = huggingface.fetch(model, (*description, PICKLED))
    except ValueError as error:
        raise ValueError(f"frontend.model: {error}") from None
    return folder
