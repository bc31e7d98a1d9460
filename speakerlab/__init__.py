"""speakerlab: train, evaluate and ship speaker-embedding models.

import speakerlab
model = speakerlab.load("exp/mini")
model.verify("a.wav", "b.wav")
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from speakerlab.inference.speaker_model import SpeakerModel

__version__ = "0.1.0"


def load(
    model: str | Path,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "fp32",
) -> "SpeakerModel":
    """Open an experiment, a model folder, an `.onnx` file, or `hub:ID` (a published model).

    precision: of the backbone; auto is bf16 on a GPU that has it, else fp32.
    """
    from speakerlab.inference import speaker_model  # now: the command line's help needs no torch

    return speaker_model.load(model, device=device, precision=precision)
