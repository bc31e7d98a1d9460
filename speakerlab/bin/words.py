"""Add speakers to the words of transcripts (whisper's JSON, SRT, CTM), from turns in RTTM."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from speakerlab.bin.command import parser
from speakerlab.core.atomic import check_writable, write_text
from speakerlab.core.counting import count_of
from speakerlab.data.listing import shorten
from speakerlab.diarization.regions import SURROGATE, Turn, read_rttm
from speakerlab.diarization.timed_words import Transcript
from speakerlab.diarization.transcripts import read_transcripts
from speakerlab.diarization.words import MAX_GAP_SECONDS, assign_words

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    options = parser("words", __doc__, builds_components=False)
    options.add("files FILE", "transcripts, or folders of them", nargs="+")
    options.add(
        "--turns FILE",
        "RTTM file, or a folder of them, such as --out of `speakerlab diarize`",
        required=True,
    )
    options.add("--out DIR", "folder of NAME.words.srt, .ctm and .json", required=True)
    gap = "seconds from a word in a pause to the nearest turn, at most"
    options.add("--max-gap SECONDS", gap, least=0.0, default=MAX_GAP_SECONDS)
    args = options.parse_args(arguments)
    turns = read_rttm(args.turns)
    transcripts: dict[str, Transcript] = {}
    for file in args.files:
        for name, transcript in read_transcripts(file).items():
            if name in transcripts:
                raise ValueError(f"{file}: {name} is given twice; give it once")
            transcripts[name] = transcript
    for name, transcript in pair(transcripts, turns, where=args.turns).items():
        write_words(args.out, name, transcript, turns[name], max_gap=args.max_gap)


def pair(
    transcripts: Mapping[str, Transcript],
    recordings: Mapping[str, Any],
    *,
    where: Path,
) -> dict[str, Transcript]:
    """Return recording -> its transcript: by name, or the only one of the only recording.

    Warns of recordings and transcripts without the other; ValueError if no name is in both.
    """
    if len(transcripts) == len(recordings) == 1:
        return dict(zip(recordings, transcripts.values()))
    # Names of recordings are one word.
    by_name = {"_".join(name.split()): name for name in transcripts}
    common = [name for name in recordings if name in by_name]
    if not common:
        raise ValueError(
            f"{where}: no transcript has the name of a recording, such as"
            f" {next(iter(transcripts), 'none')} and {next(iter(recordings), 'none')};"
            " rename the transcripts"
        )
    warn_without(where, recordings.keys() - by_name.keys(), "recording", "transcript")
    warn_without(where, by_name.keys() - recordings.keys(), "transcript", "recording")
    return {name: transcripts[by_name[name]] for name in common}


def warn_without(where: Path, names: AbstractSet[str], noun: str, partner: str) -> None:
    """Warn of recordings without a transcript, or of transcripts without a recording."""
    if names:
        number = count_of(len(names), noun)
        log.warning("%s: %s without a %s, as %s", where, number, partner, min(names))


def write_words(
    out: Path,
    name: str,
    transcript: Transcript,
    turns: Iterable[Turn],
    *,
    max_gap: float = MAX_GAP_SECONDS,
) -> None:
    """Write a transcript with speakers, in each format that it has the content for."""
    spoken = assign_words(transcript, turns, max_gap=max_gap)
    stem = f"{shorten(name)}.words"
    check_writable(out / f"{stem}.srt")
    write_text(out / f"{stem}.srt", spoken.to_srt())
    if spoken.has_word_times:
        write_text(out / f"{stem}.ctm", spoken.to_ctm(name))
    if spoken.document is not None:
        text = json.dumps(spoken.to_json(), indent=1, ensure_ascii=False)
        # Halves of characters are no UTF-8; their escapes are what was read.
        if SURROGATE.search(text):
            text = json.dumps(spoken.to_json(), indent=1)
        write_text(out / f"{stem}.json", text + "\n")

    warn_of_words_without_times(name, spoken)
    num_unknown = sum(word.speaker is None for word in spoken)
    noun = "word" if spoken.has_word_times else "cue"
    log.info(
        "%s: %s, %d without a speaker", name, count_of(len(spoken), noun), num_unknown
    )
    if num_unknown > len(spoken) / 2:
        log.warning(
            "%s: most of the transcript is outside of all turns; check that it is of"
            " this recording, with times in seconds",
            name,
        )


def warn_of_words_without_times(name: str, transcript: Transcript) -> None:
    """Warn of words that SRT or CTM leave out, because their times are unknown."""
    if transcript.num_not_in_srt:
        log.warning(
            "%s: %s left out of the SRT: neither they nor their segments have times",
            name,
            count_of(transcript.num_not_in_srt, "word"),
        )
    if transcript.has_word_times and transcript.num_not_in_ctm:
        log.warning(
            "%s: %s (words or segments) left out of the CTM: no times of words",
            name,
            count_of(transcript.num_not_in_ctm, "entry"),
        )
    if not transcript.has_word_times and transcript.document is not None:
        log.warning(
            "%s: no CTM is written: the transcript has no times of words; transcribe with"
            " word timestamps",
            name,
        )
