"""Uploaded recordings: checked before a model reads them.

A file of kilobytes can decode to hours, so its samples are counted while it is decoded, in blocks,
and decoding ends at the limit. The length in a header is not believed. The library's own reader is
used, so that what was counted is what the model reads. Letters: S samples, C channels.
"""

import io
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fastapi import HTTPException

from examples.service.settings import Settings
from speakerlab.data.audio import stream

MAX_NAME_LENGTH = 100


class Recording(io.BytesIO):
    """Content of an uploaded file.

    name: a random one, by which messages of the library about it are found; shown_name: that of
    the upload.
    """

    def __init__(self, content: bytes, shown_name: str | None) -> None:
        super().__init__(content)
        self.name = uuid.uuid4().hex
        self.shown_name = printable(shown_name or "recording")
        self.seconds = 0.0


def printable(name: str) -> str:
    """Return a name as it can stand in a message: one line, not too long."""
    characters = [c if c.isprintable() else "?" for c in name[:MAX_NAME_LENGTH]]
    return "".join(characters)


def measure(file: BinaryIO | Path, settings: Settings, *, max_seconds: float) -> float:
    """Decode a recording and return its seconds; stop at the limit.

    Raises HTTPException 413 if it is too long, and ValueError, one line, if it cannot be used.
    """
    num_samples = 0
    with stream(file, all_channels=True) as (sample_rate, blocks):
        low, high = settings.min_sample_rate, settings.max_sample_rate
        if not low <= sample_rate <= high:
            raise ValueError(
                f"must have a sample rate from {low} to {high} Hz, got {sample_rate};"
                " convert it"
            )
        for block_SC in blocks:
            block_samples, num_channels = block_SC.shape
            if num_channels > settings.max_channels:
                raise ValueError(
                    f"must have at most {settings.max_channels} channels, got"
                    f" {num_channels}"
                )
            num_samples += block_samples
            if num_samples > max_seconds * sample_rate:
                raise HTTPException(
                    status_code=413,
                    detail=f"the recording is longer than {max_seconds:g} s",
                )
    return num_samples / sample_rate


@contextmanager
def explained(recordings: Sequence[Recording]) -> Iterator[None]:
    """Turn errors of recordings into HTTPException 422 with the names that the client knows."""
    try:
        yield
    except ValueError as error:
        text = with_shown_names(str(error), recordings)
        raise HTTPException(status_code=422, detail=text) from None


def with_shown_names(text: str, recordings: Iterable[Recording]) -> str:
    for recording in recordings:
        text = text.replace(recording.name, recording.shown_name)
    return text


class Warnings(logging.Handler):
    """The library's warnings about some recordings, such as little speech.

    They are found by the random names, because several requests are computed at once.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        super().__init__(logging.WARNING)
        self.recordings = recordings
        self.lines: list[str] = []

    def __enter__(self) -> "Warnings":
        logging.getLogger("speakerlab").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("speakerlab").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        shown = with_shown_names(line, self.recordings)
        if shown != line:
            self.lines.append(shown)
