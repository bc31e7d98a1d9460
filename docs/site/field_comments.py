"""Show the comments of fields on the API pages, for mkdocstrings.

Fields of classes have comments in this repository, behind the field or above it, where the API
pages need docstrings.
"""

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension

# A field of a class, such as `    score: float  # cosine of the two embeddings`.
FIELD = re.compile(r"^    \w+( *:| *=)")
COMMENT_BEHIND = re.compile(r"  # (.*)$")
COMMENT_ABOVE = re.compile(r"^    # (.*)$")


class FieldComments(Extension):
    """Takes the comment of a field as its docstring."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        is_field = isinstance(attr.parent, Class) and attr.lineno is not None
        if not is_field or attr.docstring is not None:
            return
        lines = attr.lines_collection[attr.filepath]
        comment = comment_of(lines[: attr.endlineno], first=attr.lineno)
        if comment:
            attr.docstring = Docstring(comment, parent=attr)


def comment_of(lines: list[str], *, first: int) -> str:
    """Return the comment of a field, empty if it has none.

    lines: of the file, to the last line of the field. first: number of its first line, from 1.
    """
    if not FIELD.match(lines[first - 1]):
        return ""
    behind = COMMENT_BEHIND.search(lines[-1])
    if behind and "pyright:" not in behind[1]:
        return behind[1]
    above: list[str] = []
    for earlier in reversed(lines[: first - 1]):
        comment = COMMENT_ABOVE.match(earlier)
        if comment is None:
            break
        above.insert(0, comment[1])
    return " ".join(above)
