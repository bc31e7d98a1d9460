"""Enrol a speaker by one or more recordings."""

import logging
from collections.abc import Sequence

from speakerlab.bin.command import model_of, parser
from speakerlab.core.atomic import check_writable

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    options = parser("enroll", __doc__)
    options.add("name NAME", "name of the speaker; replaces an enrolled speaker of that name")
    options.add("files FILE", "recordings of the speaker", nargs="+")
    options.add_speakers()
    options.add_model_options()
    args = options.parse_args(words)
    check_writable(args.speakers)
    model = model_of(args)
    if args.speakers.exists():
        model.load_speakers(args.speakers)
    done = "replaced" if args.name in model.speakers else "enrolled"
    model.enroll(args.name, args.files)
    model.save_speakers(args.speakers)
    counts = f"recordings: {len(args.files)}; speakers in the file: {len(model.speakers)}"
    log.info("%s: %s %s, %s", args.speakers, done, args.name, counts)
