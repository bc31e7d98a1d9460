"""torchrun that dies with the shell that started it, and whose ranks die with it.

`python -m speakerlab.bin.launch <torchrun options> -m speakerlab.bin.train <options>`
"""

import os

from torch.distributed import run

from speakerlab import lifetime


def main() -> None:
    """Tie this process to its parent, name it as the ranks' parent, and be torchrun."""
    lifetime.die_with_parent()
    lifetime.check_parent()
    os.environ[lifetime.PARENT_VARIABLE] = str(os.getpid())
    run.main()


if __name__ == "__main__":
    main()
