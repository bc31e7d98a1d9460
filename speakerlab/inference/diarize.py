"""Diarization: from a recording to who spoke when.

Regions of speech -> overlapping windows -> embeddings -> clusters -> turns. Only the samples, which
are in a temporary file, and the embeddings grow with the recording.
Letters: N windows, S samples, D embedding dimensions.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speakerlab.data.audio import name_of
from speakerlab.data.convert import spool_wave
from speakerlab.diarization.clustering import MAX_SPEAKERS, Method, cluster
from speakerlab.diarization.overlap import LocalSpeakers, add_overlap
from speakerlab.diarization.regions import Region, Turn, format_rttm, merge_regions
from speakerlab.diarization.resegmentation import Segment, find_segments
from speakerlab.diarization.windows import STEP_SECONDS, WINDOW_SECONDS, cut_windows
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.speech import find_speech

log = logging.getLogger(__name__)
Model = Any  # a SpeakerModel, whose module imports this one


@dataclass(frozen=True)
class Match:
    """The enrolled speaker that a found one is named after, or else the nearest one."""

    name: str
    score: float
    threshold: float
    is_known: bool  # the found speaker has this name


@dataclass(frozen=True, eq=False)
class Diarization:
    """Who spoke when; iterable over the segments, in order of time."""

    recording: str
    seconds: float  # length of the recording
    segments: Sequence[Segment]
    speakers: Mapping[str, np.ndarray]  # name -> mean embedding (D,), in order of appearance
    matches: Mapping[str, Match] = field(default_factory=dict)  # name -> enrolled, with `known`

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    def to_rttm(self) -> str:
        """Return the segments as lines of RTTM; blanks in names become `_`."""
        turns = [Turn(s.start, s.end, one_word(s.speaker)) for s in self]
        return format_rttm({self.recording: turns})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; times are rounded to the millisecond as in RTTM."""
        spoken = dict.fromkeys(self.speakers, 0.0)
        for segment in self:
            spoken[segment.speaker] += segment.end - segment.start
        return {
            "recording": self.recording,
            "seconds": round(self.seconds, 3),
            "speakers": {
                name: {"seconds": round(spoken[name], 3)}
                | ({"match": asdict(self.matches[name])} if name in self.matches else {})
                | {"embedding": emb_D.tolist()}
                for name, emb_D in self.speakers.items()
            },
            "segments": [
                {k: round(v, 3) if isinstance(v, float) else v for k, v in s._asdict().items()}
                for s in self
            ],
        }


def diarize(
    model: Model,
    audio: Any,
    sample_rate: int | None = None,
    *,
    num_speakers: int | None = None,
    min_speakers: int = 1,
    max_speakers: int | None = None,
    method: str | Method | None = None,
    known: bool = False,
    far: float | None = None,
    recording: str | None = None,
    overlap: Segmentation | Path | str | None = None,
    **windows: Any,
) -> Diarization:
    """Find who spoke when in a recording: anything that `SpeakerModel.embed` takes, of any length.

    num_speakers: if known; else between min_speakers and max_speakers (None: MAX_SPEAKERS).
    method: "spectral", "ahc", or an object that divides windows, such as `Ahc(threshold=0.5)` or a
    `Vbx` with its PLDA model; None: that of `model.tuning`. recording: name in RTTM (None: of the
    file, without ending). overlap: segmentation model, opened or as a path, that adds who speaks at
    the same time. windows: vad, regions, window_seconds, step_seconds and progress of
    `embed_windows`.
    Speakers are "speaker1", "speaker2", ..., in order of appearance. known: those that are enrolled
    (`model.enroll`) get their names; far: false-alarm rate of this decision (None: at the EER).
    Raises ValueError with one line for audio that is broken or empty, if there is less speech than
    speakers asked for, and with `known` for a model without calibration or enrolled speakers.
    """
    if known:
        check_enrolled(model)
    if num_speakers is not None:
        min_speakers = max_speakers = num_speakers
    if max_speakers is None:
        max_speakers = max(MAX_SPEAKERS, min_speakers)
    divide = model.tuning.build(method) if method is None or isinstance(method, str) else method
    name = Path(name_of(audio)).stem if recording is None else recording
    if isinstance(overlap, str | Path):
        overlap = Segmentation(overlap)
    if not isinstance(overlap, Segmentation | None):
        raise ValueError(f"overlap: must be a segmentation model or its path, got {overlap!r}")
    heard = embed_windows(model, audio, sample_rate, overlap=overlap, **windows)
    if not heard.windows:
        log.warning("%s: no speech was found", name_of(audio))
        return Diarization(name, heard.seconds, [], {})
    found = cluster(heard.emb_ND, divide, min_speakers=min_speakers, max_speakers=max_speakers)
    if found.num_dropped:
        log.info(
            "%s: %d of %d windows were in groups too small for a speaker and went to the nearest "
            "one; if someone is missing, give the number of speakers",
            name_of(audio),
            found.num_dropped,
            len(heard.windows),
        )
    segments = find_segments(heard.regions, heard.windows, found.cosine_NK)
    if heard.local is not None:
        segments = add_overlap(segments, heard.windows, found.cosine_NK, heard.local)
    centres = {f"speaker{k}": emb_D for k, emb_D in enumerate(found.centre_KD.astype("f4"), 1)}
    order = dict.fromkeys(segment.speaker for segment in segments)
    names = {old: f"speaker{k}" for k, old in enumerate(order, 1)}
    segments = [segment._replace(speaker=names[segment.speaker]) for segment in segments]
    speakers = {new: centres[old] for old, new in names.items()}
    result = Diarization(name, heard.seconds, segments, speakers)
    return name_known(result, model, far=far) if known else result


def check_enrolled(model: Model) -> None:
    """Raise ValueError if found speakers cannot be named after the enrolled ones."""
    if not model.speakers:
        raise ValueError("known: no speaker is enrolled; enrol some first")
    if model.calibration is None:
        raise ValueError(
            "known: the model has no calibration of verification to decide who is known; run "
            "`speakerlab calibrate --model MODEL --data DIR`"
        )
    names: dict[str, str] = {}
    for name in model.speakers:
        other = names.setdefault(one_word(name), name)
        if other != name or re.fullmatch(r"speaker\d+", name):
            owner = f"'{other}'" if other != name else "unknown speakers"
            raise ValueError(
                f"known: '{name}' and {owner} have the same name in RTTM; enrol the speaker under "
                "another name"
            )


def one_word(name: str) -> str:
    """Return a name as RTTM can hold it."""
    return "_".join(name.split())


def name_known(found: Diarization, model: Model, *, far: float | None = None) -> Diarization:
    """Name speakers after enrolled ones whose score reaches the model's threshold.

    The best score comes first; each name is given once.
    """
    ranked = {name: model.rank(emb_D, far=far) for name, emb_D in found.speakers.items()}
    pairs = [
        (score, name, Match(enrolled, score, one.threshold, is_known=score >= one.threshold))
        for name, one in ranked.items()
        for enrolled, score in one.ranking
    ]
    pairs.sort(key=lambda pair: -pair[0])
    matches: dict[str, Match] = {}
    for _, name, match in pairs:
        is_taken = match.name in {other.name for other in matches.values()}
        if match.is_known and name not in matches and not is_taken:
            matches[name] = match
    names = {name: matches[name].name if name in matches else name for name in ranked}
    for _, name, match in pairs:  # the unknown: the nearest comes first
        matches.setdefault(name, replace(match, is_known=False))
    return replace(
        found,
        segments=[segment._replace(speaker=names[segment.speaker]) for segment in found],
        speakers={names[name]: emb_D for name, emb_D in found.speakers.items()},
        matches={names[name]: matches[name] for name in found.speakers},
    )


class Embedded(NamedTuple):
    """The speech of a recording, and the embeddings of its windows."""

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
    overlap: Segmentation | None = None,
    regions: Sequence[Region] | None = None,
    window_seconds: float = WINDOW_SECONDS,
    step_seconds: float = STEP_SECONDS,
    progress: bool = False,
) -> Embedded:
    """Embed the windows of the speech of a recording.

    regions: of speech, in seconds; None: found by `vad`, "energy" or "silero" (None: by the
    segmentation model if there is one, else by energy). progress: show a bar on a terminal.
    """
    rate = model.sample_rate
    wave_S = spool_wave(audio, sample_rate=rate, source_rate=sample_rate)
    seconds = len(wave_S) / rate
    local = None if overlap is None else overlap.run(wave_S, sample_rate=rate)
    if regions is None and vad is None and local is not None:
        regions = local.speech()
    elif regions is None:
        regions = find_speech(wave_S, sample_rate=rate, vad=vad or "energy")
    regions = [(start, min(end, seconds)) for start, end in merge_regions(regions)]
    regions = [region for region in regions if region[0] < region[1]]
    windows = cut_windows(regions, window_seconds=window_seconds, step_seconds=step_seconds)
    windows, waves = audible_windows(windows, wave_S, rate)
    emb_ND = model.embed_many(waves, progress=progress, unit="windows")
    return Embedded(seconds, regions, windows, emb_ND, local)


def audible_windows(
    windows: Sequence[Region], wave_S: np.ndarray, sample_rate: int
) -> tuple[list[Region], list[Callable[[], np.ndarray]]]:
    """Return the windows that are not digital silence, and what reads their samples."""
    kept: list[Region] = []
    reads: list[Callable[[], np.ndarray]] = []
    for start, end in windows:
        first = round(start * sample_rate)
        stop = first + round((end - start) * sample_rate)  # equally many samples in each
        window_S = wave_S[first:stop]
        if len(window_S) and window_S.min() != window_S.max():
            kept.append((start, end))
            reads.append(partial(wave_S.__getitem__, slice(first, stop)))
    return kept, reads
