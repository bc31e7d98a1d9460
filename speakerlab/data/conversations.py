"""Windows of conversations, with who speaks in each frame: recorded, or put together from speech.

A training directory either has the true turns of its recordings (ref.rttm), or recordings of
single speakers. From the first kind, windows are cut at random. From the second, conversations are
simulated: each turn begins after a pause, or before the end of the last turn, and during some turns
another speaker says a word or two. Each speaker has a level; the augmentation (frontend/augment)
adds a room and noise to the whole window.

As in data/loader.py, every draw is a function of (seed, attempt, epoch, position), so a window
does not depend on the number of workers and ranks, and a resume repeats it.
Letters: K local speakers, T frames of the network's output, S samples of a window, N utterances,
P speakers, R regions of a recording in which its turns are known.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from speakerlab.core.batch import Crop, PlacedTurn
from speakerlab.core.powerset import MAX_SPEAKERS, UNKNOWN
from speakerlab.data.arrays import stable_hash
from speakerlab.data.loader import DrawFunctions, Slot, TrainCrops
from speakerlab.data.manifest import Manifest

TURN_DRAWS = "conversation"  # the name of the draws of a simulated conversation
MIN_TURN_SECONDS = 0.3  # a short word
BACKCHANNEL_SECONDS = (0.3, 1.0)
# Between two turns of one speaker.
BREATH_SECONDS = 0.1
# An utterance is read this far before and after a turn: a single word is too short to measure the
# speaker's level, and to find out which samples are speech.
CONTEXT_SECONDS = 5.0
FADE_SECONDS = 0.005  # at both ends of a turn, so that cutting makes no click
SPEECH_RMS = 1500.0  # of a speaker at the mean level, -27 dBFS
PEAK = 30000.0  # of a window that would be clipped otherwise


class FrameGrid(NamedTuple):
    """The frames of a network's output, by the samples in their middle."""

    num_frames: int
    first: float
    hop: int

    def covered(self, start: float, end: float) -> slice:
        """Return the frames whose middle is from sample `start` to before `end`."""
        return slice(self._first_from(start), self._first_from(end))

    def _first_from(self, sample: float) -> int:
        """Return the first frame whose middle is at a sample or after it; else `num_frames`."""
        frame = math.ceil((sample - self.first) / self.hop)
        return min(max(frame, 0), self.num_frames)


class LocalTurn(NamedTuple):
    """Speech of one speaker in a recording, in samples."""

    start: float
    end: float
    speaker: str


class Reference(NamedTuple):
    """The truth about a recording: its turns, and the regions in which they are complete."""

    turns: Sequence[LocalTurn]
    regions: Sequence[tuple[float, float]]  # in samples


# Recording -> its truth; of a directory with simulated conversations: None.
References = Mapping[str, Reference] | None


class Style(NamedTuple):
    """How people talk in simulated conversations; see `ConversationsConfig`."""

    speakers: tuple[int, int] = (1, 3)
    turn_seconds: float = 3.0
    pause_seconds: float = 0.4
    overlap_prob: float = 0.5
    overlap_seconds: float = 2.0
    backchannel_prob: float = 0.3
    level_db: float = 4.0


# A wave, int16 -> its regions of speech, in seconds.
FindSpeech = Callable[[np.ndarray], Sequence[tuple[float, float]]]


class SpeakerRows:
    """The utterances of each speaker of one part of a manifest.

    Speakers have an index among those of the part, and a number among those of the manifest.
    """

    def __init__(self, manifest: Manifest, part: int) -> None:
        row_N = np.flatnonzero(manifest.part_N == part).astype(np.int32)
        speaker_N = manifest.speaker_N[row_N]
        # The utterances of a speaker are neighbours, and end at `end_P`.
        self.row_N = row_N[np.argsort(speaker_N, kind="stable")]
        self.speaker_P, count_P = np.unique(speaker_N, return_counts=True)
        self.end_P = np.cumsum(count_P)

    def __len__(self) -> int:
        return len(self.speaker_P)

    def find(self, speaker: int) -> int:
        """Return the index of the speaker with this number."""
        return int(np.searchsorted(self.speaker_P, speaker))

    def draw(self, index: int, rng: np.random.Generator) -> int:
        """Return a random row of the speaker with this index."""
        begin = 0 if index == 0 else int(self.end_P[index - 1])
        place = rng.integers(begin, self.end_P[index])
        return int(self.row_N[place])

    def draw_companions(
        self, index: int, num_others: int, rng: np.random.Generator
    ) -> list[int]:
        """Return random indices of speakers other than this one, each once."""
        # There may be a million speakers, so no list of the others is made: `index` is left out by
        # raising the numbers from it on by one.
        drawn = rng.choice(len(self) - 1, num_others, replace=False)
        others = drawn + (drawn >= index)
        return others.tolist()


class TurnPlacer:
    """The turns of a simulated conversation, added one after the other; times in samples."""

    def __init__(
        self,
        manifest: Manifest,
        rows: SpeakerRows,
        *,
        speakers: Sequence[int],
        gain_K: Sequence[float],
        rng: np.random.Generator,
    ) -> None:
        """Take the indices of the K local speakers in `rows`, and their levels."""
        self.num_samples_N = manifest.num_samples_N
        self.rate = manifest.sample_rate
        self.rows = rows
        self.speakers = speakers
        self.gain_K = gain_K
        self.rng = rng
        self.end_K = [-math.inf] * len(speakers)  # of the last turn of each
        self.turns: list[PlacedTurn] = []

    def add(self, speaker: int, start: float, seconds: float) -> float:
        """Add a turn of a local speaker, cut from any of their utterances; return its end.

        It begins later if the speaker has not finished the turn before, and is not longer than the
        utterance.
        """
        row = self.rows.draw(self.speakers[speaker], self.rng)
        available = int(self.num_samples_N[row])
        seconds = max(seconds, MIN_TURN_SECONDS)
        num_samples = min(round(seconds * self.rate), available)
        num_unused = available - num_samples
        first = int(self.rng.integers(num_unused + 1))
        earliest = self.end_K[speaker] + BREATH_SECONDS * self.rate
        turn = PlacedTurn(
            row=row,
            first=first,
            num_samples=num_samples,
            start=round(max(start, earliest)),
            speaker=speaker,
            gain_db=self.gain_K[speaker],
        )
        end = turn.start + num_samples
        # A turn that ends before the window is not heard.
        if end > 0:
            self.turns.append(turn)
        self.end_K[speaker] = end
        return end


class ConversationCrops(TrainCrops):
    """Windows of conversations, indexed by slot.

    The row of a slot is a recording to cut a window from, or an utterance whose speaker takes part.
    grid: the frames to label. references: for each part of the manifest. find_speech: decides when
    the speakers of simulated conversations speak. Other arguments: see `TrainCrops`.
    """

    def __init__(
        self,
        manifest: Manifest,
        draw_functions: DrawFunctions,
        *,
        crop_samples: int,
        grid: FrameGrid,
        references: Sequence[References],
        style: Style,
        find_speech: FindSpeech,
        seed: int,
        attempt: int = 0,
        codecs: Sequence[str] = (),
        draws_of_parts: Sequence[DrawFunctions] | None = None,
    ) -> None:
        super().__init__(
            manifest,
            draw_functions,
            crop_samples=crop_samples,
            label_KN=np.zeros((1, len(manifest.speakers)), dtype=np.int64),
            seed=seed,
            attempt=attempt,
            codecs=codecs,
            draws_of_parts=draws_of_parts,
        )
        self.crop_samples = crop_samples
        self.grid = grid
        self.references = references
        self.style = style
        self.find_speech = find_speech
        self.name_hashes[TURN_DRAWS] = stable_hash(TURN_DRAWS)
        # Conversations are simulated from the parts without true turns.
        self.speakers_of_parts: list[SpeakerRows | None] = []
        for part, references_of_part in enumerate(references):
            rows = None
            if references_of_part is None:
                rows = SpeakerRows(manifest, part)
            self.speakers_of_parts.append(rows)

    def draw(self, slot: Slot) -> Crop:
        """Return a window with all its draws, but without samples."""
        crop = super().draw(slot)
        rng = self._seek(TURN_DRAWS, slot)
        speaker_rows = self._speakers_around(crop.row)
        if speaker_rows is None:
            return replace(crop, first=self._draw_start(crop.row, rng))
        return replace(crop, turns=self._draw_turns(crop.row, speaker_rows, rng))

    def read(self, crop: Crop) -> Crop:
        """Return the window with its samples, and who speaks when."""
        # Not `if crop.turns`: nobody may speak in a simulated window either.
        is_simulated = self._speakers_around(crop.row) is not None
        if is_simulated:
            wave_S, active_KS = self._mix(crop.turns)
            speech_KT = label_frames(active_KS, self.grid)
        else:
            wave_S = self.fetch(crop)
            speech_KT = self._label(crop.row, crop.first)
        window = replace(crop, wave_S=wave_S, speech_KT=speech_KT)
        return self.reencoded(window)

    def fetch(self, crop: Crop) -> np.ndarray:
        """Return wave_S, int16, of a recording, or of all turns of a simulated conversation."""
        if self._speakers_around(crop.row) is None:
            return self._fetch_recording(crop.row, crop.first)
        # There may be no turn.
        waves = [np.zeros(0, dtype=np.int16)]
        for turn in crop.turns:
            wave_S, _ = self._read_turn(turn)
            waves.append(wave_S)
        return np.concatenate(waves)

    def _fetch_recording(self, row: int, first: int) -> np.ndarray:
        """Return wave_S of a window of a recording, with zeros after its end."""
        length = int(self.manifest.num_samples_N[row])
        num_samples = min(self.crop_samples, length - first)
        wave_S = self.manifest.read(row, first, num_samples)
        num_missing = self.crop_samples - num_samples
        return np.pad(wave_S, (0, num_missing))

    def _speakers_around(self, row: int) -> SpeakerRows | None:
        """Return the speakers to simulate conversations from, None for a row with turns."""
        part = int(self.manifest.part_N[row])
        return self.speakers_of_parts[part]

    def starts(self, row: int) -> list[int]:
        """Return the first samples of windows that follow each other in a recording."""
        starts: list[int] = []
        for region in self._reference(row).regions:
            begin, last = self._start_range(row, region)
            starts += range(begin, last + 1, self.crop_samples)
        return starts

    def _draw_start(self, row: int, rng: np.random.Generator) -> int:
        """Return the first sample of a window of a recording, within a region that is labelled."""
        regions = self._reference(row).regions
        # The probability of a region is in proportion to its length, even if it is shorter than a
        # window.
        length_R = [end - start for start, end in regions]
        end_R = np.cumsum(length_R)
        drawn = rng.random() * end_R[-1]
        index = int(np.searchsorted(end_R, drawn, side="right"))
        begin, last = self._start_range(row, regions[index])
        return int(rng.integers(begin, last + 1))

    def _start_range(self, row: int, region: tuple[float, float]) -> tuple[int, int]:
        """Return the first and the last sample at which a window of a region may begin."""
        length = int(self.manifest.num_samples_N[row])
        start, end = region
        begin = math.ceil(start)
        labelled_end = math.floor(min(end, length))
        last = labelled_end - self.crop_samples
        return begin, max(begin, last)

    def _draw_turns(
        self, row: int, rows: SpeakerRows, rng: np.random.Generator
    ) -> tuple[PlacedTurn, ...]:
        """Return the turns of a conversation in which the speaker of this row takes part."""
        style = self.style
        rate = self.manifest.sample_rate
        fewest, most = style.speakers
        wanted_speakers = int(rng.integers(fewest, most + 1))
        num_speakers = min(wanted_speakers, len(rows))
        first_speaker = rows.find(int(self.manifest.speaker_N[row]))
        companions = rows.draw_companions(first_speaker, num_speakers - 1, rng)
        placer = TurnPlacer(
            self.manifest,
            rows,
            speakers=[first_speaker, *companions],
            gain_K=rng.normal(0.0, style.level_db, num_speakers).tolist(),
            rng=rng,
        )

        # The window begins in the middle of a turn or of a pause.
        start = -rng.uniform(0, style.turn_seconds) * rate
        speaker = int(rng.integers(num_speakers))
        while start < self.crop_samples:
            begin = max(start, placer.end_K[speaker])
            turn_seconds = rng.exponential(style.turn_seconds)
            end = placer.add(speaker, start, turn_seconds)
            next_speaker = _draw_next_speaker(speaker, num_speakers, rng)
            has_listener = next_speaker != speaker

            # The next speaker may say a word or two before the end of this turn.
            is_interrupted = rng.random() < style.backchannel_prob
            seconds = rng.uniform(*BACKCHANNEL_SECONDS)
            latest = end - seconds * rate
            if has_listener and is_interrupted and latest > begin:
                interruption = rng.uniform(begin, latest)
                placer.add(next_speaker, interruption, seconds)

            # The next turn begins in the second half of this one, or after a pause.
            if has_listener and rng.random() < style.overlap_prob:
                overlap = rng.exponential(style.overlap_seconds) * rate
                start = end - min(overlap, (end - begin) / 2)
            else:
                start = end + rng.exponential(style.pause_seconds) * rate
            speaker = next_speaker
        return tuple(placer.turns)

    def _mix(self, turns: Sequence[PlacedTurn]) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of a conversation, int16, and who speaks in each, (K, S)."""
        mixed_S = np.zeros(self.crop_samples)
        num_speakers = max((turn.speaker + 1 for turn in turns), default=0)
        active_KS = np.zeros((num_speakers, self.crop_samples), dtype=bool)
        for turn in turns:
            wave_S, voiced_S = self._read_turn(turn)
            # The part of the turn that is in the window.
            begin = max(turn.start, 0)
            end = min(turn.start + turn.num_samples, self.crop_samples)
            if begin >= end:
                continue
            heard = slice(begin - turn.start, end - turn.start)
            mixed_S[begin:end] += wave_S[heard]
            active_KS[turn.speaker, begin:end] |= voiced_S[heard]
        peak = np.abs(mixed_S).max()
        if peak > PEAK:
            mixed_S *= PEAK / peak
        return np.round(mixed_S).astype(np.int16), active_KS

    def _read_turn(self, turn: PlacedTurn) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of a turn at its level, float64, and which of them are speech."""
        rate = self.manifest.sample_rate
        # Read the turn with the speech around it.
        context_samples = round(CONTEXT_SECONDS * rate)
        available = int(self.manifest.num_samples_N[turn.row])
        first = max(turn.first - context_samples, 0)
        end_of_turn = turn.first + turn.num_samples
        stop = min(end_of_turn + context_samples, available)
        context_S = self.manifest.read(turn.row, first, stop - first)
        voiced_S = np.zeros(len(context_S), dtype=bool)
        for start, end in self.find_speech(context_S):
            speech = slice(round(start * rate), round(end * rate))
            voiced_S[speech] = True

        # Its level is that of all speech that was read, not of the turn alone.
        gain = gain_to(turn.gain_db, context_S[voiced_S])
        begin = turn.first - first
        within_context = slice(begin, begin + turn.num_samples)
        wave_S = context_S[within_context] * gain
        fade_ends(wave_S, round(FADE_SECONDS * rate))
        return wave_S, voiced_S[within_context]

    def _label(self, row: int, first: int) -> np.ndarray:
        """Return speech_KT of a window of a recording."""
        reference = self._reference(row)
        grid = self.grid
        end_of_window = first + self.crop_samples
        turns = [
            turn
            for turn in reference.turns
            if turn.start < end_of_window and turn.end > first
        ]
        names = sorted({turn.speaker for turn in turns})
        active_KT = np.zeros((len(names), grid.num_frames), dtype=bool)
        for turn in turns:
            frames = grid.covered(turn.start - first, turn.end - first)
            active_KT[names.index(turn.speaker), frames] = True

        is_known_T = np.zeros(grid.num_frames, dtype=bool)
        for start, end in reference.regions:
            frames = grid.covered(start - first, end - first)
            is_known_T[frames] = True
        # After the end of a recording shorter than a window, nobody speaks.
        length = int(self.manifest.num_samples_N[row])
        frames = grid.covered(length - first, self.crop_samples)
        is_known_T[frames] = True
        return keep_most_active(active_KT, is_known_T)

    def _reference(self, row: int) -> Reference:
        """Return the truth about the recording in a row."""
        part = int(self.manifest.part_N[row])
        references = self.references[part]
        assert references is not None
        # The id in its directory: in the manifest, it may have the name of the directory before it.
        part_row = int(self.manifest.row_N[row])
        recording = self.manifest.parts[part].ids[part_row]
        return references[recording]


def _draw_next_speaker(
    speaker: int, num_speakers: int, rng: np.random.Generator
) -> int:
    """Return a random speaker other than this one; a single speaker continues after a pause."""
    if num_speakers == 1:
        return speaker
    # `speaker` is left out by raising the numbers from it on by one.
    drawn = int(rng.integers(num_speakers - 1))
    return drawn + 1 if drawn >= speaker else drawn


def gain_to(gain_db: float, speech_S: np.ndarray) -> float:
    """Return the factor that brings speech to a level, in dB relative to SPEECH_RMS."""
    # An utterance without speech stays as quiet as it is.
    if not len(speech_S):
        return 1.0
    power = np.square(speech_S.astype(np.float64)).mean()
    wanted_rms = 10 ** (gain_db / 20) * SPEECH_RMS
    return wanted_rms / max(np.sqrt(power), 1.0)


def fade_ends(wave_S: np.ndarray, num_fade: int) -> None:
    """Fade a wave in and out in place, over so many samples or half of its length."""
    num_fade = min(num_fade, len(wave_S) // 2)
    ramp_S = np.linspace(0, 1, num_fade, endpoint=False)
    wave_S[:num_fade] *= ramp_S
    # Not -num_fade, which would be the whole wave for a fade of no samples.
    fade_out = len(wave_S) - num_fade
    wave_S[fade_out:] *= ramp_S[::-1]


def label_frames(active_KS: np.ndarray, grid: FrameGrid) -> np.ndarray:
    """Return speech_KT, int8: whether each speaker speaks in the middle of a frame."""
    middle_T = np.round(grid.first + grid.hop * np.arange(grid.num_frames))
    active_KT = active_KS[:, middle_T.astype(np.int64)]
    return keep_most_active(active_KT, np.ones(grid.num_frames, dtype=bool))


def keep_most_active(active_KT: np.ndarray, is_known_T: np.ndarray) -> np.ndarray:
    """Return speech_KT, int8, of the MAX_SPEAKERS who speak most, padded with zeros.

    Frames in which another one speaks, for whom the network has no output, become UNKNOWN.
    """
    # Stable, so that speakers with equally many frames keep their order.
    num_frames_K = active_KT.sum(axis=1)
    order_K = np.argsort(-num_frames_K, kind="stable")
    chosen_KT = active_KT[order_K[:MAX_SPEAKERS]]
    others_KT = active_KT[order_K[MAX_SPEAKERS:]]
    speech_KT = np.zeros((MAX_SPEAKERS, active_KT.shape[1]), dtype=np.int8)
    speech_KT[: len(chosen_KT)] = chosen_KT
    speech_KT[:, ~is_known_T | others_KT.any(axis=0)] = UNKNOWN
    return speech_KT
