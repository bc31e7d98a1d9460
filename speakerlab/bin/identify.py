"""Identify the enrolled speaker of a recording, or report that it is none of them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.bin.model_options import add_far, add_model_options, add_speakers, model_of


def main(words: Sequence[str]) -> None:
    """Run `speakerlab identify FILE --model MODEL [--speakers FILE] [--far RATE] [--top N]`."""
    options = parser("identify", __doc__)
    options.add_argument("file", type=Path, metavar="FILE", help="recording")
    add_speakers(options)
    add_far(options)
    top = "print the N best speakers (default 5)"
    options.add_argument("--top", type=int, default=5, metavar="N", help=top)
    add_model_options(options)
    args = options.parse_args(words)
    model = model_of(args)
    model.load_speakers(args.speakers)
    found = model.identify(args.file, far=args.far)
    for name, score in found.ranking[: args.top]:
        sys.stdout.write(f"{score:.6f}  {name}\n")
    if found.is_known is None:
        decision = "none (the model has no calibration)"
    else:
        decision = f"{found.name or 'unknown speaker'} (threshold {found.threshold:.6f})"
    sys.stdout.write(f"decision: {decision}\n")
