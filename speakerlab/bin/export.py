"""Write a model as ONNX, or as a 3D-Speaker checkpoint."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from speakerlab.bin.command import parser

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab export MODEL --out FILE [--format onnx|3dspeaker] [--int8 --calibrate DIR]`"""
    options = parser("export", __doc__)
    options.add_argument("model", type=Path, metavar="MODEL", help="model folder or experiment")
    options.add_argument("--out", type=Path, required=True, metavar="FILE")
    options.add_argument("--format", choices=("onnx", "3dspeaker"), default="onnx")
    options.add_argument("--int8", action="store_true", help="8-bit weights and products, for CPUs")
    data = "checked data directory whose recordings give the ranges of int8"
    options.add_argument("--calibrate", type=Path, metavar="DIR", help=data)
    args = options.parse_args(words)
    if args.int8 != (args.calibrate is not None) or (args.int8 and args.format != "onnx"):
        raise ValueError(
            "export: --int8 and --calibrate DIR go together, with format onnx, got only some of "
            "them; see --help"
        )
    if args.int8:
        from speakerlab.inference.quantize import export_int8

        export = partial(export_int8, data_dir=args.calibrate)
    elif args.format == "3dspeaker":
        from speakerlab.checkpoints.foreign import export_3dspeaker as export
    else:
        from speakerlab.inference.export import export_onnx as export
    export(args.model, args.out)
    log.info("%s: written", args.out)
