"""Identify the enrolled speaker of a recording, or report that it is none of them."""

import sys
from collections.abc import Sequence

from speakerlab.bin.command import model_of, parser


def main(arguments: Sequence[str]) -> None:
    options = parser("identify", __doc__)
    options.add("file FILE", "recording of the speaker")
    options.add_speakers()
    options.add_far()
    options.add("--top N", "print the N best speakers", least=0, default=5)
    options.add_model_options()
    args = options.parse_args(arguments)
    model = model_of(args)
    model.load_speakers(args.speakers)
    result = model.identify(args.file, far=args.far)
    best = result.ranking[: args.top]
    for name, score in best:
        sys.stdout.write(f"{score:.6f}  {name}\n")
    # Without a calibration there is no threshold for a decision.
    if result.is_known is None:
        decision = "none (no calibration; run `speakerlab calibrate`)"
    else:
        speaker = result.name or "unknown speaker"
        decision = f"{speaker} (threshold {result.threshold:.6f})"
    sys.stdout.write(f"decision: {decision}\n")
