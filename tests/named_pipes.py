"""Files as named pipes: what `<(cat FILE)` gives a command in a shell."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def piped(folder: Path, *paths: Path) -> Iterator[list[Path]]:
    """Yield a pipe for each file, which can be read once, and wait until all were read."""
    pipes: list[Path] = []
    writers: list[threading.Thread] = []
    for number, path in enumerate(paths):
        pipe = folder / f"pipe{number}"
        os.mkfifo(pipe)
        pipes.append(pipe)
        # Opening a pipe for writing waits for its reader.
        writer = threading.Thread(
            target=pipe.write_bytes, args=[path.read_bytes()], daemon=True
        )
        writer.start()
        writers.append(writer)
    yield pipes
    for writer in writers:
        writer.join(timeout=10)
        assert not writer.is_alive(), "a pipe was not read"
    for pipe in pipes:
        pipe.unlink()
