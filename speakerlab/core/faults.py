"""Faults of an input, collected and reported together: at most five lines of each kind.

A line reads "<where>: <problem>, got <value>; <fix>".
"""

import difflib
from collections.abc import Iterable

MAX_LINES_PER_KIND = 5


def nearest(
    word: str,
    names: Iterable[str],
    *,
    otherwise: str = "",
    prefix: str = "",
    cutoff: float = 0.4,
) -> str:
    """Return the hint that ends an error line: the name most like `word`, else all names.

    otherwise: the hint if no name is similar. prefix: text before a similar name, such as the
    section of a key. cutoff: least similarity, from 0 to 1.
    """
    # Ignore case and the dashes of an option.
    name_of: dict[str, str] = {}
    for name in sorted(names):
        bare_name = name.lower().lstrip("-")
        name_of[bare_name] = name
    wanted = word.lower().lstrip("-")
    similar = difflib.get_close_matches(wanted, name_of, n=1, cutoff=cutoff)
    if similar:
        (bare_name,) = similar
        return f"; did you mean {prefix}{name_of[bare_name]}?"
    if otherwise:
        return f"; {otherwise}"
    return f"; known are {', '.join(name_of.values())}"


class Faults:
    """Faults found so far, in the order in which their kinds first appeared."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def add(self, kind: str, line: str) -> None:
        """Note one fault; `kind` is a short plural such as "missing files", used in the count."""
        lines = self.lines.setdefault(kind, [])
        lines.append(line)

    def __bool__(self) -> bool:
        return bool(self.lines)

    def report(self, verdict: str = "") -> str:
        """Return all faults as text, followed by the verdict."""
        text: list[str] = []
        for kind, lines in self.lines.items():
            text += lines[:MAX_LINES_PER_KIND]
            num_hidden = len(lines) - MAX_LINES_PER_KIND
            if num_hidden > 0:
                text.append(f"... and {num_hidden} more {kind}")
        if verdict:
            text.append(verdict)
        return "\n".join(text)

    def raise_if_any(self, verdict: str = "") -> None:
        """Raise ValueError with the whole report if anything was added."""
        if self:
            raise ValueError(self.report(verdict))
