"""Remember a speaker by recordings: the mean of their embeddings, each of length 1."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.bin.model_options import SPEAKERS, add_model_options, open_model

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab enroll NAME FILE... --model MODEL [--speakers FILE]`"""
    options = parser("enroll", __doc__)
    options.add_argument("name", metavar="NAME", help="replaces the speaker of that name")
    options.add_argument("files", type=Path, nargs="+", metavar="FILE")
    where = f"where speakers are kept (default {SPEAKERS})"
    options.add_argument("--speakers", type=Path, default=SPEAKERS, metavar="FILE", help=where)
    add_model_options(options)
    args = options.parse_args(words)
    model = open_model(args)
    if args.speakers.exists():
        model.load_speakers(args.speakers)
    done = "replaced" if args.name in model.speakers else "enrolled"
    model.enroll(args.name, args.files)
    model.save_speakers(args.speakers)
    text = "%s: %s %s by %d recordings; %d speakers"
    log.info(text, args.speakers, done, args.name, len(args.files), len(model.speakers))
