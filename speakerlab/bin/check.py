"""Check data directories that are used together; write utt2dur and rejected.tsv."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.data.check import check_data_dirs
from speakerlab.process import available_cpus

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    """`speakerlab check DIR... [--decode]`"""
    options = parser("check", __doc__)
    options.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    options.add_argument("--decode", action="store_true", help="read every file to its end")
    options.add_argument("--allow-rejected", type=float, default=None, metavar="SHARE")
    options.add_argument("--sample-rate", type=int, default=16000)
    options.add_argument("--num-workers", type=int, default=available_cpus())
    args = options.parse_args(words)
    by_stage = 0.01 if args.decode else 0.0
    notes = check_data_dirs(
        args.folders,
        sample_rate=args.sample_rate,
        decode=args.decode,
        allow_rejected=by_stage if args.allow_rejected is None else args.allow_rejected,
        num_workers=args.num_workers,
    )
    for note in notes:
        log.info("%s", note)
