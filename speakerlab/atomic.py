"""Files written whole or not at all: a reader, or a run after a kill, never meets half a file."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` when all went well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write readable JSON whole."""
    write_text(path, json.dumps(values, indent=1) + "\n")
