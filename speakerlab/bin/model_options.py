"""What the commands that use a model share: which one, and where it runs."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import speakerlab
from speakerlab.inference.speaker_model import SpeakerModel

SPEAKERS = Path("speakers.safetensors")  # where enrolled speakers are, unless said otherwise


def add_model_options(options: ArgumentParser) -> None:
    """`--model` and `--device`."""
    what = "experiment, model folder, .onnx file or hub:ID"
    options.add_argument("--model", required=True, metavar="MODEL", help=what)
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def open_model(args: Namespace) -> SpeakerModel:
    """The model that `args` name."""
    return speakerlab.load(args.model, device=args.device)
