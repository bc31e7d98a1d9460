"""Diarization of audio that comes bit by bit: turns with a bounded latency, never taken back.

This module checks the arguments and converts the audio. The turns are found by `LiveDiarization`,
or, at an infinite latency, by `diarize` at the end.
Letter: S samples.
"""

import math
import tempfile
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.data.convert import Channels, ChunkReader
from speakerlab.diarization.resegmentation import Segment
from speakerlab.inference.diarize import Diarization, diarize
from speakerlab.inference.known_speakers import Model, check_enrolled, match_enrolled
from speakerlab.inference.live_diarization import (
    BLOCK_SECONDS,
    LiveDiarization,
    Source,
)
from speakerlab.inference.live_segmentation import LiveSegmentation
from speakerlab.inference.live_speech import LiveSpeech
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.speech_windows import open_segmentation

LATENCY_SECONDS = 2.0
MIN_LATENCY_SECONDS = 1.0


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
        _check_threshold(threshold)
        _check_known(model, known, far)
        self._diarizer: _WholeRecording | LiveDiarization
        if self.latency == math.inf:
            if threshold is not None:
                raise ValueError(
                    "threshold: is for a finite latency; give method=Ahc(threshold=...)"
                )
            self._diarizer = _WholeRecording(
                model,
                recording=recording,
                max_speakers=max_speakers,
                segmentation=segmenter,
                known=known,
                far=far,
                **offline,
            )
        else:
            if offline:
                raise ValueError(
                    f"{min(offline)}: needs the whole recording; leave it out, or give"
                    " latency=math.inf"
                )
            source = _open_source(segmenter, model.sample_rate, self.latency)
            _check_decision(source, latency, delay=self._reader.delay_seconds)
            self._diarizer = LiveDiarization(
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
        """Return the turns that have not ended yet, up to `final_until`; their ends will change."""
        return self._diarizer.current

    @property
    def final_until(self) -> float:
        """Return the time in seconds before which all turns are final."""
        return self._diarizer.final_until

    @property
    def diarization(self) -> Diarization:
        """Return all turns and the speakers; ValueError before `finish`."""
        if self._diarization is None:
            raise ValueError("stream: has not finished; call finish first")
        return self._diarization

    def push(self, audio: Any) -> list[Segment]:
        """Hear the next samples; return the turns that are final now, in order of their starts.

        audio: an array or tensor of shape (samples,) or (samples, channels); types as in
        `SpeakerModel.embed`. Raises ValueError with one line for what is no audio.
        """
        if self._diarization is not None:
            raise ValueError("stream: is finished; start another one")
        wave_S = self._reader.read(audio)
        return self._diarizer.hear(wave_S)

    def finish(self) -> list[Segment]:
        """End the stream; return the remaining turns. Raises ValueError if it had no audio."""
        if self._diarization is not None:
            return []
        wave_S = self._reader.finish()
        turns = self._diarizer.hear(wave_S)
        turns += self._diarizer.finish()
        self._diarization = self._diarizer.diarization()
        return turns


def _check_latency(latency: Any) -> float:
    """Return the latency in seconds; ValueError if it is no number or too short."""
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


def _check_decision(source: Source, latency: Any, *, delay: float) -> None:
    """Raise ValueError if it takes longer than the latency to know what is speech.

    delay: seconds by which resampling delays the samples.
    """
    least_seconds = source.decision_seconds + delay
    if float(latency) >= least_seconds:
        return
    # Rounded up, so that the stated value is accepted.
    stated_seconds = math.ceil(100 * least_seconds) / 100
    cause = "this sample rate"
    if isinstance(source, LiveSegmentation):
        cause += " with a segmentation model"
    raise ValueError(
        f"latency: must be at least {stated_seconds:g} s for {cause}, got {latency!r}"
    )


def _check_number(name: str, number: Any) -> None:
    """Raise ValueError unless a number of speakers is None, or whole and at least 1."""
    is_number = isinstance(number, int | np.integer) and number >= 1
    if number is not None and not is_number:
        raise ValueError(f"{name}: must be a whole number from 1 on, got {number!r}")


def _check_threshold(threshold: float | None) -> None:
    """Raise ValueError unless a threshold is None or a cosine."""
    if threshold is not None and not -1 <= threshold <= 1:
        raise ValueError(f"threshold: must be a cosine from -1 to 1, got {threshold!r}")


def _check_known(model: Model, known: bool, far: float | None) -> None:
    """Raise ValueError if speakers cannot be named after enrolled ones, but should be."""
    if known:
        check_enrolled(model)
        # A wrong `far` is an error now, not at the first speaker.
        match_enrolled(model.speakers, model, far=far)
    elif far is not None:
        raise ValueError("far: decides who is known; give known=True")


class _WholeRecording:
    """Stream of infinite latency: `diarize` at its end."""

    final_until = 0.0

    def __init__(self, model: Model, **options: Any) -> None:
        """options: of `diarize`."""
        self._model = model
        self._options = options
        # All samples, int16. The file has no name, and is gone with this object.
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
