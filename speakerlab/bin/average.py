"""Publish the mean of a training's last checkpoints as a model folder."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser, run

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab average EXP --last N --out DIR`"""
    options = parser("average", __doc__)
    options.add_argument("exp", type=Path, metavar="EXP", help="experiment, finished or not")
    last = "number of checkpoints (10)"
    options.add_argument("--last", type=int, default=10, metavar="N", help=last)
    options.add_argument("--out", type=Path, required=True, metavar="DIR", help="new model folder")
    args = options.parse_args(words)
    from speakerlab.experiments.averaging import publish_average  # imports torch, which is slow

    steps, digest = publish_average(args.exp, args.last, args.out)
    if len(steps) < args.last:
        text = "only %d of %d checkpoints found; training.keep_checkpoints sets how many are kept"
        log.warning(text, len(steps), args.last)
    log.info("averaged steps %s", ", ".join(map(str, steps)))
    log.info("published %s, sha256 %s", args.out, digest[:12])


if __name__ == "__main__":
    run(main, sys.argv[1:])
