"""Tables of all settings, from the classes that check a configuration.

The comment of a field is its explanation, its type gives the values.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from field_comments import comment_of
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from speakerlab.config.schema import Config, CorpusConfig

HEADER = "| key | default | values | meaning |\n|---|---|---|---|"
# Larger bounds only keep products of numbers finite.
MOST_SHOWN = 10**6


class Place(NamedTuple):
    """Section of the configuration."""

    name: str  # such as training.margin; empty for the top
    model: type[BaseModel]


def settings_tables() -> str:
    """Return a heading and a table for each section, outer sections first."""
    parts: list[str] = []
    entry = Place("data.train: an entry of a mixture", CorpusConfig)
    for place in [*places_below(Place("", Config)), entry]:
        comments = comments_of(place.model)
        rows: list[str] = []
        for key, field in place.model.model_fields.items():
            if not section_in(field):
                rows.append(row_of(key, field, comments.get(key, "")))
        title = place.name or "Top level"
        docstring = inspect.getdoc(place.model) or ""
        table = "\n".join([HEADER, *rows])
        parts.append(f"## {title}\n\n{docstring}\n\n{table}\n")
    return "\n".join(parts)


def places_below(place: Place) -> Iterator[Place]:
    """Yield a section, then those in it."""
    yield place
    for key, field in place.model.model_fields.items():
        model = section_in(field)
        if model is not None:
            yield from places_below(Place(f"{place.name}.{key}".strip("."), model))


def section_in(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a key that is a section with keys of its own."""
    kind = field.annotation
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    return kind if is_section else None


def comments_of(model: type[BaseModel]) -> dict[str, str]:
    """Return key -> comment in the source of a class and its bases."""
    comments: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        file = inspect.getsourcefile(base)
        lines = Path(str(file)).read_text(encoding="utf-8").splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if not isinstance(node, ast.ClassDef) or node.name != base.__name__:
                continue
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    key = ast.unparse(field.target)
                    until = lines[: field.end_lineno]
                    comments[key] = comment_of(until, first=field.lineno)
    return comments


def row_of(key: str, field: FieldInfo, comment: str) -> str:
    """Return the row of a key."""
    default = "required"
    if field.default is not PydanticUndefined:
        default = f"`{to_yaml(field.default)}`"
    kind = (
        Annotated[(field.annotation, *field.metadata)]
        if field.metadata
        else field.annotation
    )
    values = values_of(TypeAdapter(kind).json_schema())
    return f"| `{key}` | {default} | {values} | {comment} |"


def to_yaml(value: Any) -> str:
    """Return a value as in a configuration file."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.partition("\n")[0]


def values_of(schema: dict[str, Any]) -> str:
    """Return in words what a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(values_of(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        return "mapping"
    kind = schema.get("type", "any")
    if kind in ("integer", "number"):
        return f"{kind}{bounds_of(schema)}"
    if kind == "array":
        return list_of(schema)
    return {"object": "mapping", "boolean": "`true`, `false`", "null": "`null`"}.get(
        kind, kind
    )


def bounds_of(schema: dict[str, Any]) -> str:
    """Return in words the bounds of a number."""
    text = ""
    if "minimum" in schema:
        text += f" from {schema['minimum']:g}"
    if "exclusiveMinimum" in schema:
        text += f" above {schema['exclusiveMinimum']:g}"
    most = schema.get("maximum", MOST_SHOWN)
    if most < MOST_SHOWN:
        text += f" to {most:g}"
    return text


def list_of(schema: dict[str, Any]) -> str:
    """Return in words the entries of a list."""
    if "prefixItems" in schema:
        first = values_of(schema["prefixItems"][0])
        return f"{len(schema['prefixItems'])} numbers: {first}"
    return f"list: {values_of(schema['items'])}"
