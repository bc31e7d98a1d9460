"""The page of a diarized recording: a timeline of each speaker, whose segments can be played."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speakerlab.core.atomic import write_text
from speakerlab.experiments.report import Facts, render
from speakerlab.inference.diarize import Diarization

TICK_SECONDS = (1, 5, 10, 30, 60, 300, 600)  # between two marks of the time axis
MAX_TICKS = 12


def write_timeline_page(
    path: Path, found: Diarization, *, audio: str, note: str, facts: Facts
) -> None:
    """Write the page of a recording. audio: its data URI or link; note: where it is."""
    speakers = found.to_dict()["speakers"]
    shown = {
        "seconds": found.seconds,
        "rows": [(name, _facts_of(row)) for name, row in speakers.items()],
        "segments": [
            (name, [(s, clock(s.start), clock(s.end)) for s in found if s.speaker == name])
            for name in speakers
        ],
        "ticks": [(tick, clock(tick)[:-2]) for tick in ticks(found.seconds)],
        "audio": audio,
        "note": note,
    }
    title = f"Who spoke when: {found.recording}"
    write_text(path, render("timeline.html.j2", title=title, facts=facts, **shown))


def _facts_of(row: Mapping[str, Any]) -> str:
    if (match := row.get("match")) is None:
        return clock(row["seconds"])
    verdict = "known" if match["is_known"] else f"unknown, nearest {match['name']}"
    return f"{clock(row['seconds'])}, {verdict}, score {match['score']:.3f}"


def ticks(seconds: float) -> range:
    """Return the marks of a time axis, in seconds."""
    fits = (step for step in TICK_SECONDS if seconds / step <= MAX_TICKS)
    return range(0, int(seconds) + 1, next(fits, TICK_SECONDS[-1]))


def clock(seconds: float) -> str:
    """Return a time as h:mm:ss.s, without hours below one."""
    minutes, rest = divmod(round(10 * seconds), 600)
    hours, minutes = divmod(minutes, 60)
    text = f"{minutes:02d}:{rest / 10:04.1f}"
    return f"{hours}:{text}" if hours else text
