"""Diarization of audio that comes bit by bit: turns with a bounded latency, never taken back.

Every BLOCK_SECONDS, the speech heard so far is cut into windows, as by `diarize`; new windows are
embedded and added to the speakers so far (`diarization/online.py`). Then the time up to now -
latency is decided: each of its frames goes to the nearest of these speakers. What is behind this
time is forgotten, so memory does not grow with the stream, except by the turns.
Letters: S samples, N windows, K speakers so far, D embedding dimensions.
"""

import logging
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from speakerlab.data.convert import Channels, ChunkReader
from speakerlab.diarization.clustering import MAX_SPEAKERS, unit_rows
from speakerlab.diarization.online import OnlineSpeakers
from speakerlab.diarization.regions import Region
from speakerlab.diarization.resegmentation import Segment, find_segments
from speakerlab.diarization.windows import STEP_SECONDS, WINDOW_SECONDS
from speakerlab.inference.diarize import (
    Diarization,
    Match,
    Model,
    audible_windows,
    check_enrolled,
    diarize,
    match_enrolled,
)
from speakerlab.inference.live_speech import LiveRegion, LiveSpeech

log = logging.getLogger(__name__)
BLOCK_SECONDS = 0.25
LATENCY_SECONDS = 2.0
MIN_LATENCY_SECONDS = 1.0
# After this time, it is known whether a frame is speech: a block, the frames around, and the
# shortest pause that ends a region.
DECISION_SECONDS = 0.7
# Samples kept besides a window: a region is reported 0.7 s after its end at the latest.
SPARE_SECONDS = 2.0
ROUNDING_SECONDS = 1e-6  # a shorter time is a difference of rounding


class Stream:
    """Diarization of audio that comes bit by bit; see `SpeakerModel.stream`.

    Turns are `Segment`s. A turn is returned by the `push` that makes it final: at the latest when
    `latency` seconds after its end were pushed. It is never changed or taken back, and speakers
    keep their names. `push` can be called with arrays of any length; their lengths change no turn.
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
        **offline: Any,
    ) -> None:
        """Start a stream; for the parameters, see `SpeakerModel.stream`."""
        self._reader = ChunkReader(
            sample_rate=model.sample_rate,
            source_rate=sample_rate,
            channels=channels,
            where=recording,
        )
        self.latency = _check_latency(latency, self._reader.delay_seconds)
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
        common: dict[str, Any] = {"recording": recording, "max_speakers": max_speakers}
        self._finder: _Whole | _Live
        if self.latency == math.inf:
            if threshold is not None:
                raise ValueError(
                    "threshold: is for a finite latency; give method=Ahc(threshold=...)"
                )
            options = {**common, **offline, "known": known, "far": far}
            self._finder = _Whole(model, options)
        else:
            if offline:
                raise ValueError(
                    f"{min(offline)}: needs the whole recording; leave it out, or give"
                    " latency=math.inf"
                )
            self._finder = _Live(
                model,
                latency=self.latency,
                delay=self._reader.delay_seconds,
                threshold=threshold,
                known=known,
                far=far,
                **common,
            )
        self._diarization: Diarization | None = None

    @property
    def current(self) -> Segment | None:
        """Return the turn that goes on, so far as it is final; its end will change."""
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
        """Hear the next samples; return the turns that are final now, in order of time.

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


def _check_latency(latency: Any, delay: float) -> float:
    """Return the latency in seconds; ValueError if it is none or too short.

    delay: seconds that resampling holds back.
    """
    if latency is None:
        return math.inf
    least = max(MIN_LATENCY_SECONDS, DECISION_SECONDS + delay)
    is_number = isinstance(latency, Real) and not isinstance(latency, bool)
    seconds = float(latency) if is_number else math.nan
    # The comparison is also false for nan.
    if not seconds >= least:
        raise ValueError(
            f"latency: must be at least {least:.2g} s, or math.inf for the result of"
            f" `diarize` at the end, got {latency!r}"
        )
    return seconds


def _check_number(name: str, number: Any) -> None:
    """Raise ValueError unless a number of speakers is None, or whole and at least 1."""
    is_number = isinstance(number, int | np.integer) and number >= 1
    if number is not None and not is_number:
        raise ValueError(f"{name}: must be a whole number from 1 on, got {number!r}")


class _Whole:
    """Stream of infinite latency: `diarize` at its end."""

    current = None
    final_until = 0.0

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options
        # Without a name: it is gone with this object.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._diarization: Diarization | None = None

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


@dataclass
class _Speech:
    """Region of speech and its windows that reach beyond the final time."""

    region: LiveRegion
    next_start: float  # of the next window
    windows: list[Region] = field(default_factory=list)
    units: list[np.ndarray] = field(default_factory=list)  # unit_D of each window

    def drop_windows_before(self, time: float) -> None:
        """Drop the windows that end before a time."""
        num_before = sum(end <= time for _, end in self.windows)
        del self.windows[:num_before]
        del self.units[:num_before]


class _Live:
    """Stream of finite latency."""

    def __init__(
        self,
        model: Model,
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
        self._recording = recording
        self._latency = latency
        self._delay = delay
        self._rate: int = model.sample_rate
        self._block_samples = round(BLOCK_SECONDS * self._rate)
        tuned: float = model.tuning.threshold
        self._speakers = OnlineSpeakers(
            threshold=tuned if threshold is None else threshold,
            max_speakers=max_speakers or MAX_SPEAKERS,
        )
        self._names = _Names(self._speakers, model if known else None, far)
        self._detector = LiveSpeech(self._rate)
        self._wave_S = np.zeros(0, dtype=np.int16)  # the last samples
        self._num_samples = 0  # heard, and in full blocks
        self._rest_S = np.zeros(0, dtype=np.int16)  # less than a block
        self._speeches: list[_Speech] = []
        self._turns: list[Segment] = []  # all that were returned
        self.current: Segment | None = None
        self.final_until = 0.0

    def hear(self, wave_S: np.ndarray) -> list[Segment]:
        """Hear samples; return the turns that are complete."""
        rest_S = np.concatenate([self._rest_S, wave_S])
        num_before = len(self._turns)
        while len(rest_S) >= self._block_samples:
            block_S, rest_S = np.split(rest_S, [self._block_samples])
            self._hear_block(block_S)
        self._rest_S = rest_S
        return self._turns[num_before:]

    def finish(self) -> list[Segment]:
        """End the stream; return the remaining turns."""
        num_before = len(self._turns)
        if len(self._rest_S):
            self._hear_block(self._rest_S)
        self._add_regions(self._detector.finish())
        self._decide(self._now)
        self._end_turn()
        if not self._turns:
            log.warning("%s: no speech was found", self._recording)
        return self._turns[num_before:]

    def diarization(self) -> Diarization:
        speakers = self._names.embeddings(turn.speaker for turn in self._turns)
        return Diarization(
            recording=self._recording,
            seconds=self._now,
            segments=list(self._turns),
            speakers=speakers,
            matches=self._names.matches(speakers),
        )

    @property
    def _now(self) -> float:
        """Return the seconds heard."""
        return self._num_samples / self._rate

    def _hear_block(self, block_S: np.ndarray) -> None:
        self._num_samples += len(block_S)
        num_kept = round((WINDOW_SECONDS + SPARE_SECONDS) * self._rate)
        self._wave_S = np.concatenate([self._wave_S, block_S])[-num_kept:]
        self._add_regions(self._detector.push(block_S))
        # Until the next block is complete, up to so much more will have been pushed.
        ahead = BLOCK_SECONDS + self._delay
        self._decide(self._now + ahead - self._latency)

    def _add_regions(self, changed: Sequence[LiveRegion]) -> None:
        """Embed the new windows of regions that began, went on or ended."""
        for region in changed:
            speech = self._speech_of(region)
            times: list[Region] = []
            # As `cut_windows` does, whose last window ends with the region.
            while speech.next_start + WINDOW_SECONDS < region.end - ROUNDING_SECONDS:
                end = speech.next_start + WINDOW_SECONDS
                times.append((speech.next_start, end))
                speech.next_start += STEP_SECONDS
            if not region.is_open:
                times.append(_last_window(region))
            windows, units = self._embed(times)
            for unit_D in units:
                number = self._speakers.add(unit_D)
                if number is not None:
                    self._names.recognize(number)
            speech.windows += windows
            speech.units += units

    def _speech_of(self, region: LiveRegion) -> _Speech:
        """Return the windows so far of a region."""
        if not self._speeches or self._speeches[-1].region is not region:
            self._speeches.append(_Speech(region, next_start=region.start))
        return self._speeches[-1]

    def _embed(self, times: Sequence[Region]) -> tuple[list[Region], list[np.ndarray]]:
        """Embed windows; return those that are not digital silence, and unit_D of each."""
        num_forgotten = self._num_samples - len(self._wave_S)
        offset = num_forgotten / self._rate
        shifted = [(start - offset, end - offset) for start, end in times]
        shifted, reads = audible_windows(shifted, self._wave_S, self._rate)
        emb_ND = self._model.embed_many(reads, check_levels=False)
        windows = [(start + offset, end + offset) for start, end in shifted]
        return windows, list(unit_rows(emb_ND))

    def _decide(self, until: float) -> None:
        """Make the time before `until` final; add its turns."""
        until = min(until, self._now)
        if until <= self.final_until:
            return
        for speech in self._speeches:
            for segment in self._segments_of(speech, until):
                self._add(segment)
        self.final_until = until
        if self.current is not None and self.current.end < until - ROUNDING_SECONDS:
            self._end_turn()

        # Forget what is final.
        going_on: list[_Speech] = []
        for speech in self._speeches:
            speech.drop_windows_before(until)
            if speech.region.is_open or speech.region.end > until:
                going_on.append(speech)
        self._speeches = going_on

    def _segments_of(self, speech: _Speech, until: float) -> list[Segment]:
        """Return the segments of a region between the final time and `until`."""
        region = speech.region
        if region.start >= until or region.end <= self.final_until:
            return []
        windows = list(speech.windows)
        units = list(speech.units)
        # Of a region that goes on, the full windows may end before.
        is_covered = bool(windows) and windows[-1][1] >= until
        last_window = _last_window(region)
        if region.is_open and not is_covered and last_window[0] < until:
            last, last_units = self._embed([last_window])
            windows += last
            units += last_units
        if not windows:
            return []
        # The windows before are forgotten.
        first_start = min(start for start, _ in windows)
        part = (max(region.start, first_start), region.end)
        unit_ND = np.stack(units)
        # At a short latency, the first speech is decided before its first full window.
        has_speakers = bool(self._speakers.numbers)
        direction_KD = self._speakers.direction_KD if has_speakers else unit_ND[:1]
        cosine_NK = unit_ND @ direction_KD.T
        segments: list[Segment] = []
        for segment in find_segments([part], windows, cosine_NK):
            start = max(segment.start, self.final_until)
            end = min(segment.end, until)
            if end - start > ROUNDING_SECONDS:
                segments.append(segment._replace(start=start, end=end))
        return segments

    def _add(self, segment: Segment) -> None:
        """Add a segment of a number ("speaker1") to the turn that goes on, or to a new one."""
        index = int(segment.speaker.removeprefix("speaker")) - 1
        numbers = self._speakers.numbers or [0]
        name = self._names.name(numbers[index])
        segment = segment._replace(speaker=name)
        turn = self.current
        if turn is None:
            self.current = segment
            return
        gap = segment.start - turn.end
        if turn.speaker != name or gap > ROUNDING_SECONDS:
            self._end_turn()
            self.current = segment
            return
        confidence = np.average(
            [turn.confidence, segment.confidence],
            weights=[turn.end - turn.start, segment.end - segment.start],
        )
        self.current = turn._replace(end=segment.end, confidence=float(confidence))

    def _end_turn(self) -> None:
        """Add the turn that goes on to the complete ones."""
        if self.current is not None:
            self._turns.append(self.current)
            self.current = None


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
        for name in dict.fromkeys(names):
            direction_D = self._speakers.direction_D(self._number_of[name])
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
