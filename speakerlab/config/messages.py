"""Errors of a configuration in the terms of its YAML.

In: an error of pydantic, the values it is about, and which layer set each. Out: lines in `Faults`.
"""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from speakerlab.core.faults import Faults, nearest

Keys = tuple[str, ...]  # from the outermost section inwards
ITEM = "*"  # in place of the number of an item of a list


def note_error(
    error: ValidationError,
    *,
    schema: type[BaseModel],
    values: Any,
    place: Keys,
    faults: Faults,
    origin: Mapping[str, str],
) -> None:
    """Add one line to `faults` for each key below `place` that pydantic refuses in `values`."""
    # Pydantic reports one error for each branch of a union.
    errors_of: dict[Keys, list[ErrorDetails]] = {}
    for item in error.errors():
        keys = _keys(item, values)
        errors_of.setdefault(keys, []).append(item)

    for keys, items in errors_of.items():
        # Skip a branch of a union if another branch matched further, to a key inside this one.
        others = [other for other in errors_of if other != keys]
        beginnings = [other[: len(keys)] for other in others]
        if keys in beginnings:
            continue
        where = where_from(origin, (*place, *keys))
        if items[0]["type"] == "extra_forbidden":
            paths = list(_paths(schema))
            hint = _hint(keys, paths, place)
            faults.add("unknown keys", f"{where}: unknown key{hint}")
        elif items[0]["type"] == "missing":
            faults.add("missing keys", f"{where}: is missing; add it")
        elif not place and not keys:
            # The value is the whole configuration, too long to show.
            text = str(_predicate(items[0]))
            faults.add("bad values", f"{text} ({where})" if where else text)
        else:
            faults.add("bad values", f"{where}: {_complaint(items)}")


def _hint(
    keys: Keys,
    paths: Sequence[Keys],
    place: Keys,
) -> str:
    """Return a hint at the key that is most similar to an unknown key, with its sections.

    keys, paths: below `place`. In the whole configuration, a key of the same name in another
    section is preferred, if there is exactly one.
    """
    *section, name = keys
    elsewhere: list[Keys] = []
    siblings: list[str] = []
    # The sections of a list have the same keys.
    kind_of_section = [ITEM if part.isdigit() else part for part in section]
    for path in paths:
        *section_of_path, name_of_path = path
        if name_of_path == name:
            elsewhere.append(path)
        if section_of_path == kind_of_section:
            siblings.append(name_of_path)
    if not place and len(elsewhere) == 1:
        return f"; did you mean {'.'.join(elsewhere[0])}?"
    sections = [f"{part}." for part in (*place, *section)]
    return nearest(name, siblings, prefix="".join(sections))


def _keys(item: ErrorDetails, values: Any) -> Keys:
    """Return the place of an error, without pydantic's names of the branches of a union."""
    keys: list[str] = []
    for part in item["loc"]:
        if isinstance(values, dict) and part in values:
            values = values[str(part)]
        elif isinstance(values, list) and isinstance(part, int):
            # A tuple that is too short lacks the item.
            is_present = part < len(values)
            values = values[part] if is_present else None
        elif item["type"] != "missing" or part != item["loc"][-1]:
            continue
        keys.append(str(part))
    return tuple(keys)


def _predicate(item: ErrorDetails) -> Any:
    """Return the error that our schema raised; None if pydantic's own types did."""
    context = item.get("ctx", {})
    return context.get("error")


def _complaint(items: Sequence[ErrorDetails]) -> str:
    """Return the value and its problem, for a value that no branch of its type accepts."""
    value = items[0]["input"]
    shown = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    # An error that our schema raised is the predicate of a sentence about the value.
    predicate = _predicate(items[0])
    if predicate is not None:
        return f"{shown} {predicate}"

    start = "Input should be "
    # Branches of a union may have the same message.
    types: dict[str, None] = {}
    for item in items:
        message = item["msg"]
        if not message.startswith(start):
            return f"{shown}: {items[0]['msg']}"
        types[message.removeprefix(start)] = None
    text = " or ".join(types)
    # Replace JSON's names of types by YAML's.
    text = text.replace("a valid array", "a list")
    text = text.replace("an object", "a section of keys")
    return f"{shown} is not {text}"


def _paths(
    schema: type[BaseModel],
    start: Keys = (),
) -> Iterator[Keys]:
    """Yield the path of every key."""
    for name, field in schema.model_fields.items():
        path = (*start, name)
        yield path
        kind = field.annotation
        if _is_section(kind):
            yield from _paths(kind, path)
        # A list whose items may be sections.
        for item in get_args(kind):
            for branch in get_args(item):
                if _is_section(branch):
                    yield from _paths(branch, (*path, ITEM))


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether the type of a value is a section of keys."""
    # Python 3.10 takes dict[str, Any] for a class, too.
    is_generic = get_origin(kind) is not None
    return inspect.isclass(kind) and not is_generic and issubclass(kind, BaseModel)


def where_from(origin: Mapping[str, str], path: Sequence[str]) -> str:
    """Return the key, with the layer that set it or its section."""
    key = ".".join(path)
    # The key itself, then its section, then the section around it, ..., then "".
    layer = ""
    for end in range(len(path), -1, -1):
        holder = ".".join(path[:end])
        if holder in origin:
            layer = origin[holder]
            break
    if not layer or layer.startswith(f"--set {key}="):
        return layer or key
    return f"{layer}: {key}" if key else layer
