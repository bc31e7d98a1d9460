"""Timelines of a diarized recording, and of the minutes with the most errors in a score."""

import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.core.atomic import write_text
from speakerlab.data.convert import spool_wave
from speakerlab.diarization.regions import Region, Turn
from speakerlab.diarization.resegmentation import Segment
from speakerlab.diarization.scoring import errors_by_minute
from speakerlab.experiments.hardest import data_uri
from speakerlab.experiments.report import Facts, render
from speakerlab.inference.diarize import Diarization

log = logging.getLogger(__name__)
NUM_WORST = 5  # minutes
PLAYED_RATE = 16000  # Hz
TICK_SECONDS = (1, 5, 10, 30, 60, 300, 600)  # between two marks of the time axis
MAX_TICKS = 12
SECONDS = 60  # of a minute
PERCENT_SECONDS = 0.6  # one percent of a minute

TimedSegment = tuple[Segment, str, str]  # segment, and its start and end as text
Row = tuple[str, str, list[TimedSegment]]  # speaker, facts, segments
NO_CHANNEL = 0  # of a recording whose channels were not diarized apart
Minute = tuple[str, int, float]  # recording, start, seconds of errors
Place = tuple[float, float]  # left bound and width of a turn, in percent of a minute
Lane = tuple[str, str, list[Place]]  # REF or HYP, speaker, turns


def write_timeline_page(
    path: Path,
    diarization: Diarization,
    *,
    audio: str,
    note: str,
    facts: Facts,
    channel_audio: Mapping[int, str] | None = None,
) -> None:
    """Write the page of a recording.

    audio: its data URI or link. note: its location. channel_audio: channel -> data URI, played by
    the segments of this channel.
    """
    # The template draws one lane for each speaker, below the text of the speaker's row.
    groups: dict[int, list[Row]] = {}
    speakers = diarization.to_dict()["speakers"]
    for name, row in speakers.items():
        segments = _segments_of(diarization, name)
        channel = diarization.channel_of.get(name, NO_CHANNEL)
        groups.setdefault(channel, []).append((name, _facts_of(row), segments))

    marks: list[tuple[int, str]] = []
    for tick in ticks(diarization.seconds):
        # Ticks are whole seconds.
        whole_seconds = clock(tick).removesuffix(".0")
        marks.append((tick, whole_seconds))
    page = render(
        "timeline.html.j2",
        title=f"Who spoke when: {diarization.recording}",
        facts=facts,
        seconds=diarization.seconds,
        groups=sorted(groups.items()),
        ticks=marks,
        audio=audio,
        channel_audio=channel_audio or {},
        note=note,
    )
    write_text(path, page)


def _segments_of(diarization: Diarization, speaker: str) -> list[TimedSegment]:
    """Return the segments of a speaker, with start and end as text."""
    segments: list[TimedSegment] = []
    for segment in diarization:
        if segment.speaker == speaker:
            start = clock(segment.start)
            end = clock(segment.end)
            segments.append((segment, start, end))
    return segments


def _facts_of(row: Mapping[str, Any]) -> str:
    speech_time = clock(row["seconds"])
    # A match exists only with enrolled speakers; its score may be too low to name the speaker.
    match = row.get("match")
    if match is None:
        return speech_time
    verdict = "known"
    if not match["is_known"]:
        verdict = f"unknown, nearest {match['name']}"
    return f"{speech_time}, {verdict}, score {match['score']:.3f}"


def worst_minutes(
    reference: Mapping[str, Sequence[Turn]],
    hypothesis: Mapping[str, Sequence[Turn]],
    *,
    regions: Mapping[str, Sequence[Region]] | None = None,
    audio: Mapping[str, str] | None = None,
    collar: float = 0.0,
    skip_overlap: bool = False,
) -> list[dict[str, Any]]:
    """Return the minutes with the most errors, the worst first, as values for the template.

    audio: recording -> path; a recording that cannot be read has no player. regions, collar,
    skip_overlap: as for `score`, regions by recording.
    """
    minutes: list[Minute] = []
    for recording in {*reference, *hypothesis}:
        wrong_M = errors_by_minute(
            reference.get(recording, ()),
            hypothesis.get(recording, ()),
            regions=None if regions is None else regions[recording],
            collar=collar,
            skip_overlap=skip_overlap,
        )
        for number in np.flatnonzero(wrong_M > 0).tolist():
            wrong = float(wrong_M[number])
            minutes.append((recording, SECONDS * number, wrong))
    # Most errors first. The sort is stable: minutes with equal errors stay in order.
    minutes.sort()
    minutes.sort(key=itemgetter(2), reverse=True)

    shown: list[dict[str, Any]] = []
    for recording, start, wrong in minutes[:NUM_WORST]:
        end = start + SECONDS
        path = audio.get(recording) if audio else None
        reference_turns = reference.get(recording, ())
        hypothesis_turns = hypothesis.get(recording, ())
        lanes = _lanes_of("REF", reference_turns, start)
        lanes += _lanes_of("HYP", hypothesis_turns, start)
        minute = {
            "recording": recording,
            "title": f", {clock(start)} – {clock(end)}: {wrong:.1f} s of errors",
            "clip": _clip_of(path, start),
            "lanes": lanes,
        }
        shown.append(minute)
    return shown


def _lanes_of(side: str, turns: Sequence[Turn], start: int) -> list[Lane]:
    """Return the lane of each speaker who speaks in the minute."""
    lanes: list[Lane] = []
    speakers = {turn.speaker for turn in turns}
    for speaker in sorted(speakers):
        places = _places(turns, speaker, start)
        if places:
            lanes.append((side, speaker, places))
    return lanes


def _places(turns: Sequence[Turn], speaker: str, start: int) -> list[Place]:
    """Return left bound and width, in percent of the minute, of the turns of a speaker in it."""
    places: list[Place] = []
    for turn in turns:
        low = max(turn.start, start)
        high = min(turn.end, start + SECONDS)
        if turn.speaker == speaker and low < high:
            left = (low - start) / PERCENT_SECONDS
            width = (high - low) / PERCENT_SECONDS
            places.append((left, width))
    return places


def _clip_of(path: str | None, start: int) -> str | None:
    if path is None:
        return None
    try:
        # A listener hears all channels.
        wave_S = spool_wave(path, sample_rate=PLAYED_RATE, channels="mix")
    except (OSError, ValueError) as error:
        # The timeline of the minute is useful without audio, too.
        log.warning("no player: %s", error)
        return None
    first = start * PLAYED_RATE
    last = first + SECONDS * PLAYED_RATE
    return data_uri(wave_S[first:last], PLAYED_RATE)


def ticks(seconds: float) -> range:
    step = TICK_SECONDS[-1]  # for recordings of any length
    for step_seconds in TICK_SECONDS:
        if seconds / step_seconds <= MAX_TICKS:
            step = step_seconds
            break
    return range(0, int(seconds) + 1, step)


def clock(seconds: float) -> str:
    """Return a time as h:mm:ss.s, without hours below one."""
    # Round first, so that 59.96 s is one minute and not 60.0 seconds.
    tenths = round(10 * seconds)
    minutes, tenths_of_minute = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    text = f"{minutes:02d}:{tenths_of_minute / 10:04.1f}"
    return f"{hours}:{text}" if hours else text
