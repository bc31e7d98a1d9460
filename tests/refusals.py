"""Check errors by their subject and the offending value; the prose in between may change."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def refused(text: str, subject: str, *values: object) -> bool:
    """Return whether a line of `text` starts with `subject:` and shows every one of `values`."""
    for line in text.splitlines():
        if not line.startswith(f"{subject}:"):
            continue
        if all(str(value) in line for value in values):
            return True
    return False


@contextmanager
def refuses(
    subject: str, *values: object, error: type[Exception] = ValueError
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect `error` with a line that starts with `subject:` and shows every one of `values`."""
    with pytest.raises(error) as caught:
        yield caught
    assert refused(str(caught.value), subject, *values), str(caught.value)
