"""Name the enrolled speaker of a recording, or say that it is none of them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.bin.model_options import SPEAKERS, add_model_options, open_model


def main(words: Sequence[str]) -> None:
    """`speakerlab identify FILE --model MODEL [--speakers FILE] [--far RATE] [--top N]`"""
    options = parser("identify", __doc__)
    options.add_argument("file", type=Path, metavar="FILE")
    where = f"those enrolled (default {SPEAKERS})"
    options.add_argument("--speakers", type=Path, default=SPEAKERS, metavar="FILE", help=where)
    rate = "decide at this share of false alarms instead of at the EER"
    options.add_argument("--far", type=float, metavar="RATE", help=rate)
    options.add_argument("--top", type=int, default=5, metavar="N", help="how many to print")
    add_model_options(options)
    args = options.parse_args(words)
    model = open_model(args)
    model.load_speakers(args.speakers)
    found = model.identify(args.file, far=args.far)
    for name, score in found.ranking[: args.top]:
        sys.stdout.write(f"{score:.6f}  {name}\n")
    if found.is_known is None:
        decision = "none: the model has no calibration"
    else:
        decision = f"{found.name or 'unknown'} (threshold {found.threshold:.6f})"
    sys.stdout.write(f"decision  {decision}\n")
