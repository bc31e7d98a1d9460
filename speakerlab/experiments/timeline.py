"""Timelines: the page of a diarized recording, and the minutes with the most errors of a score."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speakerlab.core.atomic import write_text
from speakerlab.data.convert import spool_wave
from speakerlab.diarization.regions import Region, Turn
from speakerlab.diarization.scoring import errors_by_minute
from speakerlab.experiments.hardest import data_uri
from speakerlab.experiments.report import Facts, render
from speakerlab.inference.diarize import Diarization

log = logging.getLogger(__name__)
NUM_WORST, PLAYED_RATE = 5, 16000  # minutes; Hz
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


def worst_minutes(
    reference: Mapping[str, Sequence[Turn]],
    hypothesis: Mapping[str, Sequence[Turn]],
    *,
    regions: Mapping[str, Sequence[Region]] | None = None,
    audio: Mapping[str, str] | None = None,
    **protocol: Any,
) -> list[dict[str, Any]]:
    """Return the minutes with the most errors, the worst first, as the page of a score shows them.

    audio: recording -> path; one that cannot be read has no player. protocol: of `score`.
    """
    sides = {"REF": reference, "HYP": hypothesis}
    found: list[tuple[float, str, int]] = []
    for name in {*reference, *hypothesis}:
        pair = (turns.get(name, ()) for turns in sides.values())
        own = None if regions is None else regions[name]
        wrong_M = errors_by_minute(*pair, regions=own, **protocol)
        found += [(-seconds, name, 60 * number) for number, seconds in enumerate(wrong_M.tolist())]
    return [
        {
            "recording": name,
            "title": f", {clock(start)} – {clock(start + 60)}: {-wrong:.1f} s of errors",
            "clip": _clip_of((audio or {}).get(name), start),
            "lanes": [
                (side, speaker, _places(turns.get(name, ()), speaker, start))
                for side, turns in sides.items()
                for speaker in sorted({turn.speaker for turn in turns.get(name, ())})
                if _places(turns[name], speaker, start)
            ],
        }
        for wrong, name, start in sorted(found)[:NUM_WORST]
        if wrong < 0
    ]


def _places(turns: Sequence[Turn], speaker: str, start: float) -> list[tuple[float, float]]:
    """Return left bound and width, in percent of the minute, of the turns of a speaker in it."""
    own = [(max(t.start, start), min(t.end, start + 60)) for t in turns if t.speaker == speaker]
    return [((low - start) / 0.6, (high - low) / 0.6) for low, high in own if low < high]


def _clip_of(path: str | None, start: int) -> str | None:
    if path is None:
        return None
    try:
        wave_S = spool_wave(path, sample_rate=PLAYED_RATE)
    except (OSError, ValueError) as error:
        log.warning("no player: %s", error)
        return None
    return data_uri(wave_S[start * PLAYED_RATE : (start + 60) * PLAYED_RATE], PLAYED_RATE)


def ticks(seconds: float) -> range:
    fits = (step for step in TICK_SECONDS if seconds / step <= MAX_TICKS)
    return range(0, int(seconds) + 1, next(fits, TICK_SECONDS[-1]))


def clock(seconds: float) -> str:
    """Return a time as h:mm:ss.s, without hours below one."""
    minutes, rest = divmod(round(10 * seconds), 600)
    hours, minutes = divmod(minutes, 60)
    text = f"{minutes:02d}:{rest / 10:04.1f}"
    return f"{hours}:{text}" if hours else text
