"""Faults of an input, collected and reported together: at most five lines of each kind.

A line reads "<where>: <problem>, got <value>; <fix>".
"""

import difflib
from collections.abc import Iterable
from itertools import islice

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
        self.num_without_line: dict[str, int] = {}

    def add(self, kind: str, line: str) -> None:
        """Note one fault; `kind` is a short plural such as "missing files", used in the count."""
        lines = self.lines.setdefault(kind, [])
        lines.append(line)

    def add_first(self, kind: str, lines: Iterable[str], total: int) -> None:
        """Note `total` faults of a kind, of which only the lines that a report shows are read.

        For faults of trials: the text of millions of lines would need gigabytes.
        """
        first_lines = list(islice(lines, MAX_LINES_PER_KIND))
        for line in first_lines:
            self.add(kind, line)
        num_before = self.num_without_line.get(kind, 0)
        self.num_without_line[kind] = num_before + total - len(first_lines)

    def extend(self, other: "Faults") -> None:
        """Note the faults of another report, too."""
        for kind, lines in other.lines.items():
            total = len(lines) + other.num_without_line.get(kind, 0)
            self.add_first(kind, lines, total)

    def __len__(self) -> int:
        num_lines = sum(len(lines) for lines in self.lines.values())
        return num_lines + sum(self.num_without_line.values())

    def report(self, verdict: str = "") -> str:
        """Return all faults as text, followed by the verdict."""
        text: list[str] = []
        for kind, lines in self.lines.items():
            shown_lines = lines[:MAX_LINES_PER_KIND]
            num_hidden = len(lines) - len(shown_lines)
            num_hidden += self.num_without_line.get(kind, 0)
            text += shown_lines
            if num_hidden > 0:
                text.append(f"... and {num_hidden} more {kind}")
        if verdict:
            text.append(verdict)
        return "\n".join(text)

    def raise_if_any(self, verdict: str = "") -> None:
        """Raise ValueError with the whole report if anything was added."""
        if self:
            raise ValueError(self.report(verdict))
