"""Transcripts with times: whisper's JSON, SRT subtitles and CTM. In and out: words with speakers.

- JSON of openai-whisper, faster-whisper and whisperX: `segments`, each with `start`, `end`, `text`
  and, with word timestamps, `words`, each with `start`, `end` and `word`;
- SRT: cues `number`, `00:00:01,000 --> 00:00:02,500`, text, and a blank line;
- CTM: `recording channel start duration word [confidence [type [speaker]]]`, a line per word (NIST,
  RT-09 evaluation plan, appendix B); lines that start with ;; are skipped.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text, read_text
from speakerlab.diarization.regions import MAX_SECONDS, SURROGATE

Entry = dict[str, Any]  # a segment or a word of a JSON transcript
# The most precise first.
ENDINGS = (".json", ".ctm", ".srt")
# A cue of subtitles from words: two lines of 42 characters, and no pause of a second.
CUE_CHARACTERS = 84
CUE_PAUSE_SECONDS = 1.0
TIME = r"(\d+):(\d\d):(\d\d)[,.](\d{1,3})"
TIME_LINE = re.compile(rf"\s*{TIME}\s*-->\s*{TIME}(\s.*)?")
# A line that was meant to have times.
LIKE_TIME_LINE = re.compile(r"\s*-?\d+:\d+.*->.*|.*-->\s*-?\d+:.*")
# What a JSON of another tool has, and what to do.
OTHER_TOOLS = {
    "transcription": "is of whisper.cpp; write SRT with its option -osrt",
    "chunks": (
        "is of a pipeline of transformers; rename `chunks` to `segments`, and give each"
        " `start` and `end` instead of `timestamp`"
    ),
    "results": "is of a cloud service; convert it to SRT or CTM",
    "model_sha256": "is a diarization; give the transcript",
}


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
        with_text = [word for word in self.words if word.text]
        return not with_text or any(map(_is_timed_word, with_text))

    @property
    def num_not_in_srt(self) -> int:
        """Return the number of words that SRT leaves out: nothing in their segment has times."""
        timed_cues = {word.cue for word in self.words if word.has_times}
        timed_cues |= self.segment_times.keys()
        return sum(word.cue not in timed_cues for word in self.words if word.text)

    @property
    def num_not_in_ctm(self) -> int:
        """Return the number of words and segments that CTM leaves out: without times of words."""
        return sum(not _is_timed_word(word) for word in self.words if word.text)

    def to_srt(self) -> str:
        """Return subtitles: a cue for each segment, and within it for each speaker.

        A cue begins with the name of its speaker. Words of unknown times extend no cue; if all
        words of a segment are such, the cue has the times of the segment.
        """
        lines: list[str] = []
        number = 0
        by_cue_and_speaker = groupby(
            self.words, key=lambda word: (word.cue, word.speaker)
        )
        for (cue, _), group in by_cue_and_speaker:
            words = list(group)
            starts = [word.start for word in words if word.start is not None]
            ends = [word.end for word in words if word.end is not None]
            if cue in self.segment_times:
                start, end = self.segment_times[cue]
                starts.append(start)
                ends.append(end)
            if not starts or not ends:
                continue
            number += 1
            text = _join(words)
            speaker = words[0].speaker
            if speaker is not None:
                text = f"{speaker}: {text}"
            times = f"{_clock(min(starts))} --> {_clock(max(ends))}"
            lines += [str(number), times, text, ""]
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
            token = _one_word(word.text)
            if token and _is_timed_word(word):
                assert word.start is not None and word.end is not None
                speaker = _one_word(word.speaker or "unknown")
                rows.append((word.start, word.end, token, speaker))
        # The sort is stable: equal times stay in the order of the file.
        rows.sort(key=lambda row: row[0])
        lines: list[str] = []
        name = _one_word(recording)
        for start, end, token, speaker in rows:
            # Subtract rounded times, so that words that touch still touch after reading.
            duration = round(end, 3) - round(start, 3)
            lines.append(
                f"{name} 1 {start:.3f} {duration:.3f} {token} NA lex {speaker}\n"
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
        entries = [entry for _, entry, _ in _entries_of(document)]
        for entry, speaker in zip(entries, speakers, strict=True):
            entry["speaker"] = speaker
        if isinstance(document, dict):
            # whisperX has its words a second time.
            for entry, speaker in zip(_word_segments(document, entries), speakers):
                entry["speaker"] = speaker
        self._add_speakers_of_segments(document)
        return document

    def _add_speakers_of_segments(self, document: Any) -> None:
        seconds_of: dict[int, dict[str | None, float]] = {}
        for word in self.words:
            duration = 0.0
            if word.start is not None and word.end is not None:
                duration = word.end - word.start
            seconds = seconds_of.setdefault(word.cue, {})
            seconds[word.speaker] = seconds.get(word.speaker, 0.0) + duration
        for number, segment in enumerate(_segments_of(document)):
            seconds = seconds_of.get(number, {})
            known = [speaker for speaker in seconds if speaker is not None]
            # `max` takes the first of equal ones.
            speaker = max(known, key=seconds.__getitem__, default=None)
            # A segment without words has got its own.
            if segment.get("words"):
                segment["speaker"] = speaker


def read_transcripts(path: Path) -> dict[str, Transcript]:
    """Return recording -> transcript of a file, or of the transcripts of a folder.

    The recording of JSON and SRT is the name of the file without its ending; a CTM file names its
    recordings itself. Of files in a folder that differ in their endings only, the first of ENDINGS
    is read; `NAME.words.*`, which `speakerlab words` writes, is left out. Raises ValueError, a line
    for each fault with its place.
    """
    if not path.is_dir():
        return _read_file(path)
    files: dict[str, Path] = {}
    for ending in ENDINGS:
        for file in sorted(path.glob(f"*{ending}")):
            is_output = file.stem.endswith(".words")
            if not is_output and not file.name.startswith("."):
                files.setdefault(file.stem, file)
    if not files:
        raise ValueError(
            f"{path}: has no transcripts; give a folder with .json, .srt or .ctm files"
        )
    transcripts: dict[str, Transcript] = {}
    for file in files.values():
        for name, transcript in _read_file(file).items():
            if name in transcripts:
                raise ValueError(
                    f"{file}: {name} is also in another transcript; keep one of the two"
                )
            transcripts[name] = transcript
    return transcripts


def read_transcript(source: Any) -> Transcript:
    """Return the transcript of a file, or of whisper's result in Python.

    source: a path; or what whisper's JSON has, a dict with `segments`, or a list of segments as
    dicts, as `[asdict(segment) for segment in segments]` of faster-whisper.
    """
    if isinstance(source, Transcript):
        return source
    if not isinstance(source, str | Path):
        return parse_json_transcript(source, where="transcript")
    transcripts = _read_file(Path(source))
    if len(transcripts) != 1:
        raise ValueError(
            f"{source}: has {len(transcripts)} recordings, not one; use"
            " `read_transcripts`"
        )
    (transcript,) = transcripts.values()
    return transcript


def _read_file(path: Path) -> dict[str, Transcript]:
    ending = path.suffix.lower()
    if ending == ".ctm":
        return _read_ctm(path)
    if ending == ".srt":
        return {path.stem: _read_srt(path)}
    if ending == ".json":
        return {path.stem: _read_json(path)}
    raise ValueError(
        f"{path}: is not a transcript by its ending; give whisper's .json, .srt or .ctm"
    )


def _read_json(path: Path) -> Transcript:
    text = read_text(path)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: is not JSON ({error.msg}); write the transcript"
            " again"
        ) from None
    # Too deep, or a number of thousands of digits.
    except (RecursionError, ValueError):
        raise ValueError(
            f"{path}: is not a transcript; give the JSON of whisper"
        ) from None
    return parse_json_transcript(document, where=path)


def parse_json_transcript(document: Any, *, where: Path | str) -> Transcript:
    """Return the transcript of the content of whisper's JSON; where: its name in errors."""
    _check_structure(document, where)
    faults = Faults()
    words: list[Word] = []
    for place, entry, cue in _entries_of(document):
        is_word = "words" in place
        try:
            start, end = _times_of(entry)
        except ValueError as error:
            faults.add("refused times", f"{where}: {place}: {error}")
            continue
        text = entry["word" if is_word and "word" in entry else "text"]
        text = SURROGATE.sub("\ufffd", text)
        before = " " if is_word and text[:1].isspace() else ""
        word = Word(
            start,
            end,
            text.strip(),
            cue=cue,
            before=before,
            is_cue=not is_word,
        )
        words.append(word)
    segments = _segments_of(document)
    segment_times = _find_segment_times(words, segments, faults, where)
    faults.raise_if_any()
    return Transcript(
        _with_blanks(words, segments),
        document=document,
        segment_times=segment_times,
    )


def _check_structure(document: Any, where: Path | str) -> None:
    """Raise ValueError unless a document has the segments and words of whisper's JSON."""
    segments = document
    if isinstance(document, dict):
        for key, problem in OTHER_TOOLS.items():
            if key in document and (
                "segments" not in document or key == "model_sha256"
            ):
                raise ValueError(f"{where}: {problem}")
        segments = document.get("segments")
    if not isinstance(segments, list):
        raise ValueError(
            f"{where}: has no list `segments`, which the JSON of whisper has; give SRT,"
            " CTM or that JSON"
        )
    faults = Faults()
    for number, segment in enumerate(segments):
        problem = _problem_of_segment(segment)
        if problem:
            faults.add("refused segments", f"{where}: segments[{number}]{problem}")
    faults.raise_if_any()


def _find_segment_times(
    words: Sequence[Word],
    segments: Sequence[Entry],
    faults: Faults,
    where: Path | str,
) -> dict[int, tuple[float, float]]:
    """Return the times of segments whose words all have unknown ones; see `Transcript`."""
    segment_times: dict[int, tuple[float, float]] = {}
    timed_cues = {word.cue for word in words if word.has_times}
    for cue in sorted({word.cue for word in words} - timed_cues):
        try:
            start, end = _times_of(segments[cue])
        except ValueError as error:
            faults.add("refused times", f"{where}: segments[{cue}]: {error}")
            continue
        if start is not None and end is not None:
            segment_times[cue] = (start, end)
    return segment_times


def _with_blanks(words: Sequence[Word], segments: Sequence[Entry]) -> list[Word]:
    """Return words with the blanks before them that whisperX leaves out.

    whisper's words begin with a blank where the language has one. Where none of a segment does,
    the text of the segment shows whether its words are joined.
    """
    spaced: list[Word] = []
    for cue, group in groupby(words, key=lambda word: word.cue):
        words_of_cue = list(group)
        joined = "".join(word.text for word in words_of_cue)
        has_blanks = any(word.before for word in words_of_cue)
        is_joined = joined == str(segments[cue].get("text", "")).strip()
        if not has_blanks and not is_joined:
            words_of_cue = [word._replace(before=" ") for word in words_of_cue]
        spaced += words_of_cue
    return spaced


def _problem_of_segment(segment: Any) -> str:
    """Return the problem with the structure of a segment and its words; "" for none."""
    if not isinstance(segment, dict):
        return f" is not an object, got {_quote(segment)}; give the JSON of whisper"
    words = segment.get("words")
    if words is None or words == []:
        if not isinstance(segment.get("text"), str):
            return " has no text and no words; give the JSON of whisper"
        return ""
    if not isinstance(words, list):
        return f".words is not a list, got {_quote(words)}; give the JSON of whisper"
    for number, word in enumerate(words):
        text = None
        if isinstance(word, dict):
            text = word.get("word", word.get("text"))
        if not isinstance(text, str):
            return f".words[{number}] has no `word`, got {_quote(word)}; correct it"
    return ""


def _segments_of(document: Any) -> list[Entry]:
    return document["segments"] if isinstance(document, dict) else document


def _entries_of(document: Any) -> Iterator[tuple[str, Entry, int]]:
    """Yield place, entry and number of the segment: its words, or itself if it has none."""
    for number, segment in enumerate(_segments_of(document)):
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


def _times_of(entry: Entry) -> tuple[float | None, float | None]:
    """Return start and end; None for both if one is missing, as of numerals in whisperX."""
    start = entry.get("start")
    end = entry.get("end")
    for key, seconds in (("start", start), ("end", end)):
        if seconds is None:
            continue
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        # NaN is in no range.
        if not is_number or not 0 <= seconds < MAX_SECONDS:
            raise ValueError(
                f"`{key}` must be seconds from 0 to {MAX_SECONDS:g}, got"
                f" {_quote(seconds)}; correct it"
            )
    if start is None or end is None:
        return None, None
    _check_order(float(start), float(end))
    return float(start), float(end)


def _check_order(start: float, end: float) -> None:
    if end < start:
        raise ValueError(
            f"ends at {end:g} s, before its start at {start:g} s; correct it"
        )


def _read_srt(path: Path) -> Transcript:
    lines = read_text(path).splitlines()
    first_text = next((line.strip() for line in lines if line.strip()), "")
    if first_text.startswith("WEBVTT"):
        raise ValueError(f"{path}: is WebVTT; convert it to SRT")

    faults = Faults()
    words: list[Word] = []
    text_of: list[list[str]] = []  # lines of each cue
    for number, line in enumerate(lines, start=1):
        match = TIME_LINE.fullmatch(line)
        try:
            if match:
                start, end = (
                    _seconds_of(match.groups()[:4]),
                    _seconds_of(match.groups()[4:8]),
                )
                _check_order(start, end)
                # The number above the times is no text of the cue before.
                if text_of and text_of[-1] and text_of[-1][-1].strip().isdecimal():
                    text_of[-1].pop()
                words.append(Word(start, end, "", cue=len(words), is_cue=True))
                text_of.append([])
            elif LIKE_TIME_LINE.fullmatch(line):
                raise ValueError(
                    "is not `00:00:01,000 --> 00:00:02,500`, got"
                    f" {_quote(line)}; correct it"
                )
            elif text_of:
                text_of[-1].append(line)
            elif line.strip() and not line.strip().isdecimal():
                raise ValueError(
                    f"text before the times of a cue, got {_quote(line)}; give SRT"
                )
        except ValueError as error:
            faults.add("refused lines", f"{path}:{number}: {error}")
    faults.raise_if_any()
    cues: list[Word] = []
    for word, cue_lines in zip(words, text_of):
        # A cue may have blank lines.
        text = "\n".join(line.strip() for line in cue_lines if line.strip())
        cues.append(word._replace(text=text))
    return Transcript(cues)


def _seconds_of(parts: Sequence[str]) -> float:
    """Return the seconds of hours, minutes, seconds and a fraction."""
    hours, minutes, seconds, fraction = parts
    milliseconds = int(fraction.ljust(3, "0"))
    whole_seconds = 3600 * int(hours[:9]) + 60 * int(minutes) + int(seconds)
    if len(hours) > 9 or not whole_seconds < MAX_SECONDS:
        raise ValueError(f"times must be below {MAX_SECONDS:g} s; correct them")
    return whole_seconds + milliseconds / 1000


def _read_ctm(path: Path) -> dict[str, Transcript]:
    faults = Faults()
    words_of: dict[str, list[Word]] = {}
    channels: dict[str, str] = {}
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            columns = line.split()
            if not columns or line.lstrip().startswith(";;"):
                continue
            try:
                recording, channel, word = _parse_ctm(columns)
                first = channels.setdefault(recording, channel)
                if channel != first:
                    raise ValueError(
                        f"{recording} has channels {first} and {channel}; give each"
                        " channel a different name"
                    )
            except ValueError as error:
                faults.add("refused lines", f"{path}:{number}: {error}")
                continue
            words_of.setdefault(recording, []).append(word)
    faults.raise_if_any()
    # An empty file is a recording in which nothing was recognized.
    if not words_of:
        return {path.stem: Transcript([])}
    transcripts: dict[str, Transcript] = {}
    for recording, words in words_of.items():
        transcripts[recording] = Transcript(_cut_cues(words))
    return transcripts


def _parse_ctm(columns: Sequence[str]) -> tuple[str, str, Word]:
    """Return recording, channel and word of a line."""
    if not 5 <= len(columns) <= 8:
        raise ValueError(
            "is not 'recording channel start duration word [confidence [type"
            f" [speaker]]]', got {_quote(' '.join(columns))}; correct it"
        )
    recording, channel, start_text, duration_text, text, *_ = columns
    seconds: list[float] = []
    for name, number in (("start", start_text), ("duration", duration_text)):
        try:
            value = float(number)
        except ValueError:
            value = -1.0  # refused below
        if not 0 <= value < MAX_SECONDS:
            raise ValueError(
                f"the {name} must be seconds from 0 to {MAX_SECONDS:g}, got {number};"
                " correct it"
            )
        seconds.append(value)
    start, duration = seconds
    end = round(start + duration, 9)
    return recording, channel, Word(start, end, text)


def _cut_cues(words: Sequence[Word]) -> list[Word]:
    """Return words with their cue: cues end at pauses, and before they are too long."""
    cut: list[Word] = []
    cue = 0
    num_characters = 0
    last_end = 0.0
    for word in words:
        start = word.start or 0.0
        num_characters += 1 + len(word.text)
        is_pause = abs(start - last_end) >= CUE_PAUSE_SECONDS
        if cut and (is_pause or num_characters > CUE_CHARACTERS):
            cue += 1
            num_characters = 1 + len(word.text)
        cut.append(word._replace(cue=cue))
        last_end = word.end or 0.0
    return cut


def _is_timed_word(word: Word) -> bool:
    return word.has_times and not word.is_cue


def _join(words: Sequence[Word]) -> str:
    """Return the text of words without the blank lines and arrows that have a meaning in SRT."""
    text = "".join(word.before + word.text for word in words)
    text = re.sub("-+>", "→", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines)


def _one_word(text: str) -> str:
    """Return a text as a column, which has no blanks."""
    return "_".join(text.split())


def _clock(seconds: float) -> str:
    """Return a time as SRT has it: hours:minutes:seconds,milliseconds."""
    milliseconds = round(1000 * seconds)
    whole_seconds, milliseconds = divmod(milliseconds, 1000)
    minutes, second = divmod(whole_seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02d}:{minute:02d}:{second:02d},{milliseconds:03d}"


def _quote(value: Any) -> str:
    """Return the start of a value for an error message, with control characters escaped."""
    return repr(value)[:80]
