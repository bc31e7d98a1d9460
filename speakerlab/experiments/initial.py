"""Starting a training from a published model. In: its folder, new modules. Out: modules filled.

Letters: C classes, D embedding.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from speakerlab.checkpoints.model_files import find_model, read_classes
from speakerlab.checkpoints.published import read_tensors
from speakerlab.config.embedder import Embedder
from speakerlab.losses.head import Head

if TYPE_CHECKING:
    from speakerlab.config.schema import Config

log = logging.getLogger(__name__)


def init_from(
    path: Path,
    *,
    embedder: Embedder,
    head: Head,
    classes: Sequence[str],
    config: "Config",
) -> None:
    """Take all of a published model's embedder, and its head's rows of the same name.

    `classes` are the names of the head's rows; with training.init_head "drop" none are taken. Says
    what was loaded, made new and dropped. Raises ValueError where a tensor does not fit, or where
    the model was trained on other features.
    """
    folder = find_model(path)
    _check_front_end(folder, config)
    loaded = read_tensors(folder / "embedder.safetensors")
    own = embedder.state_dict()
    odd = [
        name
        for name in sorted(own.keys() | loaded.keys())
        if name not in own or name not in loaded or own[name].shape != loaded[name].shape
    ]
    if odd:
        raise ValueError(
            f"{folder}: must hold the model of this configuration, got {len(odd)} tensors that are "
            f"missing, unexpected or of another shape ({', '.join(odd[:3])}); use its model section"
        )
    embedder.load_state_dict(loaded)
    known = read_classes(folder) if (folder / "head.safetensors").exists() else []
    rows = 0
    if known and config.training.init_head != "drop":
        rows = _copy_rows(folder, head, classes, known)
    log.info(
        "initialised from %s: %d tensors of the embedder; head: %d of %d rows by name, %d made new,"
        " %d of the model's dropped",
        *(folder, len(own), rows, len(classes), len(classes) - rows, len(known) - rows),
    )


def _check_front_end(folder: Path, config: "Config") -> None:
    """A model goes on with the features it knows; dither alone may differ."""
    from speakerlab.config.schema import load_config

    theirs = load_config([folder / "config.yaml"]).frontend
    changed = [
        f"{key}: {theirs[key]} -> {value}"
        for key, value in config.frontend.items()
        if key != "dither" and theirs[key] != value
    ]
    if changed:
        raise ValueError(
            f"{folder}: was trained on other features, got {'; '.join(changed)}; "
            "use its frontend section"
        )


def _copy_rows(folder: Path, head: Head, classes: Sequence[str], known: Sequence[str]) -> int:
    """Rows of the parameters that both heads have in one shape; those without axes whole."""
    loaded = read_tensors(folder / "head.safetensors")
    fits = {
        name: parameter
        for name, parameter in head.named_parameters()
        if name in loaded and parameter.shape[1:] == loaded[name].shape[1:]
    }
    row_of = {name: row for row, name in enumerate(known)}
    pairs = [(new, row_of[name]) for new, name in enumerate(classes) if name in row_of]
    if "weight_CD" not in fits or not pairs:
        return 0
    first, last = head.row_range
    own = [(new - first, old) for new, old in pairs if first <= new < last]
    new, old = ([pair[side] for pair in own] for side in (0, 1))
    with torch.no_grad():
        for name, parameter in fits.items():
            if parameter.dim():
                parameter[new] = loaded[name][old]
            else:
                parameter.copy_(loaded[name])
    return len(pairs)
