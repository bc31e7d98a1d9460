"""A disk that gets full, as a limit on the size of files: both are errors of a write."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let every write beyond the first bytes of a file fail, with EFBIG for ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def cannot_write(path: object, *, num_bytes: int = 0) -> Iterator[None]:
    """Expect the error of a full disk to name this output, and no other file."""
    with pytest.raises(OSError) as caught, files_of_at_most(num_bytes):
        yield
    assert caught.value.errno is not None
    assert caught.value.filename == str(path)
    assert caught.value.filename2 is None
