"""Uploaded recordings: checked before a model reads them.

A file of kilobytes can decode to hours, so its samples are counted while it is decoded, in blocks,
and decoding ends at the limit. The length in a header is not believed. The library's own reader is
used, so that what was counted is what the model reads. Letters: S samples, C channels.
"""

import io
import logging
import uuid
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fastapi import HTTPException

from examples.service.settings import Settings
from speakerlab.data.audio import stream

MAX_NAME_LENGTH = 100
# Programs that write into a pipe state 2 or 4 GB, because they do not know the length.
PLACEHOLDER_BYTES = 2_000_000_000
MAX_MISSING_SECONDS = 0.1  # without a doubt


@dataclass(frozen=True)
class Alias:
    """Name by which the library knows something, and the one that the client knows."""

    name: str
    shown_name: str
    doubts: list[str] = field(default_factory=list)


class Recording(io.BytesIO):
    """Content of an uploaded file.

    name: a random one, by which messages of the library about it are found; shown_name: that of
    the upload; doubts: a line each.
    """

    def __init__(self, content: bytes, shown_name: str | None) -> None:
        super().__init__(content)
        self.name = uuid.uuid4().hex
        self.shown_name = printable(shown_name or "recording")
        self.seconds = 0.0
        self.doubts: list[str] = []


def printable(name: str) -> str:
    """Return a name as it can stand in a message: one line, not too long."""
    characters = [c if c.isprintable() else "?" for c in name[:MAX_NAME_LENGTH]]
    return "".join(characters)


def measure(
    file: BinaryIO | Path,
    settings: Settings,
    *,
    shown_name: str,
    max_seconds: float,
) -> float:
    """Decode a recording and return its seconds; stop at the limit.

    Raises HTTPException 413 if it is too long, and ValueError, one line, if it cannot be used.
    """
    num_samples = 0
    with stream(file, all_channels=True) as (sample_rate, blocks):
        low, high = settings.min_sample_rate, settings.max_sample_rate
        if not low <= sample_rate <= high:
            raise ValueError(
                f"{shown_name}: must have a sample rate from {low} to {high} Hz, got"
                f" {sample_rate}; convert it"
            )
        for block_SC in blocks:
            block_samples, num_channels = block_SC.shape
            if num_channels > settings.max_channels:
                raise ValueError(
                    f"{shown_name}: must have at most {settings.max_channels} channels,"
                    f" got {num_channels}"
                )
            num_samples += block_samples
            if num_samples > max_seconds * sample_rate:
                raise HTTPException(
                    status_code=413,
                    detail=f"{shown_name}: is longer than {max_seconds:g} s",
                )
    return num_samples / sample_rate


def find_missing_end(file: BinaryIO, seconds: float, shown_name: str) -> list[str]:
    """Return a doubt if the header of a wav file states more than the seconds that it has."""
    file.seek(0)
    try:
        with wave.open(file) as wav:
            header = wav.getparams()
    # Another format, whose reader has found a missing end.
    except (wave.Error, EOFError):
        return []
    finally:
        file.seek(0)
    stated_bytes = header.nframes * header.nchannels * header.sampwidth
    stated_seconds = header.nframes / header.framerate
    is_placeholder = stated_bytes >= PLACEHOLDER_BYTES
    if is_placeholder or stated_seconds <= seconds + MAX_MISSING_SECONDS:
        return []
    return [
        f"{shown_name}: has {seconds:.1f} s, but its header states {stated_seconds:.1f}"
        " s; the rest may be missing"
    ]


@contextmanager
def explained(recordings: Sequence[Recording | Alias]) -> Iterator[None]:
    """Turn errors of recordings into HTTPException 422 with the names that the client knows."""
    try:
        yield
    except ValueError as error:
        text = with_shown_names(str(error), recordings)
        raise HTTPException(status_code=422, detail=text) from None


def with_shown_names(text: str, named: Sequence[Recording | Alias]) -> str:
    for something in named:
        text = text.replace(something.name, something.shown_name)
    return text


class Warnings(logging.Handler):
    """Doubts about recordings, and the library's warnings about them, such as little speech.

    They are found by the names, because several requests are computed at once.
    """

    def __init__(self, named: Sequence[Recording | Alias]) -> None:
        super().__init__(logging.WARNING)
        self.named = named
        self.lines: list[str] = []
        for something in named:
            self.lines += something.doubts

    def __enter__(self) -> "Warnings":
        logging.getLogger("speakerlab").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("speakerlab").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        shown = with_shown_names(line, self.named)
        if shown == line:
            return
        # For `logs.Unanswered`: the client gets it, and the log has no names.
        record.is_answered = True
        # A recording that is read twice has the same doubts again.
        if shown not in self.lines:
            self.lines.append(shown)
