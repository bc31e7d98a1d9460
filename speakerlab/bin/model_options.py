"""Options of the commands that use a model: which one, and how it runs."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from speakerlab.inference.speaker_model import SpeakerModel, load_model

SPEAKERS = Path("speakers.safetensors")  # default of --speakers


def add_model_options(options: ArgumentParser) -> None:
    """Add `--model`, `--device` and `--precision`."""
    models = "experiment, model folder, .onnx file or hub:ID"
    options.add_argument("--model", required=True, metavar="MODEL", help=models)
    devices = "where to run (default: a GPU if there is one)"
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=devices)
    add_precision(options)


def add_precision(options: ArgumentParser) -> None:
    """Add `--precision`."""
    text = "precision of the network (default fp32); auto: bf16 on a GPU with bf16 hardware"
    options.add_argument("--precision", choices=("fp32", "bf16", "auto"), default="fp32", help=text)


def add_speakers(options: ArgumentParser) -> None:
    """Add `--speakers`."""
    text = f"file of the enrolled speakers (default {SPEAKERS})"
    options.add_argument("--speakers", type=Path, default=SPEAKERS, metavar="FILE", help=text)


def add_far(options: ArgumentParser) -> None:
    """Add `--far`."""
    text = "decide at this false-alarm rate instead of at the EER, e.g. 0.01"
    options.add_argument("--far", type=float, metavar="RATE", help=text)


def model_of(args: Namespace) -> SpeakerModel:
    """Load the model that the options name."""
    return load_model(args.model, device=args.device, precision=args.precision)
