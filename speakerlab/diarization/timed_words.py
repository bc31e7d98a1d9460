"""Words with times and speakers: a transcript, and how it is written as SRT, CTM or JSON.

`transcripts` reads them, and describes the three formats.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

Entry = dict[str, Any]  # a segment or a word of a JSON transcript


class Word(NamedTuple):
    """Word, or cue of subtitles, with its times; None for both times if they are unknown."""

    start: float | None  # seconds
    end: float | None
    text: str
    speaker: str | None = None
    cue: int = 0  # number of the segment or cue, from 0
    # Between this word and the one before: nothing in Chinese, or in don|'t.
    before: str = " "
    is_cue: bool = False  # a cue or a segment, of several words

    @property
    def has_times(self) -> bool:
        return self.start is not None and self.end is not None

    @property
    def is_timed_word(self) -> bool:
        """Return whether this is a single word whose times are known."""
        return self.has_times and not self.is_cue


@dataclass(frozen=True)
class Transcript:
    """Words of a recording, in the order of their file; iterable over them."""

    words: Sequence[Word]
    # Content of the JSON file, which `to_json` returns with speakers; None for other formats.
    document: Any = None
    # Number of a segment -> its start and end, of those whose words all have unknown times.
    segment_times: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Word]:
        return iter(self.words)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def has_word_times(self) -> bool:
        """Return whether the times of any word are known, not only those of cues or segments."""
        words_with_text = [word for word in self.words if word.text]
        if not words_with_text:
            return True
        return any(word.is_timed_word for word in words_with_text)

    @property
    def num_not_in_srt(self) -> int:
        """Return the number of words that SRT leaves out: nothing in their segment has times."""
        timed_cues = {word.cue for word in self.words if word.has_times}
        timed_cues |= self.segment_times.keys()
        return sum(word.cue not in timed_cues for word in self.words if word.text)

    @property
    def num_not_in_ctm(self) -> int:
        """Return the number of words and segments that CTM leaves out: without times of words."""
        return sum(not word.is_timed_word for word in self.words if word.text)

    def to_srt(self) -> str:
        """Return subtitles: a cue for each segment, and within it for each speaker.

        A cue begins with the name of its speaker. Words of unknown times extend no cue; if all
        words of a segment are such, the cue has the times of the segment.
        """
        lines: list[str] = []
        num_written = 0
        by_cue_and_speaker = groupby(
            self.words, key=lambda word: (word.cue, word.speaker)
        )
        for (cue, speaker), group in by_cue_and_speaker:
            words = list(group)
            starts = [word.start for word in words if word.start is not None]
            ends = [word.end for word in words if word.end is not None]
            if cue in self.segment_times:
                start, end = self.segment_times[cue]
                starts.append(start)
                ends.append(end)
            if not starts or not ends:
                continue
            num_written += 1
            start_text = _srt_time(min(starts))
            end_text = _srt_time(max(ends))
            text = _srt_text(words)
            if speaker is not None:
                text = f"{speaker}: {text}"
            lines += [str(num_written), f"{start_text} --> {end_text}", text, ""]
        return "".join(f"{line}\n" for line in lines)

    def to_ctm(self, recording: str) -> str:
        """Return the words as lines of CTM, in order of time; without a speaker: `unknown`.

        Words of unknown times, and segments without words, have no line; `num_not_in_ctm` counts
        them. Blanks in names and words become `_`. Raises ValueError if no word has times.
        """
        if not self.has_word_times:
            raise ValueError(
                f"{recording}: the transcript has no times of words, which CTM needs; write"
                " SRT, or transcribe with word timestamps"
            )
        rows: list[tuple[float, float, str, str]] = []
        for word in self.words:
            text = _ctm_column(word.text)
            if text and word.is_timed_word:
                assert word.start is not None and word.end is not None
                speaker = _ctm_column(word.speaker or "unknown")
                rows.append((word.start, word.end, text, speaker))
        # The sort is stable: equal times stay in the order of the file.
        rows.sort(key=lambda row: row[0])
        lines: list[str] = []
        name = _ctm_column(recording)
        for start, end, text, speaker in rows:
            # Subtract rounded times, so that words that touch still touch after reading.
            duration = round(end, 3) - round(start, 3)
            lines.append(
                f"{name} 1 {start:.3f} {duration:.3f} {text} NA lex {speaker}\n"
            )
        return "".join(lines)

    def to_json(self) -> Any:
        """Return the content of the JSON file, with a `speaker` in each word and segment.

        The speaker of a segment is that of most of its time. Everything else is as it was read.
        Raises ValueError for a transcript that was not JSON.
        """
        if self.document is None:
            raise ValueError("the transcript was not JSON; write SRT or CTM")
        document = copy.deepcopy(self.document)
        speakers = [word.speaker for word in self.words]
        entries = [entry for _, entry, _ in entries_of(document)]
        for entry, speaker in zip(entries, speakers, strict=True):
            entry["speaker"] = speaker
        if isinstance(document, dict):
            # whisperX has its words a second time.
            for entry, speaker in zip(_word_segments(document, entries), speakers):
                entry["speaker"] = speaker
        speaker_of_cue = self._speakers_of_cues()
        for number, segment in enumerate(segments_of(document)):
            # A segment without words is an entry itself.
            if segment.get("words"):
                segment["speaker"] = speaker_of_cue.get(number)
        return document

    def _speakers_of_cues(self) -> dict[int, str]:
        """Return the speaker of most of the time of each cue in which a word has a speaker."""
        seconds_of_cue: dict[int, dict[str, float]] = {}
        for word in self.words:
            if word.speaker is None:
                continue
            duration = 0.0
            if word.start is not None and word.end is not None:
                duration = word.end - word.start
            seconds_of = seconds_of_cue.setdefault(word.cue, {})
            so_far = seconds_of.get(word.speaker, 0.0)
            seconds_of[word.speaker] = so_far + duration
        speaker_of_cue: dict[int, str] = {}
        for cue, seconds_of in seconds_of_cue.items():
            # `max` takes the first of equal ones.
            speaker_of_cue[cue] = max(seconds_of, key=seconds_of.__getitem__)
        return speaker_of_cue


def segments_of(document: Any) -> list[Entry]:
    """Return the segments of a JSON transcript, which may be the whole document."""
    if isinstance(document, dict):
        return document["segments"]
    return document


def entries_of(document: Any) -> Iterator[tuple[str, Entry, int]]:
    """Yield place, entry and number of the segment: its words, or itself if it has none."""
    for number, segment in enumerate(segments_of(document)):
        place = f"segments[{number}]"
        words = segment.get("words")
        if not words:
            yield place, segment, number
            continue
        for index, word in enumerate(words):
            yield f"{place}.words[{index}]", word, number


def _word_segments(
    document: Mapping[str, Any], entries: Sequence[Entry]
) -> list[Entry]:
    """Return the words of whisperX's `word_segments` if they are those of the segments, else []."""
    copies = document.get("word_segments")
    if not isinstance(copies, list) or len(copies) != len(entries):
        return []
    for entry, entry_copy in zip(entries, copies):
        if not isinstance(entry_copy, dict):
            return []
        if entry_copy.get("word") != entry.get("word"):
            return []
    return copies


def _srt_text(words: Sequence[Word]) -> str:
    """Return the text of words without what SRT would read as the end or the times of a cue."""
    text = "".join(word.before + word.text for word in words)
    text = re.sub("-+>", "→", text)
    lines: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        if line:
            lines.append(line)
    return "\n".join(lines)


def _srt_time(seconds: float) -> str:
    """Return a time as SRT has it: hours:minutes:seconds,milliseconds."""
    whole_seconds, millisecond = divmod(round(1000 * seconds), 1000)
    whole_minutes, second = divmod(whole_seconds, 60)
    hour, minute = divmod(whole_minutes, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d},{millisecond:03d}"


def _ctm_column(text: str) -> str:
    """Return a text as a column, which has no blanks."""
    return "_".join(text.split())
