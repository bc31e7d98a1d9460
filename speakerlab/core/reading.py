"""Read text and JSON; the error of an unreadable file is one line with its path."""

import csv
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

AGAIN = "copy it again, or make it again with the command that wrote it"
# `__pydantic_config__` of a dataclass.
ONLY_FINITE = {"extra": "forbid", "allow_inf_nan": False}


@contextmanager
def open_text(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file, also with a byte order mark.

    Raises ValueError if it is not UTF-8, or if a `csv.reader` in the block rejects it.
    """
    try:
        # "-sig" drops a byte order mark, which would become a part of the first word.
        with path.open(encoding="utf-8-sig", newline=newline) as stream:
            yield stream
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"{path}: is not a table ({error}); correct it") from None


def read_text(path: Path) -> str:
    with open_text(path) as stream:
        return stream.read()


def read_json(
    path: Path, kind: Any = dict[str, Any], *, like: Any = None, fix: str = AGAIN
) -> Any:
    """Read a JSON file as `parse_json` does."""
    text = path.read_bytes()
    if re.search(rb"\d{300}", text):  # an integer beyond the range of float
        raise ValueError(
            f"{path}: is damaged (a number of more than 300 digits); {fix}"
        )
    return parse_json(text, kind, like=like, where=path, fix=fix)


def parse_json(
    text: str | bytes,
    kind: Any,
    *,
    like: Any = None,
    where: Path | str,
    fix: str = AGAIN,
) -> Any:
    """Parse JSON into a value of the type `kind`, such as a dataclass; raise ValueError otherwise.

    like: another type that it must fit, such as a type from `keys`. where: the source, for errors.
    """
    from pydantic import ValidationError  # commands that read no JSON start without it

    try:
        if like is not None:
            _adapter(like).validate_json(text, strict=True)
        adapter = _adapter(kind)
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        places = [f"{part}: " for part in first["loc"]]
        place = "".join(places)
        raise ValueError(
            f"{where}: is damaged ({place}{first['msg']}); {fix}"
        ) from None


def keys(may: Mapping[str, Any] | None = None, **types: Any) -> type:
    """Return the type of objects with these keys and, optionally, the keys of `may`."""
    optional: list[tuple[str, Any, Any]] = []
    optional_types = may or {}
    for name, kind in optional_types.items():
        optional.append((name, kind, field(default=None)))
    # A dataclass, whose fields with a default must come last.
    return make_dataclass("Keys", [*types.items(), *optional])


# Cached, because pydantic takes longer to make an adapter than to read most files.
@lru_cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
