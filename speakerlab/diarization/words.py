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
from speakerlab.diarization.timed_words import Transcript, Word

MAX_GAP_SECONDS = 1.0  # from a word in a pause to the nearest turn
SAME_SECONDS = 1e-6  # a smaller difference is one of rounding


def exclusive_turns(turns: Iterable[Turn]) -> list[Turn]:
    """Return turns that do not overlap, sorted: where several do, the longest keeps the time.

    Speech recognition writes the words of the speaker who holds the floor, and few of a short
    "yes" beneath them. Of equally long turns, the earlier one keeps the time.
    """

    def longest_first(turn: Turn) -> tuple[float, Turn]:
        duration = turn.end - turn.start
        return -duration, turn

    exclusive: list[Turn] = []
    # Each turn gets the time that longer ones have left.
    for turn in sorted(turns, key=longest_first):
        for part in _without(turn, exclusive):
            insort(exclusive, part)
    return exclusive


def _without(turn: Turn, taken: Sequence[Turn]) -> list[Turn]:
    """Return the parts of a turn outside of disjoint sorted turns."""
    parts: list[Turn] = []
    free_from = turn.start  # the times before are taken, or in a part
    num_before = bisect_left(taken, turn)
    # The last turn that starts before this one may end within it.
    for other in islice(taken, max(num_before - 1, 0), None):
        if other.end <= free_from:
            continue
        if other.start >= turn.end:
            break
        if other.start > free_from:
            parts.append(turn._replace(start=free_from, end=other.start))
        free_from = other.end
    if free_from < turn.end:
        parts.append(turn._replace(start=free_from))
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
    # Words may be in any order in their file: sort those with times to find their neighbours.
    timed_rows = [row for row, word in enumerate(words) if word.has_times]
    timed_rows.sort(key=lambda row: _times(words[row]))
    last_place = len(timed_rows) - 1
    for place, row in enumerate(timed_rows):
        # The first and the last word are their own neighbours.
        row_before = timed_rows[max(place - 1, 0)]
        row_after = timed_rows[min(place + 1, last_place)]
        speaker = speakers.find(
            words[row],
            before=words[row_before],
            after=words[row_after],
        )
        words[row] = words[row]._replace(speaker=speaker)

    # Segments whose words all have unknown times.
    speaker_of_cue: dict[int, str | None] = {}
    for cue, (start, end) in transcript.segment_times.items():
        segment = Word(start, end, "")
        speaker_of_cue[cue] = speakers.find(segment, before=segment, after=segment)
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

    def find(self, word: Word, *, before: Word, after: Word) -> str | None:
        """Return the speaker of a word; before, after: its neighbours in time."""
        start, end = _times(word)
        # The more seconds, the better; in a pause, they are negative.
        seconds_of = self._overlaps(start, end)
        if not seconds_of:
            seconds_of = self._minus_gaps(start, end)
        if not seconds_of:
            return None
        best = max(seconds_of.values())
        candidates: list[str] = []
        for speaker, seconds in seconds_of.items():
            if seconds >= best - SAME_SECONDS:
                candidates.append(speaker)

        # Of several candidates, the one who speaks more in the word and its neighbours.
        start_before, _ = _times(before)
        _, end_after = _times(after)
        seconds_around = self._overlaps(min(start_before, start), max(end_after, end))
        # `max` takes the earlier turn of equal ones.
        return max(candidates, key=lambda speaker: seconds_around.get(speaker, 0.0))

    def _overlaps(self, start: float, end: float) -> dict[str, float]:
        """Return speaker -> seconds within an interval, of speakers who speak in it."""
        # The turns that end after the start and start before the end.
        first = int(np.searchsorted(self.end_T, start, side="right"))
        stop = int(np.searchsorted(self.start_T, end, side="left"))
        seconds_of: dict[str, float] = {}
        for turn in self.turns[first:stop]:
            seconds = min(end, turn.end) - max(start, turn.start)
            if seconds > SAME_SECONDS:
                so_far = seconds_of.get(turn.speaker, 0.0)
                seconds_of[turn.speaker] = so_far + seconds
        return seconds_of

    def _minus_gaps(self, start: float, end: float) -> dict[str, float]:
        """Return speaker -> minus the seconds to a turn, for the turns next to an interval.

        These are the last turn before and the first one after it, if they are at most `max_gap`
        seconds away. A word without duration, as whisper has some, may be within the second one: it
        is 0 seconds away.
        """
        num_before = int(np.searchsorted(self.end_T, start, side="right"))
        neighbours = self.turns[max(num_before - 1, 0) : num_before + 1]
        minus_gap_of: dict[str, float] = {}
        for turn in neighbours:
            gap = max(turn.start - end, start - turn.end, 0.0)
            if gap <= self.max_gap:
                so_far = minus_gap_of.get(turn.speaker, -np.inf)
                minus_gap_of[turn.speaker] = max(so_far, -gap)
        return minus_gap_of


def _times(word: Word) -> tuple[float, float]:
    """Return the times of a word that has some."""
    assert word.start is not None and word.end is not None
    return word.start, word.end


def _fill_untimed(words: Sequence[Word]) -> list[Word]:
    """Return words with the speakers of those of unknown times, from their segment."""
    from_before = _fill_from_last(words)
    from_after = _fill_from_last(from_before[::-1])
    return from_after[::-1]


def _fill_from_last(words: Sequence[Word]) -> list[Word]:
    """Return words; those of unknown times get the speaker of the word before in the list."""
    filled: list[Word] = []
    for word in words:
        if filled and not word.has_times and word.speaker is None:
            last = filled[-1]
            if last.cue == word.cue:
                word = word._replace(speaker=last.speaker)
        filled.append(word)
    return filled
