"""Read text and JSON; a file that cannot be read gives one line that names it."""

import csv
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

AGAIN = "copy it again, or make it again with the command that wrote it"
ONLY_FINITE = {"extra": "forbid", "allow_inf_nan": False}  # `__pydantic_config__` of a dataclass


@contextmanager
def open_text(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file, also with a byte order mark.

    Raises ValueError where it is not UTF-8, or is no table to a `csv.reader`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as stream:
            yield stream
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"{path}: is not a table ({error}); correct it") from None


def read_text(path: Path) -> str:
    with open_text(path) as stream:
        return stream.read()


def read_json(path: Path, kind: Any = dict[str, Any], *, like: Any = None, fix: str = AGAIN) -> Any:
    """Read a JSON file as `parse_json` does."""
    text = path.read_bytes()
    if re.search(rb"\d{300}", text):  # a whole number that is no float
        raise ValueError(f"{path}: is damaged (a number of more than 300 digits); {fix}")
    return parse_json(text, kind, like=like, where=path, fix=fix)


def parse_json(
    text: str | bytes, kind: Any, *, like: Any = None, where: Path | str, fix: str = AGAIN
) -> Any:
    """Return JSON as a value of a type, such as a dataclass; ValueError if it is none.

    like: another type that it must fit, such as one of `keys`. where: what an error names.
    """
    from pydantic import ValidationError  # commands that read no JSON start without it

    try:
        if like is not None:
            _adapter(like).validate_json(text, strict=True)
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise ValueError(f"{where}: is damaged ({place}{first['msg']}); {fix}") from None


def keys(may: Mapping[str, Any] | None = None, **types: Any) -> type:
    """Return the type of objects that have these keys, and that may have those of `may`."""
    optional = [(name, kind, field(default=None)) for name, kind in (may or {}).items()]
    return make_dataclass("Keys", [*types.items(), *optional])


@lru_cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
