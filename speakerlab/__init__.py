"""speakerlab: train, evaluate and use speaker-embedding models.

import speakerlab
model = speakerlab.load("exp/mini")
model.verify("a.wav", "b.wav")
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

# Importing the package and `speakerlab --help` need neither numpy nor torch.
if TYPE_CHECKING:
    import torch

    from speakerlab.inference.speaker_model import SpeakerModel

__version__ = "0.1.0"


def load(
    model: str | Path,
    *,
    device: "str | torch.device" = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "fp32",
    plugins: str | Path | None = None,
) -> "SpeakerModel":
    """Load an experiment, a model folder, an `.onnx` file, or a published model by name.

    model: a path, `hub:NAME` of the catalogue, or `hf:owner/name` of huggingface.co, also with
    `@REVISION`. device: auto, cpu, cuda, cuda:N or mps (Apple); auto is cuda if there is a GPU.
    precision: of the backbone; auto is bf16 on a GPU with bf16 hardware, else fp32. An `.onnx` file
    has the precision of its export. plugins: folder of the module with a model's class that is not
    part of speakerlab; its code is run. Raises ValueError or FileNotFoundError with one line.
    """
    from speakerlab.inference.speaker_model import load_model

    folder = None if plugins is None else Path(plugins)
    return load_model(model, device=device, precision=precision, plugins=folder)
