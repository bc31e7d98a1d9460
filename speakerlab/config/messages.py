"""Errors of a configuration in the terms of its YAML.

In: an error of pydantic, the values it is about, and which layer set each. Out: lines in `Faults`.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from speakerlab.core.faults import Faults, nearest


def note_error(
    error: ValidationError,
    schema: type[BaseModel],
    values: Any,
    place: tuple[str, ...],
    faults: Faults,
    origin: Mapping[str, str],
) -> None:
    """Add one line for each key below `place` that pydantic refuses in `values`."""
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for item in error.errors():
        found.setdefault(_keys(item, values), []).append(item)
    for keys, items in found.items():
        if any(keys == other[: len(keys)] for other in found if other != keys):
            continue  # other branches of a union, one of which matched further
        where = where_from(origin, (*place, *keys))
        if items[0]["type"] == "extra_forbidden":
            known = [*_paths(schema)]
            elsewhere = [] if place else [path for path in known if path[-1] == keys[-1]]
            hint = nearest(keys[-1], [path[-1] for path in known if path[:-1] == keys[:-1]])
            if len(elsewhere) == 1:
                hint = f"; did you mean {'.'.join(elsewhere[0])}?"
            faults.add("unknown keys", f"{where}: unknown key{hint}")
        elif items[0]["type"] == "missing":
            faults.add("missing keys", f"{where}: is missing; add it")
        elif not place and not keys:  # the whole configuration, too long to show
            text = str(items[0].get("ctx", {}).get("error"))
            faults.add("bad values", f"{text} ({where})" if where else text)
        else:
            faults.add("bad values", f"{where}: {_complaint(items)}")


def _keys(item: ErrorDetails, values: Any) -> tuple[str, ...]:
    """Return the place of an error, without pydantic's names of the branches of a union."""
    keys: list[str] = []
    for part in item["loc"]:
        if isinstance(values, dict) and part in values:
            values = values[str(part)]
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part] if part < len(values) else None
        elif item["type"] != "missing":
            continue
        keys.append(str(part))
    return tuple(keys)


def _complaint(items: Sequence[ErrorDetails]) -> str:
    """Return the value and its problem, for a value that no branch of its type accepts."""
    value, custom = items[0]["input"], items[0].get("ctx", {}).get("error")
    shown = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    if custom is not None:  # raised by the schema: the predicate of a sentence about the value
        return f"{shown} {custom}"
    start, texts = "Input should be ", dict.fromkeys(item["msg"] for item in items)
    if not all(text.startswith(start) for text in texts):
        return f"{shown}: {items[0]['msg']}"
    text = " or ".join(text.removeprefix(start) for text in texts)
    text = text.replace("a valid array", "a list").replace("an object", "a section of keys")
    return f"{shown} is not {text}"


def _paths(schema: type[BaseModel], start: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key."""
    for name, field in schema.model_fields.items():
        yield (*start, name)
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, (*start, name))


def where_from(origin: Mapping[str, str], path: Sequence[str]) -> str:
    """Return the key, with the layer that set it or its section."""
    key = ".".join(path)
    holders = [".".join(path[:end]) for end in range(len(path), -1, -1)]
    layer = next((origin[holder] for holder in holders if holder in origin), "")
    if not layer or layer.startswith(f"--set {key}="):
        return layer or key
    return f"{layer}: {key}" if key else layer
