"""Check data directories that are used together; write utt2dur and rejected.tsv."""

import logging
from collections.abc import Sequence

from speakerlab.bin.command import parser
from speakerlab.data.check import check_data_dirs
from speakerlab.scoring.trials import read_trials

log = logging.getLogger(__name__)


def main(words: Sequence[str]) -> None:
    options = parser("check", __doc__)
    options.add("folders DIR", "data directories that are used together", nargs="+")
    options.add("--decode", "read every file to its end")
    rejected = "share of a set that may be missing or broken (default 0; 0.01 with --decode)"
    options.add("--allow-rejected SHARE", rejected)
    options.add_rate_and_workers()
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
    for path in (path for folder in args.folders for path in sorted(folder.glob("trials*"))):
        trials = read_trials(path)  # refuses duplicates
        trials.check_both_kinds(where=str(path))
        num_target = int(trials.is_target_N.sum())
        log.info("%s: %d target, %d nontarget trials", path, num_target, len(trials) - num_target)
