"""Segmentation networks of pyannote.audio, imported as model folders.

In: the tensors of pyannote/segmentation-3.0 (`pytorch_model.bin`), or of another network of its
kind. The sizes follow from their shapes.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from speakerlab.checkpoints.published import (
    PublishedSegmenter,
    load_segmenter,
    publish,
    unfit_names,
)
from speakerlab.config.build import build_segmenter
from speakerlab.config.schema import parse_config
from speakerlab.core.atomic import file_sha256
from speakerlab.core.powerset import NUM_SETS
from speakerlab.core.shapes import shapes_only

# A tensor that only these networks have.
LOW_HZ = "sincnet.conv1d.0.filterbank.low_hz_"
# Constants of the filters, which are computed here.
CONSTANTS = tuple(f"sincnet.conv1d.0.filterbank.{name}" for name in ("window_", "n_"))
# Argument of our network -> a tensor, and the axis that has its size.
SIZES = {
    "channels": ("sincnet.conv1d.1.weight", 0),
    "lstm_dim": ("lstm.weight_hh_l0", 1),
    "linear_dim": ("linear.0.weight", 0),
}
WINDOW_SECONDS = 10.0


def is_segmenter(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a checkpoint is a segmentation network."""
    return LOW_HZ in tensors


def import_segmenter(
    path: Path,
    out: Path,
    tensors: Mapping[str, Tensor],
    *,
    about: Mapping[str, str],
    force: bool,
) -> PublishedSegmenter:
    """Write the model folder of a segmentation network; ValueError if any tensor does not fit."""
    config = parse_config(
        {
            "task": "segmentation",
            "model": {"name": "pyannet", "args": _sizes(tensors, path)},
            "frontend": {"name": "wave"},
            "augment": {
                "speeds": [1.0],
                "spec": {"num_freq_masks": 0, "num_time_masks": 0},
            },
            "data": {"crop_seconds": WINDOW_SECONDS},
        },
        origin={"": str(path)},
    )
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in CONSTANTS:
            state[f"backbone.{name}"] = tensor
    with shapes_only():
        wanted = build_segmenter(config).state_dict()
    unfit = unfit_names(state, wanted=wanted)
    if unfit:
        published_names = [name.removeprefix("backbone.") for name in unfit[:3]]
        raise ValueError(
            f"{path}: is not a PyanNet as in pyannote/segmentation-3.0: {len(unfit)}"
            f" tensors are missing, unexpected or of another shape"
            f" ({', '.join(published_names)}); nothing was imported"
        )
    segmenter = build_segmenter(config)
    segmenter.load_state_dict(state)
    source = {
        "toolkit": "pyannote",
        "file": path.name,
        "sha256": file_sha256(path) if path.is_file() else None,
        "architecture": "pyannet",
        **about,
    }
    publish(
        out, embedder=segmenter, config=config, facts={"source": source}, force=force
    )
    return load_segmenter(out)


def _sizes(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Return the arguments of the network; ValueError for other sets of speakers."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    classifier_shape = shapes.get("classifier.weight", (0,))
    num_classes = classifier_shape[0]
    if num_classes != NUM_SETS:
        raise ValueError(
            f"{path}: is a segmentation network with {num_classes} classes; only those with"
            f" {NUM_SETS} can be used: sets of at most two of three speakers"
        )
    args: dict[str, Any] = {
        # A band has two filters, a cosine and a sine.
        "num_filters": 2 * shapes[LOW_HZ][0],
        "lstm_layers": _count_layers(shapes, r"lstm\.weight_hh_l(\d+)"),
        "linear_layers": _count_layers(shapes, r"linear\.(\d+)\.weight"),
    }
    for arg, (name, axis) in SIZES.items():
        if name in shapes:
            args[arg] = shapes[name][axis]
    return args


def _count_layers(names: Iterable[str], pattern: str) -> int:
    """Return the number of layers: one more than the largest number in their names."""
    num_layers = 0
    for name in names:
        match = re.fullmatch(pattern, name)
        if match is not None:
            num_layers = max(num_layers, int(match[1]) + 1)
    return num_layers
