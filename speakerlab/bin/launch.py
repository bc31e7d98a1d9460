"""torchrun that dies with the shell that started it, and whose ranks die with it.

`python -m speakerlab.bin.launch <torchrun options> -m speakerlab.bin.train <options>`
"""

import os
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from speakerlab import process

RESUME = "run the same command again to go on from the last checkpoint"


def main() -> None:
    """Tie this process to its parent, name it as the ranks' parent, and be torchrun."""
    process.die_with_launcher()
    os.environ[process.PARENT_VARIABLE] = str(os.getpid())
    code = 0
    try:
        run.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"{verdict(rank, failure)}\n")
        # A signal is told by a negative code; a shell tells it by 128 + its number.
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        sys.stderr.write(f"stopped by {error.sigval.name}; {RESUME}\n")
        code = 128 + error.sigval
    process.leave(code)


def verdict(rank: int, failure: ProcessFailure) -> str:
    """One line on the rank that failed first; the others were stopped because of it."""
    remedy = RESUME
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = signal.Signals(-failure.exitcode).name
    elif failure.exitcode == process.EXIT_INPUT:
        remedy = "what to mend stands above"
    return f"rank {rank}: ended the run, got {how} of process {failure.pid}; {remedy}"


if __name__ == "__main__":
    main()
