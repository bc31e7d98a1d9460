"""Write a model as ONNX, or as a 3D-Speaker checkpoint."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab export MODEL --out FILE [--format onnx|3dspeaker]`"""
    options = parser("export", __doc__)
    options.add_argument("model", type=Path, metavar="MODEL", help="model folder or experiment")
    options.add_argument("--out", type=Path, required=True, metavar="FILE")
    options.add_argument("--format", choices=("onnx", "3dspeaker"), default="onnx")
    args = options.parse_args(words)
    if args.format == "3dspeaker":
        from speakerlab.interop.checkpoints import export_3dspeaker as export
    else:
        from speakerlab.export import export_onnx as export
    export(args.model, args.out)
    log.info("%s: written", args.out)
