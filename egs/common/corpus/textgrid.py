"""Read TextGrid files of Praat: who says what when, a tier for each speaker.

Praat reads such a file as a row of strings, numbers and flags, and skips all other words. So the
long format (`xmin = 0`) and the short one (`0`) are one grammar:
https://www.fon.hum.uva.nl/praat/manual/TextGrid_file_formats.html
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from speakerlab.core.reading import read_text
from speakerlab.diarization.regions import Turn

# A string, in which "" is a quotation mark; a flag; a comment; any other word.
TOKEN = re.compile(r'"((?:[^"]|"")*)"|(<[^<>\s]*>)|(![^\n]*)|([^\s"]+)')
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
INTERVALS, POINTS = "IntervalTier", "TextTier"


class Interval(NamedTuple):
    """Text between two times, in seconds."""

    start: float
    end: float
    text: str


class Tier(NamedTuple):
    """Intervals of a name, in the order of the file."""

    name: str
    intervals: list[Interval]


def read_textgrid(path: Path) -> list[Tier]:
    """Read the tiers of intervals; tiers of points are skipped.

    UTF-8, or UTF-16 with a byte order mark. Raises ValueError with the line of what is wrong.
    """
    return _Reader(path).tiers()


def turns_of_tiers(tiers: Sequence[Tier]) -> list[Turn]:
    """Return the turns, sorted: the intervals that have a text and a length.

    The last word of a tier's name, between `_`, is the speaker: SPK0093 in
    R0015_M0151_F_SPK0093.
    """
    turns: list[Turn] = []
    for tier in tiers:
        speaker = tier.name.strip().rpartition("_")[2]
        for interval in tier.intervals:
            if interval.text.strip() and interval.end > interval.start:
                turns.append(Turn(interval.start, interval.end, speaker))
    return sorted(turns)


class _Reader:
    """The tokens of a file, read one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = read_text(path)
        if self.text.startswith("ooBinaryFile"):
            raise ValueError(f"{path}: is a binary TextGrid; save it as text in Praat")
        self.tokens = TOKEN.finditer(self.text)
        self.place = 0  # of the last token

    def tiers(self) -> list[Tier]:
        """Return all tiers of intervals."""
        kind = self.string("the file type")
        name = self.string("the object class")
        if not kind.startswith("ooTextFile") or name != "TextGrid":
            self.refuse(f'is of type "{kind}", class "{name}", and no TextGrid')
        self.times("the TextGrid")
        tiers: list[Tier] = []
        if self.flag() == "<absent>":
            return tiers
        for _ in range(self.count("tiers")):
            tier = self.tier()
            if tier is not None:
                tiers.append(tier)
        for token in self.tokens:
            if _kind_of(token) != "other":
                self.place = token.start()
                self.refuse("has more than the number of tiers that it states")
        return tiers

    def tier(self) -> Tier | None:
        """Return the next tier; None for one of points."""
        kind = self.string("the class of a tier")
        if kind not in (INTERVALS, POINTS):
            self.refuse(f'has the class "{kind}" in the place of a tier')
        name = self.string("the name of a tier")
        self.times(f"tier {name}")
        intervals: list[Interval] = []
        for _ in range(self.count(f"intervals of tier {name}")):
            if kind == POINTS:
                self.number("the time of a point")
                self.string("the text of a point")
                continue
            start, end = self.times(f"an interval of tier {name}")
            text = self.string("the text of an interval")
            intervals.append(Interval(start, end, text))
        if kind == POINTS:
            return None
        if len(name.split()) != 1:
            self.refuse(f'has a tier "{name}", whose name is not one word')
        return Tier(name, intervals)

    def times(self, of: str) -> tuple[float, float]:
        """Return the next two numbers, a start and an end."""
        start = self.number(f"the start of {of}")
        end = self.number(f"the end of {of}")
        if start < 0 or end < start:
            self.refuse(f"has {of} from {start:g} to {end:g} s")
        return start, end

    def count(self, of: str) -> int:
        """Return the next number, which is of things."""
        value = self.number(f"the number of {of}")
        if not value.is_integer() or value < 0:
            self.refuse(f"has {value:g} as the number of {of}")
        return int(value)

    def number(self, meaning: str) -> float:
        return float(self._next("number", meaning))

    def string(self, meaning: str) -> str:
        return self._next("string", meaning)[1:-1].replace('""', '"')

    def flag(self) -> str:
        return self._next("flag", "<exists>")

    def _next(self, wanted: str, meaning: str) -> str:
        """Return the next string, number or flag, which must be of the wanted kind."""
        for token in self.tokens:
            kind = _kind_of(token)
            if kind == "other":
                continue
            self.place = token.start()
            if kind != wanted:
                shown = " ".join(token[0].split())[:40]
                self.refuse(f"has {shown} in the place of {meaning}")
            return token[0]
        self.place = len(self.text)
        self.refuse(f"ends before {meaning}")

    def refuse(self, problem: str) -> NoReturn:
        line = self.text.count("\n", 0, self.place) + 1
        raise ValueError(
            f"{self.path}:{line}: {problem}; correct the line, or get the file again"
        )


def _kind_of(token: re.Match[str]) -> str:
    if token[1] is not None:
        return "string"
    if token[2] is not None:
        return "flag"
    is_number = token[4] is not None and NUMBER.fullmatch(token[4])
    return "number" if is_number else "other"
