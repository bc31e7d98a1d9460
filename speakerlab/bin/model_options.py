"""What the commands that use a model share: which one, and where it runs."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import speakerlab
from speakerlab.inference.speaker_model import SpeakerModel

SPEAKERS = Path("speakers.safetensors")  # where enrolled speakers are, unless said otherwise


def add_model_options(options: ArgumentParser) -> None:
    """`--model`, `--device` and `--precision`."""
    what = "experiment, model folder, .onnx file or hub:ID"
    options.add_argument("--model", required=True, metavar="MODEL", help=what)
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_precision(options)


def add_precision(options: ArgumentParser) -> None:
    """`--precision`."""
    what = "of the network (default fp32); auto: bf16 on a GPU that has it"
    options.add_argument("--precision", choices=("fp32", "bf16", "auto"), default="fp32", help=what)


def open_model(args: Namespace) -> SpeakerModel:
    """The model that `args` name."""
    return speakerlab.load(args.model, device=args.device, precision=args.precision)
