"""Conversations of synthetic voices: who says what when, and recordings with the exact truth.

A conversation takes about 105 s. Everybody says at least three sentences, others say more. Most
lines begin after a pause; some begin before the previous ones end. All speakers are in one room, at
different places and levels. The noise is also in the pauses.
Shape suffix: S samples.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import soundfile
from scipy.signal import oaconvolve

from egs.mini.making import Utterance, keyed_rng, speak, write_wave
from egs.mini.sound import SAMPLE_RATE, add_noise, room
from egs.mini.voices import Voice, draw_sentence, draw_voice
from speakerlab.diarization.regions import Turn, write_rttm

SPLITS = ("dev", "test")
NUM_SPEAKERS = range(2, 7)  # in turn
NUM_LINES = (22, 31)  # of a conversation, half open
LEAST_SENTENCES = 3  # of each speaker
REPLY_PROB = 0.25  # of the other lines
REPLIES = (
    "Yes, of course.",
    "No, never.",
    "Really?",
    "I see what you mean.",
    "That is true.",
    "Oh, I did not know.",
    "Why not?",
    "Who said so?",
    "Maybe tomorrow.",
    "How strange!",
)
OVERLAP_PROB = (
    0.05,
    0.4,
)  # range of the share of lines that begin before the previous ones end
OVERLAP_SECONDS = (0.2, 1.5)  # range; a speaker never overlaps their own line
PAUSE_SECONDS = (
    0.2,
    2.0,
)  # range; espeak-ng's own pauses within a sentence are shorter
MEAN_PAUSE_SECONDS = 0.6  # without the upper bound
GRID = (
    SAMPLE_RATE // 1000
)  # RTTM has milliseconds: turns begin and end at these samples
SILENCE = 1e-3  # of a line's largest sample


@dataclass(frozen=True)
class Line(Utterance):
    """One sentence or short reply of a conversation."""

    conversation: str
    gap_seconds: float  # from the end of all lines before it; negative: overlap


def plan(
    *, seed: int, num_voices: int, num_conversations: int
) -> tuple[dict[str, Voice], list]:
    """Draw the voices of each split, half of them female, and the lines of its conversations."""
    voices: dict[str, Voice] = {}
    lines: list[Line] = []
    for split in SPLITS:
        names = [f"{split}{i:03d}" for i in range(num_voices)]
        for i, name in enumerate(names):
            voices[name] = draw_voice(name, seed=seed, sex=("female", "male")[i % 2])
        for i in range(num_conversations):
            conversation = f"{split}-{i:02d}"
            rng = keyed_rng(seed, conversation)
            num_speakers = NUM_SPEAKERS[i % len(NUM_SPEAKERS)]
            cast = [
                str(name) for name in rng.choice(names, num_speakers, replace=False)
            ]
            lines += draw_lines(conversation, split, cast, rng, seed=seed)
    return voices, lines


def draw_lines(
    conversation: str,
    split: str,
    cast: Sequence[str],
    rng: np.random.Generator,
    *,
    seed: int,
) -> list[Line]:
    """Draw who says what, and the pauses and overlaps between the lines."""
    num_free = int(rng.integers(*NUM_LINES)) - LEAST_SENTENCES * len(cast)
    shares = rng.dirichlet(np.full(len(cast), 2.0))  # some talk more than others
    spoken = [(name, False) for name in cast] * LEAST_SENTENCES
    for name in rng.choice(cast, num_free, p=shares):
        spoken.append((str(name), rng.random() < REPLY_PROB))
    overlap_prob = rng.uniform(*OVERLAP_PROB)
    lines: list[Line] = []
    for k, place in enumerate(rng.permutation(len(spoken))):
        speaker, is_reply = spoken[place]
        id = f"{conversation}-{k:02d}"
        text = str(rng.choice(REPLIES)) if is_reply else draw_sentence(id, seed=seed)
        low, high = PAUSE_SECONDS
        gap = min(low + rng.exponential(MEAN_PAUSE_SECONDS - low), high)
        if k and rng.random() < overlap_prob:
            gap = -rng.uniform(*OVERLAP_SECONDS)
        lines.append(
            Line(id, speaker, split, text, conversation, gap_seconds=float(gap))
        )
    return lines


def record_conversations(
    folder: Path,
    voices: dict[str, Voice],
    lines: Sequence[Line],
    *,
    seed: int,
    num_jobs: int,
) -> None:
    """Write a wav and an RTTM file of each conversation into `folder`/<split>."""
    clean = folder / "clean"
    clean.mkdir()
    speak(clean, voices, lines, seed=seed, num_jobs=num_jobs)

    def record(conversation: Sequence[Line]) -> None:
        waves: list[np.ndarray] = []
        for line in conversation:
            wave_S, _ = soundfile.read(clean / line.path)
            waves.append(trim(wave_S))
        turns = place_lines(conversation, waves)
        first = conversation[0]
        name = first.conversation
        rng = keyed_rng(seed, f"{name}/sound")
        stem = folder / first.split / name
        write_wave(stem.with_suffix(".wav"), mix(turns, waves, rng))
        write_rttm(stem.with_suffix(".rttm"), {name: turns})

    with ThreadPoolExecutor(num_jobs) as pool:
        groups = groupby(lines, key=lambda line: line.conversation)
        list(pool.map(record, [list(group) for _, group in groups]))
    shutil.rmtree(clean)


def trim(wave_S: np.ndarray) -> np.ndarray:
    """Cut the silence at both ends; fill up to whole milliseconds."""
    loud = np.flatnonzero(np.abs(wave_S) > SILENCE * np.abs(wave_S).max())
    wave_S = wave_S[loud[0] : loud[-1] + 1]
    return np.pad(wave_S, (0, -len(wave_S) % GRID))


def place_lines(lines: Sequence[Line], waves: Sequence[np.ndarray]) -> list[Turn]:
    """Return the turn of each line; pauses of one speaker are at least the shortest pause."""
    turns: list[Turn] = []
    ends: dict[str, float] = {}  # of each speaker
    for line, wave_S in zip(lines, waves):
        last_end = max(ends.values(), default=0.0)
        # A negative gap is an overlap with another speaker, never with oneself.
        earliest = ends.get(line.speaker, 0.0) + PAUSE_SECONDS[0]
        start = max(last_end + line.gap_seconds, earliest)
        start = round(start, 3)
        end = round(start + len(wave_S) / SAMPLE_RATE, 3)
        ends[line.speaker] = end
        turns.append(Turn(start, end, line.speaker))
    return turns


def mix(
    turns: Sequence[Turn], waves: Sequence[np.ndarray], rng: np.random.Generator
) -> np.ndarray:
    """Return the turns' waves in one room, with noise; it ends a second after the last turn."""
    last_end = max(turn.end for turn in turns)
    num_samples = _sample(last_end + 1.0)
    rt60_seconds = rng.uniform(0.1, 0.45)
    speech_S = np.zeros(num_samples)
    for speaker in sorted({turn.speaker for turn in turns}):
        dry_S = np.zeros(num_samples)
        for turn, wave_S in zip(turns, waves):
            if turn.speaker == speaker:
                begin = _sample(turn.start)
                end = _sample(turn.end)
                dry_S[begin:end] = wave_S
        response_R = room(rng, rt60_seconds=rt60_seconds)
        level_db = rng.uniform(-6.0, 0.0)
        reverberant_S = oaconvolve(dry_S, response_R)[:num_samples]
        speech_S += 10 ** (level_db / 20) * reverberant_S
    return add_noise(speech_S, rng)


def _sample(seconds: float) -> int:
    """Return the sample at a time, on the grid of whole milliseconds."""
    return round(seconds * 1000) * GRID
