"""Progress bars of long work: on a terminal and in notebooks, never in a log file."""

import sys
import threading
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

# Module of the kernels of Jupyter, VS Code and Colab, whose output is not a terminal.
NOTEBOOK_KERNEL = "ipykernel.zmqshell"


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    unit: str,
    text: str | None = None,
    shown: bool = True,
) -> Any:
    """Return a bar of tqdm over `items` or up to `total`.

    unit: what is counted, in the plural. text: stands before the bar. shown: False for no bar.
    """
    # The first import takes a tenth of a second, and most commands show no bar.
    # A notebook without widgets gets a bar of text. tqdm.auto would choose it too, but warn.
    if find_spec("ipywidgets") is None:
        from tqdm import tqdm
    else:
        from tqdm.auto import tqdm

    # Only one process draws bars. tqdm's own lock is of several, and commands end without cleaning
    # up: where processes are not forked, Python then warns of a leaked semaphore.
    tqdm.set_lock(threading.RLock())
    disable: bool | None = not shown
    if shown and NOTEBOOK_KERNEL not in sys.modules:
        # None shows the bar only on a terminal.
        disable = None
    return tqdm(
        items,
        total=total,
        unit=f" {unit}",
        desc=text,
        disable=disable,
    )


def are_shown() -> bool:
    """Return whether bars are shown here, for libraries that show their own."""
    return NOTEBOOK_KERNEL in sys.modules or sys.stderr.isatty()
