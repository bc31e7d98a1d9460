"""Speech of a recording: its regions, and the embeddings of overlapping windows of them.

What a diarization computes from the audio; the clustering needs only this. Samples are kept in a
temporary file, so in memory only the embeddings, and the probabilities of a segmentation model,
grow with the recording. Letters: N windows, S samples, D embedding dimensions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speakerlab.data.convert import spool_wave
from speakerlab.diarization.channels import remove_cross_talk
from speakerlab.diarization.local_speakers import LocalSpeakers
from speakerlab.diarization.regions import Region, merge_regions
from speakerlab.diarization.windows import STEP_SECONDS, WINDOW_SECONDS, cut_windows
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.speech import find_speech, is_other_sound

Model = Any  # a SpeakerModel, whose module imports this one
Read = Callable[[], np.ndarray]  # returns the samples of a window


class SpeechWindows(NamedTuple):
    """Speech regions of a recording, and the embeddings of their windows."""

    seconds: float  # length of the recording
    regions: list[Region]
    windows: list[Region]
    emb_ND: np.ndarray
    local: LocalSpeakers | None  # with a segmentation model


def embed_windows(
    model: Model,
    audio: Any,
    sample_rate: int | None = None,
    *,
    vad: str | None = None,
    segmentation: Segmentation | None = None,
    regions: Sequence[Region] | None = None,
    window_seconds: float = WINDOW_SECONDS,
    step_seconds: float = STEP_SECONDS,
    progress: bool = False,
) -> SpeechWindows:
    """Embed the windows of the speech of a recording.

    regions: speech regions, in seconds (None: use `vad`). vad: "energy" or "silero" (None: the
    segmentation model if there is one, else "energy"). progress: show a bar on a terminal.
    """
    rate = model.sample_rate
    wave_S = spool_wave(audio, sample_rate=rate, source_rate=sample_rate)
    (embedded,) = embed_waves(
        model,
        [wave_S],
        vad=vad,
        segmentation=segmentation,
        regions=regions,
        window_seconds=window_seconds,
        step_seconds=step_seconds,
        progress=progress,
    )
    return embedded


def embed_waves(
    model: Model,
    waves: Sequence[np.ndarray],
    *,
    vad: str | None,
    segmentation: Segmentation | None,
    regions: Sequence[Region] | None,
    window_seconds: float,
    step_seconds: float,
    progress: bool,
) -> list[SpeechWindows]:
    """Embed the windows of the speech of spooled waves, the channels of a recording."""
    rate = model.sample_rate
    regions_of: list[list[Region]] = []
    locals_of: list[LocalSpeakers | None] = []
    for wave_S in waves:
        speech, local = _find_regions(
            wave_S,
            rate,
            vad=vad,
            segmentation=segmentation,
            regions=regions,
        )
        regions_of.append(speech)
        locals_of.append(local)
    if len(waves) > 1:
        regions_of = remove_cross_talk(waves, regions_of, sample_rate=rate)

    embedded: list[SpeechWindows] = []
    for wave_S, speech, local in zip(waves, regions_of, locals_of):
        windows = cut_windows(
            speech,
            window_seconds=window_seconds,
            step_seconds=step_seconds,
        )
        # `embed_many` reads a window when it needs it: overlapping windows are never all in memory.
        windows, reads = audible_windows(windows, wave_S, rate)
        emb_ND = model.embed_many(
            reads,
            check_levels=False,
            progress=progress,
            unit="windows",
        )
        seconds = len(wave_S) / rate
        embedded.append(SpeechWindows(seconds, speech, windows, emb_ND, local))
    return embedded


def _find_regions(
    wave_S: np.ndarray,
    sample_rate: int,
    *,
    vad: str | None,
    segmentation: Segmentation | None,
    regions: Sequence[Region] | None,
) -> tuple[list[Region], LocalSpeakers | None]:
    """Return the regions of speech of a spooled wave, and its local speakers."""
    # A segmentation model also finds speech; an explicit `vad` has priority.
    local: LocalSpeakers | None = None
    if segmentation is not None:
        local = segmentation.run(wave_S, sample_rate=sample_rate)
    if regions is None:
        if is_other_sound(wave_S, sample_rate=sample_rate):
            # By its energy, noise would be speech. A warning has named the sound.
            regions = []
        elif vad is None and local is not None:
            regions = local.speech()
        else:
            regions = find_speech(
                wave_S,
                sample_rate=sample_rate,
                vad=vad or "energy",
            )

    # The user's regions may begin or end after the recording.
    seconds = len(wave_S) / sample_rate
    regions_inside: list[Region] = []
    for start, end in merge_regions(regions):
        end_inside = min(end, seconds)
        if start < end_inside:
            regions_inside.append((start, end_inside))
    return regions_inside, local


def audible_windows(
    windows: Sequence[Region], wave_S: np.ndarray, sample_rate: int
) -> tuple[list[Region], list[Read]]:
    """Return the windows that are not digital silence, and functions that read their samples."""
    audible: list[Region] = []
    reads: list[Read] = []
    for start, end in windows:
        # Round the length instead of the end, so that equal windows have equally many samples.
        first = round(start * sample_rate)
        num_samples = round((end - start) * sample_rate)
        samples = slice(first, first + num_samples)
        window_S = wave_S[samples]
        if not len(window_S):
            continue
        # `read_wave` refuses digital silence, in which all samples are equal.
        if window_S.min() != window_S.max():
            audible.append((start, end))
            # Reads from the temporary file when it is called.
            reads.append(partial(wave_S.__getitem__, samples))
    return audible, reads


def open_segmentation(
    segmentation: Segmentation | Path | str | None,
) -> Segmentation | None:
    """Return a segmentation model, opened if it is a path; ValueError for something else."""
    if isinstance(segmentation, str | Path):
        return Segmentation(segmentation)
    if not isinstance(segmentation, Segmentation | None):
        raise ValueError(
            f"segmentation: must be a model or its path, got {segmentation!r}"
        )
    return segmentation
