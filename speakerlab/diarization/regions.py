"""Speech regions and speaker turns. In: RTTM, .lab and UEM files. Out: times in seconds.

Formats, one entry per line; blank lines and lines that start with ; or # are skipped:
- RTTM: `SPEAKER recording channel start duration <NA> <NA> speaker <NA> [<NA>]` (NIST, RT-09
  evaluation plan, appendix A); SPKR-INFO lines are skipped, other types refused;
- UEM, the regions to score: `recording channel start end` (the same plan);
- .lab, speech regions of one recording: `start end [speech|sp]`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from speakerlab.core.atomic import write_text
from speakerlab.core.faults import Faults
from speakerlab.core.leftovers import is_leftover
from speakerlab.core.reading import open_text, refuse_twins

Region = tuple[float, float]  # start and end in seconds
Row = TypeVar("Row")
MAX_SECONDS = 1e9  # 32 years; a later time is an error in the file
NOTHING = "<NA>"  # in a column of RTTM without a value
SURROGATE = re.compile("[\ud800-\udfff]")  # read in place of a byte that is not UTF-8
# A number, a letter or nothing. Any other channel is the second word of a recording's name, or a
# time in the place of a missing channel.
CHANNEL = re.compile(r"\d+|[A-Za-z]|(ch|channel)\d+|<NA>|NA|-", re.IGNORECASE)


class Turn(NamedTuple):
    """Time in which one speaker speaks; turns sort by start."""

    start: float  # seconds
    end: float
    speaker: str


def read_rttm(path: Path) -> dict[str, list[Turn]]:
    """Return the turns of each recording of an RTTM file, or of all `*.rttm` files of a folder.

    In a folder, an empty file represents a recording without turns; its name is the recording's.
    A recording must be in one file, and have one channel. Raises ValueError with a message for each
    refused line.
    """
    paths = list_rttm(path)
    if not paths:
        raise ValueError(
            f"{path}: has no .rttm files; give another folder or one RTTM file"
        )
    # Recording -> the file and the channel of its first turn.
    origins: dict[str, tuple[Path, str]] = {}

    def parse(columns: Sequence[str], file: Path) -> tuple[str, Turn] | None:
        if columns[0] == "SPKR-INFO":
            return None
        if not _is_turn(columns):
            raise ValueError(
                "is not 'SPEAKER recording channel start duration <NA> <NA> speaker"
                f" <NA> <NA>' with names of one word, got {_quote(columns)}; correct or"
                " remove the line"
            )
        _, recording, channel, start_text, duration_text, _, _, speaker, *_ = columns
        first_file, first_channel = origins.setdefault(recording, (file, channel))
        if file != first_file:
            raise ValueError(
                f"{recording} is also in {first_file}; keep one of the two"
            )
        if channel != first_channel:
            raise ValueError(
                f"{recording} has channels {first_channel} and {channel}; give each"
                " channel a different name"
            )
        start = parse_seconds(start_text, "start")
        duration = parse_seconds(duration_text, "duration")
        # Round, so that turns that touch in decimal numbers also touch in floating point.
        end = round(start + duration, 9)
        return recording, Turn(start, end, speaker)

    turns: dict[str, list[Turn]] = {}
    for recording, turn in _read_rows(paths, parse):
        turns.setdefault(recording, []).append(turn)
    _check_names(turns, path)
    if path.is_dir():
        files_with_turns = {file for file, _ in origins.values()}
        for empty_file in set(paths) - files_with_turns:
            turns.setdefault(empty_file.stem, [])
    return dict(sorted(turns.items()))


def _check_names(turns: Mapping[str, Sequence[Turn]], path: Path) -> None:
    """Refuse names of recordings, or of speakers of a recording, that look alike."""
    refuse_twins(turns, where=str(path), kind="recordings")
    for recording, recording_turns in turns.items():
        refuse_twins(
            {turn.speaker for turn in recording_turns},
            where=f"{path}: {recording}",
            kind="speakers",
        )


def list_rttm(path: Path) -> list[Path]:
    """Return an RTTM file, or the `*.rttm` files of a folder, without copies of editors."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.glob("*.rttm") if not is_leftover(file.name))


def _is_turn(columns: Sequence[str]) -> bool:
    """Return whether these are the 9 or 10 columns of a speaker's turn.

    A blank in a name, or a missing column, shifts the others: then a column that has no value in
    turns has one, or the speaker has none.
    """
    # The last column, the signal look-ahead time, is missing in older files.
    if columns[0] != "SPEAKER" or len(columns) not in (9, 10):
        return False
    channel = columns[2]
    subtype = columns[6]
    speaker = columns[7]
    if not CHANNEL.fullmatch(channel):
        return False
    if subtype.upper() != NOTHING or speaker.upper() == NOTHING:
        return False
    # A confidence such as 0.9 has a point. A whole number is most likely the second word of a
    # name such as `Speaker 2`: without it, several speakers would be one.
    confidence = columns[8]
    if confidence.isdecimal():
        return False
    # The confidence and the look-ahead time.
    return all(_is_number_or_nothing(column) for column in columns[8:])


def _is_number_or_nothing(text: str) -> bool:
    if text.upper() == NOTHING:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def write_rttm(path: Path, turns: Mapping[str, Iterable[Turn]]) -> None:
    """Write the turns of recordings as RTTM, to the millisecond."""
    write_text(path, format_rttm(turns, where=path))


def format_rttm(
    turns: Mapping[str, Iterable[Turn]],
    *,
    where: Path | str = "turns",
) -> str:
    """Return the turns of recordings as the lines of an RTTM file."""
    rows: list[tuple[str, Turn]] = []
    # A set, because most names are in many rows.
    names: set[str] = set()
    for recording in turns:
        for turn in sorted(turns[recording]):
            rows.append((recording, turn))
            names |= {recording, turn.speaker}
    # A name of two words would shift the columns.
    for name in names:
        if name.split() != [name]:
            raise ValueError(
                f"{where}: '{name}' is not one word; rename the recording or speaker"
            )
    for _, turn in rows:
        _check_order(where, turn.start, turn.end)

    lines: list[str] = []
    for recording, (start, end, speaker) in rows:
        # Subtract rounded times, so that turns that touch still touch after reading.
        duration = round(end, 3) - round(start, 3)
        lines.append(
            f"SPEAKER {recording} 1 {start:.3f} {duration:.3f} <NA> <NA> {speaker} <NA> <NA>\n"
        )
    return "".join(lines)


def read_uem(path: Path) -> dict[str, list[Region]]:
    """Return the regions to score of each recording, merged."""

    def parse(columns: Sequence[str], _file: Path) -> tuple[str, Region]:
        if len(columns) != 4 or not CHANNEL.fullmatch(columns[1]):
            raise ValueError(
                "is not 'recording channel start end' with a name of one word, got"
                f" {_quote(columns)}; correct it"
            )
        recording, _channel, start, end = columns
        return recording, _parse_region(start, end)

    regions: dict[str, list[Region]] = {}
    rows = sorted(_read_rows([path], parse))
    for recording, region in rows:
        regions.setdefault(recording, []).append(region)
    refuse_twins(regions, where=str(path), kind="recordings")
    return {name: merge_regions(regions[name]) for name in regions}


def write_uem(path: Path, regions: Mapping[str, Iterable[Region]]) -> None:
    """Write regions of recordings as UEM, to the millisecond."""
    lines: list[str] = []
    for name in regions:
        for start, end in sorted(regions[name]):
            _check_order(path, start, end)
            lines.append(f"{name} 1 {start:.3f} {end:.3f}\n")
    write_text(path, "".join(lines))


def read_lab(path: Path) -> list[Region]:
    """Return the speech regions of a .lab file, merged."""

    def parse(columns: Sequence[str], _file: Path) -> Region:
        label = columns[2:]
        # Regions with another label, such as music, would be diarized as speech.
        is_speech = label in ([], ["speech"], ["sp"])
        if len(columns) < 2 or not is_speech:
            raise ValueError(
                f"is not 'start end speech' in seconds, got {_quote(columns)}; correct"
                " it, or remove it if it is not speech"
            )
        return _parse_region(columns[0], columns[1])

    return merge_regions(_read_rows([path], parse))


def merge_regions(regions: Iterable[Region], *, pause: float = 0.0) -> list[Region]:
    """Return the union of regions as sorted disjoint regions; regions of all speakers are joined.

    Regions less than `pause` seconds apart are joined, too.
    """
    return _union(regions, lambda seconds: seconds <= 0 or seconds < pause)


def merge_turns(turns: Iterable[Turn]) -> tuple[list[Turn], int]:
    """Merge overlapping turns of one speaker; return all turns, sorted, and how many were merged.

    Turns that only touch stay separate, because a score has a collar around the bound between them.
    """
    regions: dict[str, list[Region]] = {}
    num_turns = 0
    for start, end, speaker in turns:
        region = (start, end)
        regions.setdefault(speaker, []).append(region)
        num_turns += 1

    merged: list[Turn] = []
    for speaker in regions:
        # Less than 0 seconds apart: only overlapping turns.
        union = _union(regions[speaker], lambda seconds: seconds < 0)
        for start, end in union:
            merged.append(Turn(start, end, speaker))
    return sorted(merged), num_turns - len(merged)


def _union(
    regions: Iterable[Region],
    joins_over: Callable[[float], bool],
) -> list[Region]:
    """Return sorted regions; join neighbours if `joins_over` accepts the seconds between them.

    The seconds are negative if the two regions overlap.
    """
    union: list[Region] = []
    for start, end in sorted(regions):
        if not union:
            union.append((start, end))
            continue
        last_start, last_end = union[-1]
        if joins_over(start - last_end):
            # The last region may end later, because regions are sorted by their starts.
            union_end = max(end, last_end)
            union[-1] = (last_start, union_end)
        else:
            union.append((start, end))
    return union


def _read_rows(
    paths: Sequence[Path],
    parse: Callable[[Sequence[str], Path], Row | None],
) -> list[Row]:
    """Return the result of `parse(columns, file)` for each line.

    Lines for which `parse` returns None are skipped. Its ValueErrors are collected and raised as
    one ValueError with file and line of each.
    """
    faults = Faults()
    rows: list[Row] = []
    for path in paths:
        # A byte that is not UTF-8 becomes a surrogate, so that every such line can be named.
        with open_text(path, errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                columns = line.split()
                is_comment = line.lstrip().startswith((";", "#"))
                if not columns or is_comment:
                    continue
                try:
                    if SURROGATE.search(line):
                        raise ValueError("is not UTF-8 text; save it as UTF-8")
                    row = parse(columns, path)
                except ValueError as error:
                    faults.add("refused lines", f"{path}:{number}: {error}")
                    continue
                if row is not None:
                    rows.append(row)
    faults.raise_if_any()
    return rows


def _quote(columns: Sequence[str]) -> str:
    """Return the start of a line for an error message, with control characters escaped."""
    line = " ".join(columns)
    return repr(line[:80])


def _parse_region(start_text: str, end_text: str) -> Region:
    start = parse_seconds(start_text, "start")
    end = parse_seconds(end_text, "end")
    if start >= end:
        raise ValueError(
            f"the region ends at {end_text}, not after its start at {start_text};"
            " correct it"
        )
    return start, end


def parse_seconds(text: str, column: str) -> float:
    """Return a time in seconds; ValueError with the name of the column for other text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan  # refused below, because NaN is in no range
    if not 0 <= seconds < MAX_SECONDS:
        raise ValueError(
            f"the {column} must be seconds from 0 to {MAX_SECONDS:g}, got {text};"
            " correct it"
        )
    return seconds


def _check_order(where: Path | str, start: float, end: float) -> None:
    if not 0 <= start <= end < math.inf:
        raise ValueError(
            f"{where}: {start} to {end} s is not a region; correct its times"
        )
