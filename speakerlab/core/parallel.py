"""Work on many items in several processes."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from speakerlab.core.ctrl_c import hold_ctrl_c
from speakerlab.core.process import die_with_parent

if TYPE_CHECKING:  # its import takes milliseconds, and few commands need it
    from concurrent.futures import Future

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_processes(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_workers: int,
    *,
    chunk: int = 1,
) -> Iterator[Result]:
    """Yield function(item) in order: `chunk` items per task, or in this process below 2 workers."""
    if num_workers < 2:
        yield from map(function, items)
        return
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(num_workers, initializer=die_with_parent)
    remaining = iter(items)
    # Not `pool.map`: it cancels its tasks, for which the executor prints a traceback after a kill.
    tasks: list[Future[list[Result]]] = []
    other_children = set(multiprocessing.active_children())
    try:
        with hold_ctrl_c():
            part = list(islice(remaining, chunk))
            while part:
                tasks.append(pool.submit(_apply, function, part))
                part = list(islice(remaining, chunk))
        for task in tasks:
            yield from task.result()
    except BaseException:
        # Ctrl-C, or an error: end at once, not after all items.
        for worker in set(multiprocessing.active_children()) - other_children:
            worker.kill()
        raise
    finally:
        pool.shutdown()


def _apply(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [function(item) for item in items]
