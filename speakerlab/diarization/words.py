"""Who says each word. In: the words of a transcript and the turns of its recording.

Each instant of the turns gets one speaker first, since a transcript has one word at a time.
Letters: N words, T exclusive turns.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from speakerlab.diarization.regions import Turn
from speakerlab.diarization.transcripts import Transcript, Word

MAX_GAP_SECONDS = 1.0  # from a word in a pause to the nearest turn
SAME_SECONDS = 1e-6  # a smaller difference is one of rounding


def exclusive_turns(turns: Iterable[Turn]) -> list[Turn]:
    """Return turns that do not overlap, sorted: where several do, the longest keeps the time.

    Speech recognition writes the words of the speaker who holds the floor, and few of a short
    "yes" beneath them. Of equally long turns, the earlier one keeps the time.
    """
    free: list[Turn] = []
    # The longest first; each later one gets the time that is left.
    by_length = sorted(turns, key=lambda turn: (turn.start - turn.end, turn))
    for turn in by_length:
        for part in _without(turn, free):
            insort(free, part)
    return free


def _without(turn: Turn, taken: Sequence[Turn]) -> list[Turn]:
    """Return the parts of a turn outside of disjoint sorted turns."""
    parts: list[Turn] = []
    start = turn.start
    first = bisect_left(taken, turn)
    # The turn before may end within this one.
    for other in islice(taken, max(first - 1, 0), None):
        if other.end <= start:
            continue
        if other.start >= turn.end:
            break
        if other.start > start:
            parts.append(turn._replace(start=start, end=other.start))
        start = other.end
    if start < turn.end:
        parts.append(turn._replace(start=start))
    return parts


def assign_words(
    transcript: Transcript,
    turns: Iterable[Turn],
    *,
    max_gap: float = MAX_GAP_SECONDS,
) -> Transcript:
    """Return the transcript with the speaker of each word, or None for no speaker.

    A word gets the speaker whose exclusive turns overlap it for the longest time; of equal ones
    the speaker who overlaps the word and its neighbours for longer. A word in a pause gets the
    speaker of the nearest turn, if it is at most `max_gap` seconds away. A word of unknown times
    gets the speaker of the word before it in its segment, else of the word after it; if all words
    of a segment are such, they get the speaker of the segment.
    """
    if not 0 <= max_gap < np.inf:
        raise ValueError(f"max_gap: must be seconds from 0 on, got {max_gap}")
    speakers = _Speakers(exclusive_turns(turns), max_gap=max_gap)
    words = list(transcript)
    # Words may be in any order in their file.
    timed = [row for row, word in enumerate(words) if word.start is not None]
    timed.sort(key=lambda row: words[row][:2])
    for place, row in enumerate(timed):
        first = words[timed[max(place - 1, 0)]]
        last = words[timed[min(place + 1, len(timed) - 1)]]
        speaker = speakers.find(words[row], first, last)
        words[row] = words[row]._replace(speaker=speaker)
    speaker_of_cue: dict[int, str | None] = {}
    for cue, (start, end) in transcript.segment_times.items():
        segment = Word(start, end, "")
        speaker_of_cue[cue] = speakers.find(segment, segment, segment)
    for row, word in enumerate(words):
        if word.cue in speaker_of_cue:
            words[row] = word._replace(speaker=speaker_of_cue[word.cue])
    return replace(transcript, words=_fill_untimed(words))


class _Speakers:
    """Speakers of times, from exclusive turns."""

    def __init__(self, turns: Sequence[Turn], *, max_gap: float) -> None:
        self.turns = turns
        self.max_gap = max_gap
        self.start_T = np.array([turn.start for turn in turns])
        self.end_T = np.array([turn.end for turn in turns])

    def find(self, word: Word, first: Word, last: Word) -> str | None:
        """Return the speaker of a word; first, last: its neighbours in time."""
        start, end = _times(word)
        seconds_of = self._overlaps(start, end)
        if not seconds_of:
            seconds_of = self._nearest(start, end)
        best = max(seconds_of.values(), default=0.0)
        candidates: list[str] = []
        for speaker, seconds in seconds_of.items():
            if seconds >= best - SAME_SECONDS:
                candidates.append(speaker)
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        first_start, _ = _times(first)
        _, last_end = _times(last)
        around = self._overlaps(min(first_start, start), max(last_end, end))
        # `max` takes the earlier turn of equal ones.
        return max(candidates, key=lambda speaker: around.get(speaker, 0.0))

    def _overlaps(self, start: float, end: float) -> dict[str, float]:
        """Return speaker -> seconds within an interval, of speakers who speak in it."""
        first = int(np.searchsorted(self.end_T, start, side="right"))
        stop = int(np.searchsorted(self.start_T, end, side="left"))
        seconds_of: dict[str, float] = {}
        for turn in self.turns[first:stop]:
            seconds = min(end, turn.end) - max(start, turn.start)
            if seconds > SAME_SECONDS:
                so_far = seconds_of.get(turn.speaker, 0.0)
                seconds_of[turn.speaker] = so_far + seconds
        return seconds_of

    def _nearest(self, start: float, end: float) -> dict[str, float]:
        """Return speaker -> minus the seconds to the nearest turns before and after an interval.

        A word without duration, as whisper has some, is within a turn: it is 0 seconds away.
        """
        first = int(np.searchsorted(self.end_T, start, side="right"))
        closeness_of: dict[str, float] = {}
        for turn in self.turns[max(first - 1, 0) : first + 1]:
            gap = max(turn.start - end, start - turn.end, 0.0)
            if gap <= self.max_gap:
                so_far = closeness_of.get(turn.speaker, -np.inf)
                closeness_of[turn.speaker] = max(so_far, -gap)
        return closeness_of


def _times(word: Word) -> tuple[float, float]:
    """Return the times of a word that has some."""
    assert word.start is not None and word.end is not None
    return word.start, word.end


def _fill_untimed(words: Sequence[Word]) -> list[Word]:
    """Return words with the speakers of those of unknown times, from their segment."""
    filled = list(words)
    rows = range(len(filled))
    # From the words before, then from those after.
    for order, step in ((rows, 1), (reversed(rows), -1)):
        for row in order:
            word = filled[row]
            other_row = row - step
            if word.start is not None or word.speaker is not None:
                continue
            if 0 <= other_row < len(filled) and filled[other_row].cue == word.cue:
                filled[row] = word._replace(speaker=filled[other_row].speaker)
    return filled
