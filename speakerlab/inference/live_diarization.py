"""Diarization with a bounded latency: the turns of a stream, found while the samples come.

Every BLOCK_SECONDS, a source of regions (`LiveSpeech` or `LiveSegmentation`) says what is speech.
Regions are cut into windows, as by `diarize`; new windows are embedded and added to the speakers so
far (`diarization/online.py`). Then the time up to now - latency is decided: each of its frames goes
to the nearest of these speakers; with a segmentation model, to the one or two most probable ones.
Samples and windows before this time are dropped, so only the turns take more and more memory.
Letters: S samples, N windows, K speakers so far, M local speakers of a segmentation model,
D embedding dimensions.
"""

import logging
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from speakerlab.diarization.clustering import MAX_SPEAKERS, unit_rows
from speakerlab.diarization.live_regions import ROUNDING_SECONDS, LiveRegion
from speakerlab.diarization.local_speakers import (
    Activity,
    LocalSpeakers,
    find_activity,
    find_tracks,
    match_tracks,
)
from speakerlab.diarization.online import OnlineSpeakers
from speakerlab.diarization.regions import Region
from speakerlab.diarization.resegmentation import Segment, find_segments
from speakerlab.diarization.windows import STEP_SECONDS, WINDOW_SECONDS
from speakerlab.inference.diarize import Diarization
from speakerlab.inference.known_speakers import Model
from speakerlab.inference.live_turns import GrowingTurns, LiveNames
from speakerlab.inference.speech_windows import audible_windows

log = logging.getLogger(__name__)
BLOCK_SECONDS = 0.25
# Samples kept besides a window and the time in which its region is found.
SPARE_SECONDS = 1.5


class Source(Protocol):
    """Finder of regions of speech in blocks of samples."""

    # After this time at most, it is known whether a frame is speech.
    decision_seconds: float
    context_seconds: float  # of the windows of a segmentation model, else 0

    @property
    def newest(self) -> LocalSpeakers | None:
        """Return the last window of a segmentation model."""
        ...

    def push(self, wave_S: np.ndarray) -> list[LiveRegion]:
        """Hear a block; return the regions that began, grew or ended."""
        ...

    def finish(self) -> list[LiveRegion]:
        """Return the last regions, closed."""
        ...

    def local(self, start: float, end: float) -> LocalSpeakers | None:
        """Return the windows of a segmentation model that share time with start to end."""
        ...

    def forget(self, time: float) -> None:
        """Forget the windows of a segmentation model that end before a time."""
        ...


class LiveDiarization:
    """Diarization of a stream with a finite latency."""

    def __init__(
        self,
        model: Model,
        source: Source,
        *,
        latency: float,
        delay: float,
        threshold: float | None,
        max_speakers: int | None,
        known: bool,
        far: float | None,
        recording: str,
    ) -> None:
        """Start with no speakers.

        latency: seconds of later audio with which a time is final at the latest.
        delay: seconds by which resampling delays the samples.
        threshold: cosine from which a window belongs to a speaker; None: `model.tuning` has it.
        known: name speakers after the enrolled ones, at the false-alarm rate `far`.
        """
        self._model = model
        self._source = source
        self._recording = recording
        self._latency = latency
        self._delay = delay
        self._rate: int = model.sample_rate
        self._block_samples = round(BLOCK_SECONDS * self._rate)
        kept_seconds = WINDOW_SECONDS + source.decision_seconds + SPARE_SECONDS
        self._kept_samples = round(kept_seconds * self._rate)
        tuned: float = model.tuning.threshold
        self._speakers = OnlineSpeakers(
            threshold=tuned if threshold is None else threshold,
            max_speakers=max_speakers or MAX_SPEAKERS,
        )
        self._names = LiveNames(self._speakers, model if known else None, far)
        self._wave_S = np.zeros(0, dtype=np.int16)  # the last samples
        self._num_samples = 0  # heard, in full blocks
        self._rest_S = np.zeros(0, dtype=np.int16)  # since the last full block
        self._regions: list[LiveRegion] = []  # that reach beyond the final time
        self._next_start = 0.0  # of the next window of the last region
        self._windows: list[Region] = []  # in order of time
        self._units: list[np.ndarray] = []  # unit_D of each window
        self._turns = GrowingTurns()
        self.final_until = 0.0

    @property
    def current(self) -> list[Segment]:
        """Return the turns that have not ended yet, up to `final_until`."""
        return self._turns.current

    def hear(self, wave_S: np.ndarray) -> list[Segment]:
        """Hear samples; return the turns that they complete, in order of their starts."""
        num_turns_before = len(self._turns.complete)
        rest_S = np.concatenate([self._rest_S, wave_S])
        while len(rest_S) >= self._block_samples:
            block_S, rest_S = np.split(rest_S, [self._block_samples])
            self._hear_block(block_S)
        self._rest_S = rest_S
        new_turns = self._turns.complete[num_turns_before:]
        return sorted(new_turns)

    def finish(self) -> list[Segment]:
        """End the stream; return the remaining turns."""
        num_turns_before = len(self._turns.complete)
        if len(self._rest_S):
            self._hear_block(self._rest_S)
        last_regions = self._source.finish()
        self._add_regions(last_regions)
        self._decide(self._now)
        self._turns.end_before(math.inf)
        if not self._turns.complete:
            log.warning("%s: no speech was found", self._recording)
        new_turns = self._turns.complete[num_turns_before:]
        return sorted(new_turns)

    def diarization(self) -> Diarization:
        """Return all complete turns and their speakers."""
        # Of turns that overlap, the first may have ended last.
        turns = sorted(self._turns.complete)
        speakers = self._names.embeddings(turn.speaker for turn in turns)
        return Diarization(
            recording=self._recording,
            seconds=self._now,
            segments=turns,
            speakers=speakers,
            matches=self._names.matches(speakers),
        )

    @property
    def _now(self) -> float:
        """Return the seconds heard."""
        return self._num_samples / self._rate

    def _hear_block(self, block_S: np.ndarray) -> None:
        self._num_samples += len(block_S)
        wave_S = np.concatenate([self._wave_S, block_S])
        self._wave_S = wave_S[-self._kept_samples :]
        changed_regions = self._source.push(block_S)
        self._add_regions(changed_regions)
        # The next decision comes a block later, and resampling delays the samples. What must be
        # final by then is decided now: with a latency of 2 s and no delay, at 10 s everything
        # before 8.25 s.
        ahead_seconds = BLOCK_SECONDS + self._delay
        self._decide(self._now + ahead_seconds - self._latency)

    def _add_regions(self, changed: Sequence[LiveRegion]) -> None:
        """Find speakers in regions that began, grew or ended."""
        for region in changed:
            new_windows = self._new_windows(region)
            windows, units = self._embed(new_windows)
            for unit_D in units:
                number = self._speakers.add(unit_D)
                if number is not None:
                    self._names.recognize(number)
            self._windows += windows
            self._units += units
        newest = self._source.newest
        if changed and newest is not None and self._windows:
            tracks = find_tracks(newest, self._windows, np.stack(self._units))
            for number in self._speakers.tell_apart(tracks):
                self._names.recognize(number)

    def _new_windows(self, region: LiveRegion) -> list[Region]:
        """Return the windows of a region that can be cut now, and could not before."""
        if not self._regions or self._regions[-1] is not region:
            self._regions.append(region)
            self._next_start = region.start
        windows: list[Region] = []
        # As `cut_windows` does; its last window ends with the region.
        while self._next_start + WINDOW_SECONDS < region.end - ROUNDING_SECONDS:
            window = (self._next_start, self._next_start + WINDOW_SECONDS)
            windows.append(window)
            self._next_start += STEP_SECONDS
        if not region.is_open:
            windows.append(_last_window(region))
        return windows

    def _embed(
        self, windows: Sequence[Region]
    ) -> tuple[list[Region], list[np.ndarray]]:
        """Embed windows; return those that are not digital silence, and unit_D of each."""
        # Only the last samples are kept, which begin here in the stream.
        num_forgotten = self._num_samples - len(self._wave_S)
        kept_from = num_forgotten / self._rate
        # From times in the stream to times in these samples, and back.
        inner_windows = [(start - kept_from, end - kept_from) for start, end in windows]
        audible, reads = audible_windows(
            inner_windows,
            self._wave_S,
            self._rate,
        )
        audible_in_stream = [
            (start + kept_from, end + kept_from) for start, end in audible
        ]
        emb_ND = self._model.embed_many(reads, check_levels=False)
        unit_ND = unit_rows(emb_ND)
        return audible_in_stream, list(unit_ND)

    def _decide(self, until: float) -> None:
        """Make the time before `until` final; add its turns."""
        until = min(until, self._now)
        if until <= self.final_until:
            return
        for segment in self._segments_before(until):
            name = self._name(segment)
            self._turns.add(segment._replace(speaker=name))
        self.final_until = until
        self._turns.end_before(until - ROUNDING_SECONDS)
        self._forget(until)

    def _forget(self, until: float) -> None:
        """Forget what is final, except the voices in windows of a segmentation model."""
        self._source.forget(until)
        unfinished: list[LiveRegion] = []
        for region in self._regions:
            if region.is_open or region.end > until:
                unfinished.append(region)
        self._regions = unfinished
        needed_from = until - self._source.context_seconds
        num_old = sum(end <= needed_from for _, end in self._windows)
        del self._windows[:num_old]
        del self._units[:num_old]

    def _segments_before(self, until: float) -> list[Segment]:
        """Return the segments between the final time and `until`."""
        regions: list[LiveRegion] = []
        for region in self._regions:
            if region.start < until and region.end > self.final_until:
                regions.append(region)
        if not regions:
            return []
        windows, units = self._windows_before(until, regions[-1])
        if not windows:
            return []
        unit_ND = np.stack(units)
        # At a short latency, the first speech is decided before its first full window.
        has_speakers = bool(self._speakers.numbers)
        direction_KD = self._speakers.direction_KD if has_speakers else unit_ND[:1]
        activity = self._activity(until, windows, unit_ND, direction_KD)

        num_old = sum(end <= self.final_until for _, end in windows)
        windows = windows[num_old:]
        cosine_NK = unit_ND[num_old:] @ direction_KD.T
        parts = _covered_parts(regions, windows)
        segments: list[Segment] = []
        for segment in find_segments(parts, windows, cosine_NK, activity):
            start = max(segment.start, self.final_until)
            end = min(segment.end, until)
            if end - start > ROUNDING_SECONDS:
                segments.append(segment._replace(start=start, end=end))
        return segments

    def _windows_before(
        self, until: float, last_region: LiveRegion
    ) -> tuple[list[Region], list[np.ndarray]]:
        """Return the windows, up to `until` or later, and unit_D of each.

        Only the full windows of a region are stored before its end is known. If they end before
        `until`, one more window is added: it ends with the last sample of the region so far.
        """
        windows = list(self._windows)
        units = list(self._units)
        last_start, last_end = _last_window(last_region)
        is_covered = bool(windows) and windows[-1][1] >= until
        if last_region.is_open and not is_covered and last_start < until:
            last_windows, last_units = self._embed([(last_start, last_end)])
            windows += last_windows
            units += last_units
        return windows, units

    def _activity(
        self,
        until: float,
        windows: Sequence[Region],
        unit_ND: np.ndarray,
        direction_KD: np.ndarray,
    ) -> Activity | None:
        """Return when each speaker speaks, as a segmentation model hears it."""
        local = self._source.local(self.final_until, until)
        if local is None:
            return None
        tracks = find_tracks(local, windows, unit_ND)
        speaker_M = match_tracks(direction_KD, tracks)
        return find_activity(local, tracks, speaker_M, len(direction_KD))

    def _name(self, segment: Segment) -> str:
        """Return the name of the speaker of a segment, which `find_segments` calls "speaker1"."""
        # "speaker1" is the first of the speakers so far; before there is any, it has the number
        # that the first will have, 0.
        index = int(segment.speaker.removeprefix("speaker")) - 1
        numbers = self._speakers.numbers or [0]
        return self._names.name(numbers[index])


def _covered_parts(
    regions: Sequence[LiveRegion], windows: Sequence[Region]
) -> list[Region]:
    """Return the regions from their first windows on; those before are forgotten."""
    parts: list[Region] = []
    for region in regions:
        starts: list[float] = []
        for start, _ in windows:
            if region.start - ROUNDING_SECONDS <= start < region.end:
                starts.append(start)
        if starts:
            parts.append((max(region.start, starts[0]), region.end))
    return parts


def _last_window(region: LiveRegion) -> Region:
    """Return the window that ends with a region."""
    return max(region.end - WINDOW_SECONDS, region.start), region.end
