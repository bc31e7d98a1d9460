"""Speaker diarization of a recording: who spoke when.

Regions of speech -> overlapping windows -> embeddings -> clusters -> turns. The first three depend
on the audio (speech_windows.py), the others on all embeddings of a recording: `_find_speakers`.
Speakers may be named after enrolled ones (known_speakers.py).
Letters: N windows, S samples, K clusters, D embedding dimensions.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from speakerlab.data.audio import name_of
from speakerlab.data.convert import (
    Channels,
    spool_channels,
    spool_wave,
    warn_of_levels,
)
from speakerlab.data.tables import one_word
from speakerlab.diarization.clustering import (
    MAX_SPEAKERS,
    Clusters,
    Method,
    build_method,
    cluster,
)
from speakerlab.diarization.local_speakers import (
    Activity,
    cluster_tracks,
    find_activity,
    find_tracks,
    match_tracks,
)
from speakerlab.diarization.regions import Region, Turn, format_rttm
from speakerlab.diarization.resegmentation import Segment, find_segments
from speakerlab.diarization.timed_words import Transcript
from speakerlab.diarization.transcripts import read_transcript
from speakerlab.diarization.windows import STEP_SECONDS, WINDOW_SECONDS
from speakerlab.diarization.words import MAX_GAP_SECONDS, assign_words
from speakerlab.inference.known_speakers import (
    Match,
    Model,
    check_enrolled,
    match_enrolled,
)
from speakerlab.inference.segmentation import Segmentation
from speakerlab.inference.speech import find_speech, is_other_sound
from speakerlab.inference.speech_windows import (
    SpeechWindows,
    embed_waves,
    open_segmentation,
)

log = logging.getLogger(__name__)
# By its energy; a segmentation model that finds none of so much speech is warned of.
MUCH_SPEECH_SECONDS = 3.0


@dataclass(frozen=True, eq=False)
class Diarization:
    """Who spoke when; iterable over the segments, in order of time."""

    recording: str
    seconds: float  # length of the recording
    segments: Sequence[Segment]
    # Name -> mean embedding (D,), in order of appearance.
    speakers: Mapping[str, np.ndarray] = field(repr=False)
    # Name -> match among the enrolled speakers; empty without `known`.
    matches: Mapping[str, Match] = field(default_factory=dict)
    # Name -> channel, from 1; empty unless each channel was diarized apart.
    channel_of: Mapping[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    def assign_words(
        self, transcript: Any, *, max_gap: float = MAX_GAP_SECONDS
    ) -> Transcript:
        """Return a transcript with the speaker of each word; see `words.assign_words`.

        transcript: the path of whisper's JSON, of SRT or of CTM, or whisper's result, see
        `transcripts.read_transcript`.
        """
        turns = [Turn(*segment[:3]) for segment in self]
        words = read_transcript(transcript)
        return assign_words(words, turns, max_gap=max_gap)

    def to_rttm(self) -> str:
        """Return the segments as lines of RTTM; blanks in names become `_`."""
        turns: list[Turn] = []
        for segment in self:
            name = one_word(segment.speaker)
            turns.append(Turn(segment.start, segment.end, name))
        return format_rttm({one_word(self.recording): turns})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; times are rounded to the millisecond as in RTTM."""
        # Overlapping speech counts for each of its speakers.
        spoken_seconds = dict.fromkeys(self.speakers, 0.0)
        for segment in self:
            duration = segment.end - segment.start
            spoken_seconds[segment.speaker] += duration

        speakers: dict[str, dict[str, Any]] = {}
        for name, emb_D in self.speakers.items():
            seconds = round(spoken_seconds[name], 3)
            speaker: dict[str, Any] = {"seconds": seconds}
            if name in self.channel_of:
                speaker["channel"] = self.channel_of[name]
            # Only with `known` are speakers compared with the enrolled ones.
            if name in self.matches:
                match = self.matches[name]
                speaker["match"] = asdict(match)
            speaker["embedding"] = emb_D.tolist()
            speakers[name] = speaker

        return {
            "recording": self.recording,
            "seconds": round(self.seconds, 3),
            "speakers": speakers,
            "segments": [_rounded(segment) for segment in self],
        }


def _rounded(segment: Segment) -> dict[str, Any]:
    """Return the fields of a segment, with times rounded to the millisecond."""
    values = segment._asdict()
    for key, value in values.items():
        if isinstance(value, float):
            values[key] = round(value, 3)
    return values


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
    segmentation: Segmentation | Path | str | None = None,
    vad: Literal["energy", "silero"] | None = None,
    regions: Sequence[Region] | None = None,
    window_seconds: float = WINDOW_SECONDS,
    step_seconds: float = STEP_SECONDS,
    channels: Channels | Literal["each"] = None,
    progress: bool = False,
    overlap: Segmentation | Path | str | None = None,
) -> Diarization:
    """Find who spoke when in a recording of any length.

    Speakers are "speaker1", "speaker2", ..., in order of appearance; with channels "each"
    "channel1", or "channel1-speaker1" and so on where the channel has several.

    audio: see `SpeakerModel.embed`.
    num_speakers: if known; else between min_speakers and max_speakers (None: MAX_SPEAKERS).
    method: "spectral", "ahc", "vbx" for a model with a PLDA, or a clustering object such as
        `Ahc(threshold=0.5)` or a `Vbx` (None: the method in `model.tuning`).
    known: name speakers after enrolled ones (`model.enroll`).
    far: false-alarm rate of this decision (None: at the EER).
    recording: name in RTTM (None: the name of the file, without ending).
    segmentation: a model, opened or as a path, that finds speech, also of two speakers at the same
        time; `overlap` is its earlier name.
    vad, regions, window_seconds, step_seconds, progress: see `speech_windows.embed_windows`.
    channels: the channel to use, see `RecordingEmbedder`; "each" finds the speakers of each channel
        apart, as for calls, and all other options are for each channel.
    Raises ValueError with one line for audio that is broken or empty, if the speech is too short
    for the number of speakers, and with `known` for a model without calibration or enrolled
    speakers.
    """
    # Check before the long computation.
    _check_types(
        known,
        num_speakers=num_speakers,
        min_speakers=min_speakers,
        max_speakers=max_speakers,
    )
    if known:
        check_enrolled(model)
    if num_speakers is not None:
        min_speakers = max_speakers = num_speakers
    # `min_speakers` may be more than the default maximum.
    if max_speakers is None:
        max_speakers = max(MAX_SPEAKERS, min_speakers)
    clustering = _choose_method(model, method)
    if recording is None:
        recording = Path(name_of(audio)).stem
    waves = _spool(audio, channels, model.sample_rate, sample_rate)
    segmentation = overlap if segmentation is None else segmentation
    speech_of_waves = embed_waves(
        model,
        list(waves.values()),
        vad=vad,
        segmentation=open_segmentation(segmentation),
        regions=regions,
        window_seconds=window_seconds,
        step_seconds=step_seconds,
        progress=progress,
    )
    # Each channel is clustered by itself: the channels share no speaker.
    speakers_of_waves: list[WaveSpeakers] = []
    for place, speech in zip(waves, speech_of_waves):
        speakers_of_wave = _find_speakers(
            speech,
            clustering,
            min_speakers=min_speakers,
            max_speakers=max_speakers,
            where=place,
        )
        speakers_of_waves.append(speakers_of_wave)
    channel_of: dict[str, int] = {}
    if channels == "each":
        segments, speakers, channel_of = _join_channels(speakers_of_waves)
    else:
        segments, speakers = speakers_of_waves[0]
    is_by_model = vad is None and regions is None
    has_warned = is_by_model and _warn_of_missed_speech(model, waves, speech_of_waves)
    # A recording without speech is no error: its diarization has no segments.
    if not segments and not has_warned:
        log.warning("%s: no speech was found", name_of(audio))
    diarization = Diarization(
        recording=recording,
        seconds=speech_of_waves[0].seconds,
        segments=segments,
        speakers=speakers,
        channel_of=channel_of,
    )
    if known and segments:
        return name_known(diarization, model, far=far)
    return diarization


def _choose_method(model: Model, method: str | Method | None) -> Method:
    """Return a clustering object; a name is built with the settings of the model's tuning."""
    if method is not None and not isinstance(method, str):
        return method
    return build_method(
        model.tuning,
        method,
        read_plda=lambda: model.read_plda(),
    )


def _spool(
    audio: Any,
    channels: Channels | Literal["each"],
    sample_rate: int,
    source_rate: int | None,
) -> dict[str, np.ndarray]:
    """Return the wave of the recording, or of each channel of it; warn of bad levels.

    The keys name the place of each wave in messages.
    """
    where = name_of(audio)
    waves: dict[str, np.ndarray] = {}
    if channels == "each":
        spooled = spool_channels(
            audio,
            sample_rate=sample_rate,
            source_rate=source_rate,
        )
        for number, wave_S in enumerate(spooled, start=1):
            waves[f"{where}, channel {number}"] = wave_S
    else:
        waves[where] = spool_wave(
            audio,
            sample_rate=sample_rate,
            source_rate=source_rate,
            channels=channels,
        )
    # Hours of silence are common on one side of a call, so levels are no errors here.
    for place, wave_S in waves.items():
        warn_of_levels(wave_S, sample_rate=sample_rate, where=place)
    return waves


def _warn_of_missed_speech(
    model: Model,
    waves: Mapping[str, np.ndarray],
    speech_of_waves: Sequence[SpeechWindows],
) -> bool:
    """Warn of waves with much speech in which the segmentation model found none.

    Such a model may be badly trained, or trained on other recordings. Return whether there are any.
    """
    rate = model.sample_rate
    has_warned = False
    for (place, wave_S), speech in zip(waves.items(), speech_of_waves):
        is_deaf = speech.local is not None and not speech.regions
        if not is_deaf or is_other_sound(wave_S, sample_rate=rate):
            continue
        regions = find_speech(wave_S, sample_rate=rate)
        seconds = sum(end - start for start, end in regions)
        if seconds >= MUCH_SPEECH_SECONDS:
            has_warned = True
            log.warning(
                "%s: the segmentation model found no speech, but by its energy there are"
                " %.1f s; check the model, or give vad energy",
                place,
                seconds,
            )
    return has_warned


# Segments, and the mean embedding of each speaker, in order of appearance.
WaveSpeakers = tuple[list[Segment], dict[str, np.ndarray]]


def _join_channels(
    speakers_of_waves: Sequence[WaveSpeakers],
) -> tuple[list[Segment], dict[str, np.ndarray], dict[str, int]]:
    """Join the results of all channels: segments, speakers, and the channel of each speaker.

    Speakers are named by their channel.
    """
    all_segments: list[Segment] = []
    all_speakers: dict[str, np.ndarray] = {}
    channel_of: dict[str, int] = {}
    for channel, (segments, speakers) in enumerate(speakers_of_waves, start=1):
        new_names: dict[str, str] = {}
        for name in speakers:
            new_names[name] = f"channel{channel}-{name}"
        # Most channels of calls have one speaker.
        if len(speakers) == 1:
            new_names = dict.fromkeys(speakers, f"channel{channel}")
        all_segments += _rename(segments, new_names)
        for name, emb_D in speakers.items():
            new_name = new_names[name]
            all_speakers[new_name] = emb_D
            channel_of[new_name] = channel
    all_segments.sort(key=lambda segment: segment.start)
    return all_segments, all_speakers, channel_of


def _find_speakers(
    speech: SpeechWindows,
    clustering: Method,
    *,
    min_speakers: int,
    max_speakers: int,
    where: str,
) -> WaveSpeakers:
    """Cluster the windows of a wave, and find the turns of the speakers."""
    if not speech.windows:
        return [], {}
    clusters, activity = _cluster(
        speech,
        clustering,
        min_speakers=min_speakers,
        max_speakers=max_speakers,
    )
    if clusters.num_dropped:
        log.info(
            "%s: %d of %d windows were in groups too small for a speaker and went to"
            " the nearest one; if someone is missing, give the number of speakers",
            where,
            clusters.num_dropped,
            len(speech.windows),
        )
    segments = find_segments(
        speech.regions,
        speech.windows,
        clusters.cosine_NK,
        activity,
    )
    return _number_by_appearance(segments, clusters.centre_KD)


def _cluster(
    speech: SpeechWindows,
    clustering: Method,
    *,
    min_speakers: int,
    max_speakers: int,
) -> tuple[Clusters, Activity | None]:
    """Return the speakers of a wave; with a segmentation model, also when each speaks."""
    local = speech.local
    if local is None:
        clusters = cluster(
            speech.emb_ND,
            clustering,
            min_speakers=min_speakers,
            max_speakers=max_speakers,
        )
        return clusters, None
    tracks = find_tracks(local, speech.windows, speech.emb_ND)
    clusters = cluster_tracks(
        speech.emb_ND,
        tracks,
        clustering,
        min_speakers=min_speakers,
        max_speakers=max_speakers,
    )
    speaker_M = match_tracks(clusters.centre_KD, tracks)
    num_speakers = len(clusters.centre_KD)
    return clusters, find_activity(local, tracks, speaker_M, num_speakers)


def _number_by_appearance(
    segments: Sequence[Segment], centre_KD: np.ndarray
) -> tuple[list[Segment], dict[str, np.ndarray]]:
    """Return the segments and the mean embedding of each speaker, renumbered by appearance.

    The speakers of the given segments are cluster numbers, from 1; centre_KD has the mean embedding
    of each cluster.
    """
    centres: dict[str, np.ndarray] = {}
    for number, emb_D in enumerate(centre_KD.astype("f4"), start=1):
        centres[f"speaker{number}"] = emb_D

    # A cluster has no segment if at all times another speaker has a higher cosine.
    new_names: dict[str, str] = {}
    for segment in segments:
        if segment.speaker not in new_names:
            number = len(new_names) + 1
            new_names[segment.speaker] = f"speaker{number}"
    speakers: dict[str, np.ndarray] = {}
    for cluster_name, new_name in new_names.items():
        speakers[new_name] = centres[cluster_name]
    return _rename(segments, new_names), speakers


def _rename(segments: Iterable[Segment], names: Mapping[str, str]) -> list[Segment]:
    """Return segments with the speaker names replaced."""
    renamed: list[Segment] = []
    for segment in segments:
        name = names[segment.speaker]
        renamed.append(segment._replace(speaker=name))
    return renamed


def _check_types(known: Any, **numbers: Any) -> None:
    """Raise ValueError unless `known` is a bool, and the numbers are whole or None."""
    if not isinstance(known, bool):
        raise ValueError(
            f"known: must be True or False, got {known!r}; `load_speakers` reads a file"
            " of enrolled speakers"
        )
    for name, number in numbers.items():
        is_number = isinstance(number, int | np.integer)
        if number is not None and not is_number:
            raise ValueError(f"{name}: must be a whole number, got {number!r}")


def name_known(
    diarization: Diarization, model: Model, *, far: float | None = None
) -> Diarization:
    """Name speakers after the enrolled speakers whose score reaches the model's threshold.

    See `match_enrolled`. Unknown speakers keep their names. Each channel of a call is matched
    apart: somebody who is known on two of them, as after a transfer, is "Ann" where the score is
    best, and "channel2-Ann" on the other one.
    """
    channel_of = diarization.channel_of
    matches = _match_each_channel(diarization, model, far=far)
    new_names = _names_of_matches(diarization, matches)

    # In order of appearance.
    renamed_speakers: dict[str, np.ndarray] = {}
    renamed_matches: dict[str, Match] = {}
    renamed_channels: dict[str, int] = {}
    for name, emb_D in diarization.speakers.items():
        new_name = new_names[name]
        renamed_speakers[new_name] = emb_D
        renamed_matches[new_name] = matches[name]
        if name in channel_of:
            renamed_channels[new_name] = channel_of[name]
    return replace(
        diarization,
        segments=_rename(diarization, new_names),
        speakers=renamed_speakers,
        matches=renamed_matches,
        channel_of=renamed_channels,
    )


def _match_each_channel(
    diarization: Diarization, model: Model, *, far: float | None
) -> dict[str, Match]:
    """Return the match of each speaker; within a channel, an enrolled speaker is known once."""
    # Channel -> the embeddings of its speakers.
    embeddings_of: dict[int, dict[str, np.ndarray]] = {}
    for name, emb_D in diarization.speakers.items():
        channel = diarization.channel_of.get(name, 1)
        embeddings_of_channel = embeddings_of.setdefault(channel, {})
        embeddings_of_channel[name] = emb_D
    matches: dict[str, Match] = {}
    for embeddings in embeddings_of.values():
        matches |= match_enrolled(embeddings, model, far=far)
    return matches


def _names_of_matches(
    diarization: Diarization, matches: Mapping[str, Match]
) -> dict[str, str]:
    """Return name -> new name, which is the same for unknown speakers."""
    new_names = {name: name for name in diarization.speakers}
    taken: set[str] = set()
    # The best score first, which gets the name without a channel.
    best_first = sorted(matches, key=lambda name: -matches[name].score)
    for name in best_first:
        match = matches[name]
        if not match.is_known:
            continue
        new_names[name] = match.name
        if match.name in taken:
            channel = diarization.channel_of[name]
            new_names[name] = f"channel{channel}-{match.name}"
        taken.add(match.name)
    return new_names
