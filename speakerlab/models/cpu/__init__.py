"""Code written by hand for CPUs: the same results as the plain models, faster.

Models work without it. `dense.run_block` decides, at every call, whether it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager

# `dense` reads it at every call, so that `plain_code` also changes models that exist already.
is_enabled = True


@contextmanager
def plain_code() -> Iterator[None]:
    """Run the plain code on a CPU too, for example to count the memory that a GPU needs."""
    global is_enabled
    was_enabled = is_enabled
    is_enabled = False
    try:
        yield
    finally:
        is_enabled = was_enabled
