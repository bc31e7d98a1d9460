"""Publish the mean of a training's last checkpoints as a model folder."""

import logging
from collections.abc import Sequence

from speakerlab.bin.command import parser

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    options = parser("average", __doc__)
    options.add("exp EXP", "experiment, finished or not")
    options.add("--last N", "number of checkpoints", least=1, default=10)
    options.add("--out DIR", "new model folder", required=True)
    args = options.parse_args(words)
    from speakerlab.experiments.averaging import publish_average  # imports torch, which is slow

    steps, digest = publish_average(args.exp, args.last, args.out)
    if len(steps) < args.last:
        text = "only %d of %d checkpoints found; training.keep_checkpoints sets how many are kept"
        log.warning(text, len(steps), args.last)
    log.info("averaged steps %s", ", ".join(map(str, steps)))
    log.info("published %s, sha256 %s", args.out, digest[:12])
