"""Records of finished work: a text file beside the results with the inputs that produced them.

A record has a line `name=value` for each input. A command compares it with its own inputs before
it starts, and writes it after everything else:

    inputs = {"threshold": 0.5, "trials": file_digest(trials)}
    if not is_done(path, inputs):
        forget(path)
        ...
        record(path, inputs, outputs=["report.html"])

A missing or damaged record never matches the inputs: the work is done again.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import SEEK_END
from pathlib import Path
from typing import Any

import speakerlab
from speakerlab.core.atomic import file_sha256, write_text

# Name of the lines with output files, which must exist; paths are relative to the record's folder.
OUTPUT = "output"
NUM_THREADS = 32  # threads that ask a file server for the times of files
FILES_PER_TASK = 200
SAMPLE_BYTES = 4096
Lines = list[tuple[str, str]]  # name, value


def is_done(path: Path, inputs: Mapping[str, Any]) -> bool:
    """Return whether a record has exactly these inputs, and all its outputs exist."""
    stored_inputs: Lines = []
    outputs: list[Path] = []
    for name, value in _read_lines(path):
        if name == OUTPUT:
            outputs.append(path.parent / value)
        else:
            stored_inputs.append((name, value))
    if stored_inputs != _lines_of(inputs):
        return False
    return all(output.exists() for output in outputs)


def record(path: Path, inputs: Mapping[str, Any], outputs: Iterable[str] = ()) -> None:
    """Write a record. outputs: files that must exist, relative to the record's folder."""
    lines = _lines_of(inputs)
    lines += [(OUTPUT, output) for output in outputs]
    text = ""
    for name, value in lines:
        text += f"{name}={value}\n"
    write_text(path, text)


def forget(path: Path) -> None:
    """Remove a record, before the results that it describes change."""
    path.unlink(missing_ok=True)


def read_record(path: Path) -> dict[str, str]:
    """Return the inputs of a record, name -> value as text; empty if there is none."""
    inputs: dict[str, str] = {}
    for name, value in _read_lines(path):
        if name != OUTPUT:
            inputs[name] = value
    return inputs


def digest(value: Any) -> str:
    """Return the SHA-256 of a value that JSON can hold, or of its text."""
    text = _as_json(value)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, "" if there is no such file."""
    return file_sha256(path) if path.is_file() else ""


def files_digest(folder: Path, names: Iterable[str]) -> str:
    """Return one SHA-256 of the names and bytes of files of a folder."""
    digests: list[tuple[str, str]] = []
    for name in names:
        digests.append((name, file_digest(folder / name)))
    return digest(digests)


def stamp(path: Path | str) -> str:
    """Return the size and modification time of a file; "" if there is no such file."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def stamps(paths: Sequence[Path | str]) -> list[str]:
    """Return the stamp of each file."""
    return _of_each(paths, stamp)


def sample(path: Path | str) -> str:
    """Return the size of a file and a digest of bytes from its middle; "" if there is none.

    Unlike a stamp, it is the same for copies of a file on other hosts.
    """
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, SEEK_END)
            file.seek(max(0, (size - SAMPLE_BYTES) // 2))
            middle = file.read(SAMPLE_BYTES)
    except (OSError, ValueError):
        return ""
    return f"{size} {hashlib.sha256(middle).hexdigest()}"


def samples(paths: Sequence[Path | str]) -> list[str]:
    """Return the sample of each file."""
    return _of_each(paths, sample)


def _of_each(
    paths: Sequence[Path | str],
    describe: Callable[[Path | str], str],
) -> list[str]:
    """Describe each file; threads hide the latency of a file server."""
    starts = range(0, len(paths), FILES_PER_TASK)
    tasks = [paths[start : start + FILES_PER_TASK] for start in starts]

    def describe_files(task: Sequence[Path | str]) -> list[str]:
        return [describe(path) for path in task]

    texts: list[str] = []
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for task_texts in pool.map(describe_files, tasks):
            texts += task_texts
    return texts


@cache
def code_digest() -> str:
    """Return the SHA-256 of this package's code, for results that may change with it.

    Unlike a commit hash, it needs no git and changes with every edit.
    """
    package = Path(speakerlab.__file__).parent
    names: list[str] = []
    for path in package.rglob("*.py"):
        names.append(path.relative_to(package).as_posix())
    return files_digest(package, sorted(names))


def _read_lines(path: Path) -> Lines:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    lines: Lines = []
    for line in text.split("\n"):
        if line:
            name, _, value = line.partition("=")
            lines.append((name, value))
    return lines


def _lines_of(inputs: Mapping[str, Any]) -> Lines:
    return [(name, _as_text(value)) for name, value in inputs.items()]


def _as_text(value: Any) -> str:
    """Return a value as one line: text as it is, None as nothing, others as JSON."""
    if value is None:
        return ""
    # JSON escapes line breaks, which would split the value into two lines of the record.
    is_text = isinstance(value, str | Path)
    if is_text and str(value).isprintable():
        return str(value)
    return _as_json(value)


def _as_json(value: Any) -> str:
    # Sorted, so that the insertion order of a mapping does not matter.
    return json.dumps(value, sort_keys=True, default=str)
