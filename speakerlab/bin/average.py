"""Publish the mean of a training's last checkpoints as a model folder."""

import logging
from collections.abc import Sequence

from speakerlab.bin.command import parser

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    options = parser("average", __doc__)
    options.add("exp EXP", "experiment, finished or not")
    options.add("--last N", "number of checkpoints", least=1, default=10)
    options.add("--out DIR", "new model folder", required=True)
    args = options.parse_args(arguments)

    # Imported after the options are checked, because importing torch is slow.
    from speakerlab.experiments.averaging import publish_average

    steps, digest = publish_average(args.exp, args.last, args.out)
    # Publish anyway: the experiment has no more checkpoints.
    if len(steps) < args.last:
        log.warning(
            "only %d of %d checkpoints found; training.keep_checkpoints sets how many"
            " are kept",
            len(steps),
            args.last,
        )
    step_numbers = ", ".join(str(step) for step in steps)
    log.info("averaged steps %s", step_numbers)
    log.info("published %s, sha256 %s", args.out, digest[:12])
