"""Faults of an input, collected and reported together: at most five lines of each kind.

A line reads "<where>: <problem>, got <value>; <fix>".
"""

import difflib
from collections.abc import Iterable

MAX_LINES_PER_KIND = 5


def nearest(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return the hint that ends an error line: the known word most like `word`, else all of them.

    otherwise: the hint if none is similar.
    """
    known = {name.lower().lstrip("-"): name for name in sorted(known)}
    close = difflib.get_close_matches(word.lower().lstrip("-"), known, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {known[close[0]]}?"
    return f"; {otherwise or 'known are ' + ', '.join(known.values())}"


class Faults:
    """Faults found so far, in the order their kinds were first met."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def add(self, kind: str, line: str) -> None:
        """Note one fault; `kind` is a short plural such as "missing files", used in the count."""
        self.lines.setdefault(kind, []).append(line)

    def __bool__(self) -> bool:
        return bool(self.lines)

    def report(self, verdict: str = "") -> str:
        """Return all faults as text, followed by the verdict."""
        text: list[str] = []
        for kind, lines in self.lines.items():
            text += lines[:MAX_LINES_PER_KIND]
            if len(lines) > MAX_LINES_PER_KIND:
                text.append(f"... and {len(lines) - MAX_LINES_PER_KIND} more {kind}")
        return "\n".join([*text, verdict] if verdict else text)

    def raise_if_any(self, verdict: str = "") -> None:
        """Raise ValueError with the whole report if anything was added."""
        if self:
            raise ValueError(self.report(verdict))
