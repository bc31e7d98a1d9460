"""Identify the enrolled speaker of a recording, or report that it is none of them."""

import sys
from collections.abc import Sequence

from speakerlab.bin.command import model_of, parser


def main(words: Sequence[str]) -> None:
    options = parser("identify", __doc__)
    options.add("file FILE", "recording of the speaker")
    options.add_speakers()
    options.add_far()
    options.add("--top N", "print the N best speakers", least=0, default=5)
    options.add_model_options()
    args = options.parse_args(words)
    model = model_of(args)
    model.load_speakers(args.speakers)
    found = model.identify(args.file, far=args.far)
    for name, score in found.ranking[: args.top]:
        sys.stdout.write(f"{score:.6f}  {name}\n")
    if found.is_known is None:
        decision = "none (no calibration; run `speakerlab calibrate`)"
    else:
        decision = f"{found.name or 'unknown speaker'} (threshold {found.threshold:.6f})"
    sys.stdout.write(f"decision: {decision}\n")
