"""Diarization of audio that comes bit by bit: turns with a bounded latency, never taken back.

Every BLOCK_SECONDS, a source of regions (`LiveSpeech` or `LiveSegmentation`) says what is speech.
Regions are cut into windows, as by `diarize`; new windows are embedded and added to the speakers so
far (`diarization/online.py`). Then the time up to now - latency is decided: each of its frames goes
to the nearest of these speakers; with a segmentation model, to the one or two most probable ones.
What is behind this time is forgotten, so memory does not grow with the stream, except by the turns.
Letters: S samples, N windows, K speakers so far, D embedding dimensions.
"""

import logging
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from speakerlab.data.convert import Channels, ChunkReader
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
from speakerlab.inference.diarize import Diarization, diarize
from speakerlab.inference.known_speakers import (
    Match,
    Model,
    check_enrolled,
    match_enrolled,
)
from speakerlab.inference.live_segmentation import LiveSegmentation
from speakerlab.inference.live_speech import LiveSpeech
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.speech_windows import audible_windows, open_segmentation

log = logging.getLogger(__name__)
BLOCK_SECONDS = 0.25
LATENCY_SECONDS = 2.0
MIN_LATENCY_SECONDS = 1.0
# Samples kept besides a window and the time in which its region is found.
SPARE_SECONDS = 1.5


class Source(Protocol):
    """What finds regions of speech in blocks of samples."""

    # After this time at most, it is known whether a frame is speech.
    decision_seconds: float
    context_seconds: float  # of the windows of a segmentation model, else 0

    @property
    def newest(self) -> LocalSpeakers | None:
        """Return the last window of a segmentation model."""
        ...

    def push(self, wave_S: np.ndarray) -> list[LiveRegion]:
        """Hear a block; return the regions that began, went on or ended."""
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


class Stream:
    """Diarization of audio that comes bit by bit; see `SpeakerModel.stream`.

    Turns are `Segment`s. A turn is returned by the `push` that makes it final: at the latest when
    `latency` seconds after its end were pushed. It is never changed or taken back, and speakers
    keep their names. With a segmentation model, turns of two speakers may overlap. `push` can be
    called with arrays of any length; their lengths change no turn.
    """

    def __init__(
        self,
        model: Model,
        sample_rate: int | None = None,
        *,
        latency: float | None = LATENCY_SECONDS,
        max_speakers: int | None = None,
        threshold: float | None = None,
        known: bool = False,
        far: float | None = None,
        recording: str = "stream",
        channels: Channels = None,
        segmentation: Segmentation | Path | str | None = None,
        **offline: Any,
    ) -> None:
        """Start a stream; for the parameters, see `SpeakerModel.stream`."""
        self._reader = ChunkReader(
            sample_rate=model.sample_rate,
            source_rate=sample_rate,
            channels=channels,
            where=recording,
        )
        self.latency = _check_latency(latency)
        segmenter = open_segmentation(segmentation)
        _check_number("max_speakers", max_speakers)
        if threshold is not None and not -1 <= threshold <= 1:
            raise ValueError(
                f"threshold: must be a cosine from -1 to 1, got {threshold!r}"
            )
        if known:
            check_enrolled(model)
            # A wrong `far` is an error now, not at the first speaker.
            match_enrolled(model.speakers, model, far=far)
        elif far is not None:
            raise ValueError("far: decides who is known; give known=True")
        self._finder: _Whole | _Live
        if self.latency == math.inf:
            if threshold is not None:
                raise ValueError(
                    "threshold: is for a finite latency; give method=Ahc(threshold=...)"
                )
            options = {
                **offline,
                "recording": recording,
                "max_speakers": max_speakers,
                "segmentation": segmenter,
                "known": known,
                "far": far,
            }
            self._finder = _Whole(model, options)
        else:
            if offline:
                raise ValueError(
                    f"{min(offline)}: needs the whole recording; leave it out, or give"
                    " latency=math.inf"
                )
            source = _open_source(segmenter, model.sample_rate, self.latency)
            least_seconds = source.decision_seconds + self._reader.delay_seconds
            if self.latency < least_seconds:
                # Rounded up, so that the stated value is accepted.
                stated_seconds = math.ceil(100 * least_seconds) / 100
                cause = "this sample rate"
                if segmenter is not None:
                    cause += " with a segmentation model"
                raise ValueError(
                    f"latency: must be at least {stated_seconds:g} s for {cause}, got"
                    f" {latency!r}"
                )
            self._finder = _Live(
                model,
                source,
                latency=self.latency,
                delay=self._reader.delay_seconds,
                threshold=threshold,
                max_speakers=max_speakers,
                known=known,
                far=far,
                recording=recording,
            )
        self._diarization: Diarization | None = None

    @property
    def current(self) -> list[Segment]:
        """Return the turns that go on, so far as they are final; their ends will change."""
        return self._finder.current

    @property
    def final_until(self) -> float:
        """Return the time in seconds before which all turns are final."""
        return self._finder.final_until

    @property
    def diarization(self) -> Diarization:
        """Return all turns and the speakers; ValueError before `finish`."""
        if self._diarization is None:
            raise ValueError("stream: goes on; call finish first")
        return self._diarization

    def push(self, audio: Any) -> list[Segment]:
        """Hear the next samples; return the turns that are final now, in order of their starts.

        audio: an array or tensor of shape (samples,) or (samples, channels); types as in
        `SpeakerModel.embed`. Raises ValueError with one line for what is no audio.
        """
        if self._diarization is not None:
            raise ValueError("stream: is finished; start another one")
        return self._finder.hear(self._reader.read(audio))

    def finish(self) -> list[Segment]:
        """End the stream; return the remaining turns. Raises ValueError if it had no audio."""
        if self._diarization is not None:
            return []
        wave_S = self._reader.finish()
        turns = self._finder.hear(wave_S)
        turns += self._finder.finish()
        self._diarization = self._finder.diarization()
        return turns


def _check_latency(latency: Any) -> float:
    """Return the latency in seconds; ValueError if it is none or too short."""
    if latency is None:
        return math.inf
    is_number = isinstance(latency, Real) and not isinstance(latency, bool)
    seconds = float(latency) if is_number else math.nan
    # The comparison is also false for nan.
    if not seconds >= MIN_LATENCY_SECONDS:
        raise ValueError(
            f"latency: must be at least {MIN_LATENCY_SECONDS:g} s, or math.inf for the"
            f" result of `diarize` at the end, got {latency!r}"
        )
    return seconds


def _open_source(
    segmentation: Segmentation | None, sample_rate: int, latency: float
) -> Source:
    """Return what finds the speech."""
    if segmentation is None:
        return LiveSpeech(sample_rate)
    return LiveSegmentation(
        segmentation,
        sample_rate=sample_rate,
        block_seconds=BLOCK_SECONDS,
        latency=latency,
    )


def _check_number(name: str, number: Any) -> None:
    """Raise ValueError unless a number of speakers is None, or whole and at least 1."""
    is_number = isinstance(number, int | np.integer) and number >= 1
    if number is not None and not is_number:
        raise ValueError(f"{name}: must be a whole number from 1 on, got {number!r}")


class _Whole:
    """Stream of infinite latency: `diarize` at its end."""

    final_until = 0.0

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options
        # Without a name: it is gone with this object.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._diarization: Diarization | None = None
        self.current: list[Segment] = []

    def hear(self, wave_S: np.ndarray) -> list[Segment]:
        self._file.write(wave_S.tobytes())
        return []

    def finish(self) -> list[Segment]:
        self._file.flush()
        wave_S = np.memmap(self._file, dtype=np.int16, mode="r")
        self._diarization = diarize(self._model, wave_S, **self._options)
        self._file.close()
        self.final_until = self._diarization.seconds
        return list(self._diarization)

    def diarization(self) -> Diarization:
        assert self._diarization is not None
        return self._diarization


class _Live:
    """Stream of finite latency."""

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
        self._names = _Names(self._speakers, model if known else None, far)
        self._wave_S = np.zeros(0, dtype=np.int16)  # the last samples
        self._num_samples = 0  # heard, in full blocks
        self._rest_S = np.zeros(0, dtype=np.int16)  # since the last full block
        self._regions: list[LiveRegion] = []  # that reach beyond the final time
        self._next_start = 0.0  # of the next window of the last region
        self._windows: list[Region] = []  # in order of time
        self._units: list[np.ndarray] = []  # unit_D of each window
        # Speaker -> the turn that has not ended yet.
        self._turn_of: dict[str, Segment] = {}
        self._turns: list[Segment] = []  # all that were returned
        self.final_until = 0.0

    @property
    def current(self) -> list[Segment]:
        """Return the turns that go on."""
        return sorted(self._turn_of.values())

    def hear(self, wave_S: np.ndarray) -> list[Segment]:
        """Hear samples; return the turns that are complete."""
        num_turns_before = len(self._turns)
        rest_S = np.concatenate([self._rest_S, wave_S])
        while len(rest_S) >= self._block_samples:
            block_S, rest_S = np.split(rest_S, [self._block_samples])
            self._hear_block(block_S)
        self._rest_S = rest_S
        new_turns = self._turns[num_turns_before:]
        return sorted(new_turns)

    def finish(self) -> list[Segment]:
        """End the stream; return the remaining turns."""
        num_turns_before = len(self._turns)
        if len(self._rest_S):
            self._hear_block(self._rest_S)
        last_regions = self._source.finish()
        self._add_regions(last_regions)
        self._decide(self._now)
        self._end_turns(math.inf)
        if not self._turns:
            log.warning("%s: no speech was found", self._recording)
        new_turns = self._turns[num_turns_before:]
        return sorted(new_turns)

    def diarization(self) -> Diarization:
        # Of turns that overlap, the first may have ended last.
        turns = sorted(self._turns)
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
        # When the next block is complete, up to so much more will have been pushed. What must be
        # final by then is decided now: with a latency of 2 s and no delay, at 10 s all before 8.25.
        ahead_seconds = BLOCK_SECONDS + self._delay
        self._decide(self._now + ahead_seconds - self._latency)

    def _add_regions(self, changed: Sequence[LiveRegion]) -> None:
        """Find speakers in regions that began, went on or ended."""
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
        # As `cut_windows` does, whose last window ends with the region.
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
            self._add(segment)
        self.final_until = until
        self._end_turns(until - ROUNDING_SECONDS)

        # Forget what is final, except the voices in windows of a segmentation model.
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

    def _add(self, segment: Segment) -> None:
        """Add a segment of a number ("speaker1") to the turn that goes on, or to a new one."""
        # "speaker1" is the first of the speakers so far; before there is any, it has the number
        # that the first will have, 0.
        index = int(segment.speaker.removeprefix("speaker")) - 1
        numbers = self._speakers.numbers or [0]
        name = self._names.name(numbers[index])
        segment = segment._replace(speaker=name)
        turn = self._turn_of.get(name)
        if turn is None:
            self._turn_of[name] = segment
            return
        if segment.start - turn.end > ROUNDING_SECONDS:
            self._turns.append(turn)
            self._turn_of[name] = segment
            return
        confidence = np.average(
            [turn.confidence, segment.confidence],
            weights=[turn.end - turn.start, segment.end - segment.start],
        )
        turn = turn._replace(end=segment.end, confidence=float(confidence))
        self._turn_of[name] = turn

    def _end_turns(self, time: float) -> None:
        """Add the turns that ended before a time to the complete ones."""
        for name, turn in list(self._turn_of.items()):
            if turn.end < time:
                self._turns.append(turn)
                del self._turn_of[name]


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


class _Names:
    """Names of the speakers of a stream, by their numbers.

    Unknown speakers are "speaker1", "speaker2", ..., in the order of their turns. With `known`, a
    speaker has the name of an enrolled one from the window on with which its mean embedding
    reaches the threshold; the turns before keep the other name.
    """

    def __init__(
        self, speakers: OnlineSpeakers, known_by: Model | None, far: float | None
    ) -> None:
        """known_by: the model with the enrolled speakers; None: all are unknown."""
        self._speakers = speakers
        self._model = known_by
        self._far = far
        self._num_unknown = 0
        self._name_of: dict[int, str] = {}
        self._number_of: dict[str, int] = {}  # also of names that were replaced
        self._match_of: dict[str, Match] = {}  # of known speakers

    def name(self, number: int) -> str:
        """Return the name of a speaker; an unknown one gets it with its first turn."""
        if number not in self._name_of:
            self._num_unknown += 1
            self._set(number, f"speaker{self._num_unknown}")
        return self._name_of[number]

    def recognize(self, number: int) -> None:
        """Name a speaker after the nearest enrolled one, if it is near enough."""
        if self._model is None or self._name_of.get(number) in self._match_of:
            return
        match = self._match(number)
        if not match.is_known:
            return
        # Nobody has the name of another speaker, except of one that was merged into this one.
        owner = self._number_of.get(match.name, number)
        if self._speakers.remaining(owner) == number:
            self._match_of[match.name] = match
            self._set(number, match.name)

    def embeddings(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return name -> unit vector, float32, for the names of turns in order of appearance."""
        emb_of: dict[str, np.ndarray] = {}
        for name in names:
            # The first turn of a speaker decides the order.
            if name in emb_of:
                continue
            number = self._number_of[name]
            direction_D = self._speakers.direction_D(number)
            emb_of[name] = direction_D.astype(np.float32)
        return emb_of

    def matches(self, names: Iterable[str]) -> dict[str, Match]:
        """Return name -> best match among the enrolled speakers; {} without `known`."""
        if self._model is None:
            return {}
        match_of: dict[str, Match] = {}
        for name in names:
            if name in self._match_of:
                match_of[name] = self._match_of[name]
            else:
                match = self._match(self._number_of[name])
                match_of[name] = replace(match, is_known=False)
        return match_of

    def _match(self, number: int) -> Match:
        """Return the best match of a speaker among the enrolled ones."""
        emb_D = self._speakers.direction_D(number)
        matches = match_enrolled({"": emb_D}, self._model, far=self._far)
        return matches[""]

    def _set(self, number: int, name: str) -> None:
        self._name_of[number] = name
        self._number_of[name] = number
