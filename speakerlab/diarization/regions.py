"""Speech regions and speaker turns: RTTM, .lab and UEM files in, times in seconds out.

Formats, one entry per line; blank lines and lines that start with ; or # are skipped:
- RTTM: `SPEAKER recording channel start duration <NA> <NA> speaker <NA> <NA>` (NIST, RT-09
  evaluation plan, appendix A); SPKR-INFO lines are skipped, other types refused;
- UEM, the regions to score: `recording channel start end` (the same plan);
- .lab, speech regions of one recording: `start end [speech|sp]`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from speakerlab.core.atomic import write_text
from speakerlab.core.faults import Faults

Region = tuple[float, float]  # start and end in seconds
Row = TypeVar("Row")
MAX_SECONDS = 1e9  # 32 years; a later time is damage


class Turn(NamedTuple):
    """A stretch of time in which one speaker speaks; turns sort by time."""

    start: float  # seconds
    end: float
    speaker: str


def read_rttm(path: Path) -> dict[str, list[Turn]]:
    """Return the turns of each recording of an RTTM file, or of all `*.rttm` files of a folder.

    An empty file of a folder stands for a recording without turns, which it is named after.
    Raises ValueError with a line for each line that is refused. A recording must be in one file,
    and have one channel.
    """
    paths = sorted(path.glob("*.rttm")) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{path}: has no .rttm files; give another folder or one RTTM file")
    origins: dict[str, tuple[Path, str]] = {}

    def parse(words: Sequence[str], file: Path) -> tuple[str, Turn] | None:
        if words[0] == "SPKR-INFO":
            return None
        if words[0] != "SPEAKER" or len(words) < 8:
            raise ValueError(
                "is not 'SPEAKER recording channel start duration <NA> <NA> speaker', got "
                f"{_shown(words)}; correct or remove the line"
            )
        _, recording, channel, start, duration, _, _, speaker, *_ = words
        first_file, first_channel = origins.setdefault(recording, (file, channel))
        if file != first_file:
            raise ValueError(f"{recording} is also in {first_file}; keep one of the two")
        if channel != first_channel:
            raise ValueError(
                f"{recording} has channels {first_channel} and {channel}; give each channel "
                "a different name"
            )
        start, duration = _seconds(start, "start"), _seconds(duration, "duration")
        # rounded, so that a turn ends where the next begins if their decimals say so
        return recording, Turn(start, round(start + duration, 9), speaker)

    found = _read_rows(paths, parse)
    turns: dict[str, list[Turn]] = {name: [] for name, _ in found}
    for name, turn in found:
        turns[name].append(turn)
    if path.is_dir():
        not_empty = {file for file, _ in origins.values()}
        for file in {*paths} - not_empty:
            turns.setdefault(file.stem, [])
    return dict(sorted(turns.items()))


def write_rttm(path: Path, turns: Mapping[str, Iterable[Turn]]) -> None:
    """Write the turns of recordings as RTTM, to the millisecond."""
    write_text(path, format_rttm(turns, where=path))


def format_rttm(turns: Mapping[str, Iterable[Turn]], *, where: Path | str = "turns") -> str:
    """Return the turns of recordings as the lines of an RTTM file."""
    rows = [(name, turn) for name in turns for turn in sorted(turns[name])]
    for word in {word for name, turn in rows for word in (name, turn.speaker)}:
        if word.split() != [word]:
            raise ValueError(f"{where}: '{word}' is not one word; rename the recording or speaker")
    _check_order(where, [turn[:2] for _, turn in rows])
    return "".join(
        f"SPEAKER {name} 1 {start:.3f} {round(end, 3) - round(start, 3):.3f} <NA> <NA> {speaker} "
        "<NA> <NA>\n"
        for name, (start, end, speaker) in rows
    )


def read_uem(path: Path) -> dict[str, list[Region]]:
    """Return the regions to score of each recording, merged."""

    def parse(words: Sequence[str], _file: Path) -> tuple[str, Region]:
        if len(words) != 4:
            raise ValueError(
                f"is not 'recording channel start end', got {_shown(words)}; correct it"
            )
        return words[0], _region(*words[2:])

    rows = sorted(_read_rows([path], parse))
    groups = groupby(rows, key=lambda row: row[0])
    return {name: merge_regions(region for _, region in group) for name, group in groups}


def write_uem(path: Path, regions: Mapping[str, Iterable[Region]]) -> None:
    """Write regions of recordings as UEM, to the millisecond."""
    rows = [(name, *region) for name in regions for region in sorted(regions[name])]
    _check_order(path, [row[1:] for row in rows])
    write_text(path, "".join(f"{name} 1 {start:.3f} {end:.3f}\n" for name, start, end in rows))


def read_lab(path: Path) -> list[Region]:
    """Return the speech regions of a .lab file, merged."""

    def parse(words: Sequence[str], _file: Path) -> Region:
        if len(words) not in (2, 3) or words[2:] not in ([], ["speech"], ["sp"]):
            raise ValueError(
                f"is not 'start end speech' in seconds, got {_shown(words)}; correct it, "
                "or remove it if it is not speech"
            )
        return _region(*words[:2])

    return merge_regions(_read_rows([path], parse))


def merge_regions(regions: Iterable[Region], *, pause: float = 0.0) -> list[Region]:
    """Return the union of regions, also of turns of any speakers, as sorted disjoint regions.

    Regions less than `pause` seconds apart are joined, too.
    """
    return _union(regions, lambda apart: apart <= 0 or apart < pause)


def merge_turns(turns: Iterable[Turn]) -> tuple[list[Turn], int]:
    """Merge overlapping turns of one speaker; return all turns, sorted, and how many were merged.

    Turns that only touch stay apart: the collar of a score lies around the bounds between them.
    """
    merged: list[Turn] = []
    ordered = sorted(turns, key=lambda turn: (turn.speaker, turn))
    for speaker, own in groupby(ordered, key=lambda turn: turn.speaker):
        regions = _union([turn[:2] for turn in own], lambda apart: apart < 0)
        merged += [Turn(start, end, speaker) for start, end in regions]
    return sorted(merged), len(ordered) - len(merged)


def _union(regions: Iterable[Region], joins: Callable[[float], bool]) -> list[Region]:
    merged: list[Region] = []
    for start, end in sorted(regions):
        if merged and joins(start - merged[-1][1]):
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _read_rows(
    paths: Sequence[Path], parse: Callable[[Sequence[str], Path], Row | None]
) -> list[Row]:
    """Return what `parse` makes of each line; its ValueErrors are collected, with file and line."""
    faults, rows = Faults(), list[Row]()
    for path in paths:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            text = line.decode("utf-8", errors="replace").lstrip("\ufeff")
            words = text.split()
            if not words or words[0][0] in ";#":
                continue
            try:
                if "\ufffd" in text:
                    raise ValueError("is not UTF-8 text; convert the file")
                if (row := parse(words, path)) is not None:
                    rows.append(row)
            except ValueError as error:
                faults.add("refused lines", f"{path}:{number}: {error}")
    faults.raise_if_any()
    return rows


def _shown(words: Sequence[str]) -> str:
    return repr(" ".join(words)[:80])  # control characters escaped


def _region(start: str, end: str) -> Region:
    region = _seconds(start, "start"), _seconds(end, "end")
    if region[0] >= region[1]:
        raise ValueError(f"the region ends at {end}, not after its start at {start}; correct it")
    return region


def _seconds(word: str, what: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < MAX_SECONDS:
        raise ValueError(
            f"the {what} must be seconds from 0 to {MAX_SECONDS:g}, got {word}; correct it"
        )
    return value


def _check_order(path: Path | str, regions: Iterable[Sequence[float]]) -> None:
    for start, end in regions:
        if not 0 <= start <= end < math.inf:
            raise ValueError(f"{path}: {start} to {end} s is not a region; correct its times")
