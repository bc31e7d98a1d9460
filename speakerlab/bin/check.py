"""Check data directories that are used together; write utt2dur and rejected.tsv."""

import logging
from collections.abc import Sequence
from pathlib import Path

from speakerlab.bin.command import parser
from speakerlab.core.leftovers import name_leftovers
from speakerlab.data.check import check_data_dirs
from speakerlab.data.checked import CheckInputs, check_alone
from speakerlab.data.tables import keep_roots, list_skipped, list_trials, read_about
from speakerlab.scoring.trials import read_trials

log = logging.getLogger(__name__)
DECODE_ALLOWS = 0.01  # --allow-rejected with --decode, which finds more faults


def main(arguments: Sequence[str]) -> None:
    options = parser("check", __doc__, builds_components=False)
    options.add("folders DIR", "data directories that are used together", nargs="+")
    options.add("--decode", "read every file to its end")
    rejected = (
        "share of a set that may be missing or broken (default 0; 0.01 with --decode)"
    )
    options.add("--allow-rejected SHARE", rejected)
    options.add("--force", "check again what was checked with the same inputs")
    options.add_rate_and_workers()
    args = options.parse_args(arguments)
    allow_rejected = args.allow_rejected
    if allow_rejected is None:
        allow_rejected = DECODE_ALLOWS if args.decode else 0.0

    def read_inputs() -> CheckInputs:
        return CheckInputs.of(
            args.folders,
            sample_rate=args.sample_rate,
            decode=args.decode,
            allow_rejected=allow_rejected,
        )

    names = " ".join(map(str, args.folders))
    unchanged = (
        f"{names}: already checked with these inputs, kept (--force checks again)"
    )
    # First compare without the lock, which is not needed if nothing has changed.
    with keep_roots(args.folders) as fault:
        inputs = read_inputs()
        if inputs.are_checked() and not args.force:
            log.info("%s", unchanged)
            return
        if fault:
            raise fault
        with check_alone(args.folders) as waited:
            # Another process may have checked the same directories while this process waited.
            if waited:
                inputs = read_inputs()
                if inputs.are_checked():
                    log.info("%s", unchanged)
                    return
            inputs.forget()
            check(inputs, num_workers=args.num_workers)
            inputs.record()


def check(inputs: CheckInputs, *, num_workers: int) -> None:
    """Check the directories and their trial lists; log a line for each."""
    notes = check_data_dirs(
        inputs.folders,
        sample_rate=inputs.sample_rate,
        decode=inputs.decode,
        allow_rejected=inputs.allow_rejected,
        num_workers=num_workers,
    )
    for note in notes:
        log.info("%s", note)
    for folder in inputs.folders:
        read_about(folder)  # refuses unknown keys
        for path in list_trials(folder):
            check_trials(path)
        skipped = list_skipped(folder)
        if skipped:
            log.info("%s: skipped %s", folder, name_leftovers(skipped))


def check_trials(path: Path) -> None:
    """Check that a trial list has both kinds of trials and no duplicates."""
    trials = read_trials(path)  # refuses duplicates
    trials.check_both_kinds(where=str(path))
    num_target = int(trials.is_target_N.sum())
    num_nontarget = len(trials) - num_target
    log.info("%s: %d target, %d nontarget trials", path, num_target, num_nontarget)
