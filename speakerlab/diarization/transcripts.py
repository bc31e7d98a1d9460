"""Transcripts of files: whisper's JSON, SRT subtitles and CTM. Out: words with times.

- JSON of openai-whisper, faster-whisper and whisperX: `segments`, each with `start`, `end`, `text`
  and, with word timestamps, `words`, each with `start`, `end` and `word`;
- SRT: cues `number`, `00:00:01,000 --> 00:00:02,500`, text, and a blank line;
- CTM: `recording channel start duration word [confidence [type [speaker]]]`, a line per word (NIST,
  RT-09 evaluation plan, appendix B); lines that start with ;; are skipped.
"""

import json
import math
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from speakerlab.core.faults import Faults
from speakerlab.core.reading import open_text, read_text
from speakerlab.diarization.regions import MAX_SECONDS, SURROGATE, parse_seconds
from speakerlab.diarization.timed_words import (
    Entry,
    Transcript,
    Word,
    entries_of,
    segments_of,
)

# Endings of the files, the most precise first.
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
    for place, entry, cue in entries_of(document):
        is_word = "words" in place
        try:
            start, end = _times_of(entry)
        except ValueError as error:
            faults.add("refused times", f"{where}: {place}: {error}")
            continue
        # Some tools write the text of a word as that of a segment.
        key = "text"
        if is_word and "word" in entry:
            key = "word"
        text = SURROGATE.sub("\ufffd", entry[key])
        has_blank = is_word and text[:1].isspace()
        word = Word(
            start,
            end,
            text.strip(),
            cue=cue,
            before=" " if has_blank else "",
            is_cue=not is_word,
        )
        words.append(word)
    segments = segments_of(document)
    segment_times = _find_segment_times(words, segments, faults, where)
    faults.raise_if_any()
    return Transcript(
        words=_with_blanks(words, segments),
        document=document,
        segment_times=segment_times,
    )


def _check_structure(document: Any, where: Path | str) -> None:
    """Raise ValueError unless a document has the segments and words of whisper's JSON."""
    segments = document
    if isinstance(document, dict):
        segments = document.get("segments")
        for key, problem in OTHER_TOOLS.items():
            # A transcript may have such a key beside its segments; a diarization has segments, too.
            is_of_other_tool = "segments" not in document or key == "model_sha256"
            if key in document and is_of_other_tool:
                raise ValueError(f"{where}: {problem}")
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
    all_cues = {word.cue for word in words}
    timed_cues = {word.cue for word in words if word.has_times}
    for cue in sorted(all_cues - timed_cues):
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
    spaced_words: list[Word] = []
    for cue, group in groupby(words, key=lambda word: word.cue):
        words_of_cue = list(group)
        has_blanks = any(word.before for word in words_of_cue)
        joined_text = "".join(word.text for word in words_of_cue)
        text_of_segment = str(segments[cue].get("text", "")).strip()
        if not has_blanks and joined_text != text_of_segment:
            words_of_cue = [word._replace(before=" ") for word in words_of_cue]
        spaced_words += words_of_cue
    return spaced_words


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
    text = read_text(path)
    if text.lstrip().startswith("WEBVTT"):
        raise ValueError(f"{path}: is WebVTT; convert it to SRT")

    faults = Faults()
    times_of_cues: list[tuple[float, float]] = []
    lines_of_cues: list[list[str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            times = _parse_srt_times(line)
        except ValueError as error:
            faults.add("refused lines", f"{path}:{number}: {error}")
            continue
        stripped_line = line.strip()
        if times is not None:
            # The number above the times is no text of the cue before.
            lines_before = lines_of_cues[-1] if lines_of_cues else []
            if lines_before and lines_before[-1].isdecimal():
                lines_before.pop()
            times_of_cues.append(times)
            lines_of_cues.append([])
        elif lines_of_cues:
            lines_of_cues[-1].append(stripped_line)
        elif stripped_line and not stripped_line.isdecimal():
            faults.add(
                "refused lines",
                f"{path}:{number}: text before the times of a cue, got {_quote(line)};"
                " give SRT",
            )
    faults.raise_if_any()

    cues: list[Word] = []
    for (start, end), lines in zip(times_of_cues, lines_of_cues):
        # A cue may have blank lines.
        cue_text = "\n".join(line for line in lines if line)
        cues.append(Word(start, end, cue_text, cue=len(cues), is_cue=True))
    return Transcript(cues)


def _parse_srt_times(line: str) -> tuple[float, float] | None:
    """Return start and end of a line with the times of a cue; None for other lines."""
    match = TIME_LINE.fullmatch(line)
    if match is None:
        if LIKE_TIME_LINE.fullmatch(line):
            raise ValueError(
                f"is not `00:00:01,000 --> 00:00:02,500`, got {_quote(line)}; correct it"
            )
        return None
    parts = match.groups()
    start = _seconds_of(parts[:4])
    end = _seconds_of(parts[4:8])
    _check_order(start, end)
    return start, end


def _seconds_of(parts: Sequence[str]) -> float:
    """Return the seconds of hours, minutes, seconds and a fraction."""
    hours, minutes, seconds, fraction = parts
    # `,5` is 500 ms.
    milliseconds = int(fraction.ljust(3, "0"))
    # Ten digits of hours are too many in any case, and `int` refuses thousands.
    whole_seconds = math.inf
    if len(hours) < 10:
        whole_seconds = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
    if whole_seconds >= MAX_SECONDS:
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
    start = parse_seconds(start_text, "start")
    duration = parse_seconds(duration_text, "duration")
    # Round, so that words that touch in decimal numbers also touch in floating point.
    end = round(start + duration, 9)
    return recording, channel, Word(start, end, text)


def _cut_cues(words: Sequence[Word]) -> list[Word]:
    """Return words with their cue: cues end at pauses, and before they are too long."""
    words_of_cues: list[Word] = []
    cue = 0
    cue_characters = 0
    last_end = 0.0
    for word in words:
        start = word.start or 0.0
        # A word and the blank before it.
        word_characters = 1 + len(word.text)
        # Words need not be in order of time: a jump back is a pause, too.
        is_pause = abs(start - last_end) >= CUE_PAUSE_SECONDS
        is_too_long = cue_characters + word_characters > CUE_CHARACTERS
        if words_of_cues and (is_pause or is_too_long):
            cue += 1
            cue_characters = 0
        cue_characters += word_characters
        words_of_cues.append(word._replace(cue=cue))
        last_end = word.end or 0.0
    return words_of_cues


def _quote(value: Any) -> str:
    """Return the start of a value for an error message, with control characters escaped."""
    return repr(value)[:80]
