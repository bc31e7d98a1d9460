"""Files of 3D-Speaker and WeSpeaker: where a checkpoint lies, and the tensors in it.

In: the path of a checkpoint or of a folder that holds one. Out: the files that belong together, and
tensors by name, read so that no code of the file can run.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from speakerlab.checkpoints.toolkit_config import read_config

WESPEAKER_NAME = "avg_model.pt"
NAMES = (WESPEAKER_NAME, "embedding_model.ckpt")  # what the toolkits call their checkpoints
ENDINGS = (".ckpt", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint and what belongs to it were found."""

    checkpoint: Path
    config: Path | None
    classifier: Path | None  # 3D-Speaker's head


def find_checkpoint(path: Path) -> Source:
    """The checkpoint that a file or folder holds, with its configuration and its head."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such checkpoint; check the path")
    checkpoint = path if path.is_file() else _find_in(path)
    places = checkpoint.absolute().parents[:3]
    configs = (place / "config.yaml" for place in places if (place / "config.yaml").is_file())
    config = next((file for file in configs if read_config(file).toolkit), None)
    classifier = checkpoint.with_name("classifier.ckpt")
    return Source(checkpoint, config, classifier if classifier.exists() else None)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the CPU. Runs no code from the file.

    Takes off what training leaves around them: a "state_dict" or "model" that holds them, and the
    "module." of data-parallel training. Raises ValueError, one line, for any other content.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd about the file is an error or nothing
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling may raise anything; all of it means the same
        # Not torch's text: it advises to load the file with code and all.
        raise ValueError(
            f"{path}: is no checkpoint of tensors alone, got {type(error).__name__} from "
            "torch.load; nothing of it was run"
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path}: holds no tensors by name, got {type(content).__name__}")
    odd = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(f"{path}: must hold tensors alone, got {odd[0]!r} of another kind")
    broken = [name for name, value in content.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(
            f"{path}: must hold finite numbers, got NaN or infinity in {len(broken)} tensors "
            f"({', '.join(broken[:3])}); take another checkpoint"
        )
    prefix = "module." if all(name.startswith("module.") for name in content) else ""
    return {name.removeprefix(prefix): value for name, value in content.items()}


def _find_in(folder: Path) -> Path:
    """The checkpoint of a folder: by its name, the newest of an experiment, or the only one."""
    for name in NAMES:
        for pattern in (name, f"models/{name}", f"*/{name}"):
            if files := sorted(folder.glob(pattern)):
                return files[0]
    if saved := list(folder.glob("models/CKPT*/embedding_model.ckpt")):
        return max(saved, key=lambda file: (_saved_at(file.with_name("CKPT.yaml")), file))
    files = [file for file in sorted(folder.iterdir()) if file.suffix in ENDINGS]
    if len(files) != 1:
        shown = ", ".join(file.name for file in files[:5]) or "none"
        raise FileNotFoundError(
            f"{folder}: must hold one checkpoint, got {shown}; name the file itself"
        )
    return files[0]


def _saved_at(meta: Path) -> float:
    """When 3D-Speaker wrote a checkpoint; its trainer resumes from the newest."""
    try:
        values = yaml.safe_load(meta.read_text(encoding="utf-8"))
        return float(values["unixtime"])
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError):
        return 0.0
