"""Enrol a speaker by one or more recordings."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import model_of, parser
from speakerlab.bin.embed import find_recordings
from speakerlab.core.atomic import check_writable
from speakerlab.data.tables import one_line

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    options = parser("enroll", __doc__)
    options.add(
        "name NAME", "name of the speaker; replaces an enrolled speaker of that name"
    )
    options.add("files FILE", "recordings of the speaker, or folders", nargs="+")
    options.add_speakers()
    options.add_channel()
    options.add_model_options()
    args = options.parse_args(arguments)
    # A forgotten name would make a name of the first recording.
    if Path(args.name).is_file():
        raise ValueError(
            f"enroll: the name of the speaker comes first, got the file {args.name};"
            " e.g. `speakerlab enroll ann a1.wav a2.wav`"
        )
    check_writable(args.speakers)
    files = drop_repeats(find_recordings(args.files, where="enroll"))
    model = model_of(args)
    # Before the work, because a file of another model is refused.
    if args.speakers.exists():
        model.load_speakers(args.speakers)
    change = "replaced" if args.name in model.speakers else "enrolled"
    model.enroll(args.name, files, channels=args.channel)
    # Only this speaker: another command may have changed the others meanwhile.
    model.save_speakers(args.speakers, add=args.name)
    model.load_speakers(args.speakers)
    log.info(
        "%s: %s %s, recordings: %d; speakers in the file: %d",
        args.speakers,
        change,
        args.name,
        len(files),
        len(model.speakers),
    )


def drop_repeats(files: Sequence[Path]) -> list[Path]:
    """Return each file once; log the others, which would give a recording more weight."""
    file_of: dict[str, Path] = {}
    for file in files:
        # The same file may be given by another path, or by a link.
        real_path = os.path.realpath(file)
        if real_path in file_of:
            first = one_line(file_of[real_path])
            log.warning(
                "%s: was given already, as %s; used once", one_line(file), first
            )
            continue
        file_of[real_path] = file
    return list(file_of.values())
