"""Audio files, read as int16 samples; no other module opens audio.

`read` returns a range of a file, `stream` decodes whole recordings in blocks, also from memory.
Both give the same samples, and `read_info` counts as many.
Letters: S samples, C channels.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import soundfile

from speakerlab.data import levels
from speakerlab.data.decoders import BLOCK_SAMPLES as BLOCK_SAMPLES
from speakerlab.data.decoders import FULL_SCALE as FULL_SCALE
from speakerlab.data.decoders import MAX_PEAK as MAX_PEAK
from speakerlab.data.decoders import Decoder, open_decoder
from speakerlab.data.decoders import to_int16 as to_int16
from speakerlab.data.sources import Source, name_of, open_source
from speakerlab.data.sources import require_file as require_file

RATES = range(2000, 1_000_001)  # Hz; a header with another rate is wrong
NO_SAMPLES = np.zeros(0, dtype=np.int16)
# Of longer recordings, the levels of this part are measured: 20 MB.
MAX_MEASURED_SAMPLES = 10_000_000
# Endings of recordings, in lower case. Ranges of wav and flac files are read fast, so data
# directories list these as they are; recipes convert others first.
ENDINGS = (".wav", ".flac")
CODED_ENDINGS = (
    ".wave",
    ".bwf",
    ".rf64",
    ".w64",
    ".aif",
    ".aiff",
    ".aifc",
    ".au",
    ".snd",
    ".caf",
    ".sph",
    ".nist",
    ".wv1",
    ".wv2",
    ".voc",
    ".gsm",
    ".vox",
    ".amr",
    ".awb",
    ".mp3",
    ".mp2",
    ".mpga",
    ".ogg",
    ".oga",
    ".opus",
    ".spx",
    ".m4a",
    ".m4b",
    ".aac",
    ".mp4",
    ".mov",
    ".3gp",
    ".3gpp",
    ".webm",
    ".weba",
    ".mka",
    ".mkv",
    ".avi",
    ".flv",
    ".wma",
    ".ac3",
    ".eac3",
    ".ec3",
    ".loas",
    ".latm",
    ".wv",
    ".ape",
    ".tta",
)
ALL_ENDINGS = (*ENDINGS, *CODED_ENDINGS)


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """Length and format of a recording."""

    num_samples: int
    sample_rate: int
    num_channels: int
    # Whether a range is read without decoding the samples before it.
    has_index: bool = True
    # Why the first channel may be no speech, one of `levels.KINDS`; None also without decoding.
    level_fault: str | None = None

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sample_rate


def read_info(
    path: str | Path, *, sample_rate: int | None = None, decode: bool = False
) -> AudioInfo:
    """Return length and format of an audio file from its header, after looking at its end.

    Where the header has no exact length, and with `decode`, the whole file is decoded.
    sample_rate: refuse files of another rate, and files without samples.
    Raises ValueError or FileNotFoundError with one line, also for a file that was cut.
    """
    with _opened(path) as decoder:
        if sample_rate not in (None, decoder.sample_rate):
            raise ValueError(
                f"{path}: must have {sample_rate} Hz, got {decoder.sample_rate}; convert"
                f" it: ffmpeg -i {quote(str(path))} -ar {sample_rate} OUT.wav (or set"
                " frontend.sample_rate)"
            )
        num_samples = decoder.stated_samples
        level_fault = None
        if decode:
            num_samples, level_fault = _listen(decoder)
        elif num_samples is None:
            num_samples = sum(len(block_SC) for block_SC in decoder.blocks())
        info = AudioInfo(
            num_samples=num_samples,
            sample_rate=decoder.sample_rate,
            num_channels=decoder.num_channels,
            has_index=decoder.can_seek(num_samples),
            level_fault=level_fault,
        )
    if sample_rate is not None and not info.num_samples:
        raise ValueError(f"{path}: is empty (0 samples); record it again or drop it")
    return info


def read(
    path: str | Path, start: int = 0, num_samples: int = -1, *, whole: bool = False
) -> np.ndarray:
    """Read wave_S, int16, of the first channel: `num_samples` from `start`, or all (-1).

    Only this range is read, if the format allows it. Raises ValueError if the file holds fewer
    samples or, with `whole`, was cut behind the range.
    """
    is_range = num_samples >= 0
    checks_end = whole or not is_range
    with _opened(path, checks_end=checks_end) as decoder:
        if is_range and decoder.can_seek(start + num_samples):
            blocks_SC = decoder.blocks(start, num_samples)
        elif checks_end or decoder.stated_samples is None:
            blocks_SC = _crop(decoder.blocks(), start, num_samples, where=str(path))
        else:
            # The header states fewer samples: look whether there are more.
            return read(path, start, num_samples, whole=True)
        blocks = _first_channels(blocks_SC)
        # NO_SAMPLES, because numpy cannot join zero arrays: a range may be empty.
        return np.concatenate([NO_SAMPLES, *blocks])


@contextmanager
def stream(
    source: Source, *, all_channels: bool = False
) -> Iterator[tuple[int, Iterator[np.ndarray]]]:
    """Yield (sample rate, blocks of bounded size) of a recording: the same samples as `read`.

    Blocks are wave_S of the first channel, or wave_SC with `all_channels`.
    Raises ValueError, also during decoding, and FileNotFoundError, with one line.
    """
    with _opened(source) as decoder:
        blocks_SC = decoder.blocks()
        yield (
            decoder.sample_rate,
            blocks_SC if all_channels else _first_channels(blocks_SC),
        )


def write(path: str | Path, wave_S: np.ndarray, sample_rate: int) -> None:
    """Write int16 samples as 16-bit PCM; the format follows the file's ending (.wav, .flac)."""
    soundfile.write(str(path), wave_S, sample_rate, subtype="PCM_16")


def encode(wave_S: np.ndarray, sample_rate: int, kind: str, **options: Any) -> bytes:
    """Encode int16 samples as the content of a file: FLAC, MP3, ...; options: of libsndfile."""
    file = io.BytesIO()
    try:
        # The default subtype: 16-bit where the format has it.
        soundfile.write(
            file,
            wave_S,
            sample_rate,
            format=kind,
            **options,
        )
    except soundfile.LibsndfileError as error:
        fix = (
            "install the package soundfile with its own libsndfile: pip install"
            " soundfile"
        )
        raise ValueError(
            f"libsndfile: cannot write {kind} ('{error}'); {fix}"
        ) from error
    return file.getvalue()


def from_flac(data: bytes | memoryview) -> np.ndarray:
    """Decode the content of a FLAC file into wave_S, int16; raise ValueError if it is not FLAC."""
    file = io.BytesIO(data)
    try:
        wave_S, _ = soundfile.read(file, dtype="int16")
    except soundfile.LibsndfileError as error:
        raise ValueError(
            f"a packed FLAC member: is not readable audio: '{error}'; pack it again"
        ) from error
    return wave_S


@contextmanager
def _opened(source: Source, *, checks_end: bool = True) -> Iterator[Decoder]:
    where = name_of(source)
    with (
        open_source(source) as file,
        open_decoder(file, where, checks_end=checks_end) as decoder,
    ):
        # A second at 1 Hz would become four hours at 16 kHz.
        if decoder.sample_rate not in RATES:
            line = f"{where}: must have a sample rate from {RATES[0]} to {RATES[-1]} Hz"
            raise ValueError(
                f"{line}, got {decoder.sample_rate}; its header is wrong: copy it again"
            )
        yield decoder


def _listen(decoder: Decoder) -> tuple[int, str | None]:
    """Decode a recording; return its number of samples, and the fault of its levels if any."""
    num_samples = 0
    measured = [NO_SAMPLES]
    for block_SC in decoder.blocks():
        if num_samples < MAX_MEASURED_SAMPLES:
            # A copy, without the other channels.
            measured.append(np.ascontiguousarray(block_SC[:, 0]))
        num_samples += len(block_SC)
    wave_S = np.concatenate(measured)
    return num_samples, levels.find_kind(wave_S, sample_rate=decoder.sample_rate)


def _crop(
    blocks_SC: Iterator[np.ndarray], start: int, num_samples: int, *, where: str
) -> Iterator[np.ndarray]:
    """Yield the parts of blocks that are in a range; raise ValueError if it is not complete."""
    num_before = 0
    num_read = 0
    for block_SC in blocks_SC:
        first = max(start - num_before, 0)
        end = len(block_SC)
        if num_samples >= 0:
            end = min(end, first + num_samples - num_read)
        num_before += len(block_SC)
        part_SC = block_SC[first:end]
        num_read += len(part_SC)
        if len(part_SC):
            yield part_SC
        if 0 <= num_samples <= num_read:
            return
    if num_read < num_samples:
        progress = f"after {num_read} of {num_samples} samples"
        raise ValueError(f"{where}: ends early, {progress}; copy it again")


def _first_channels(blocks_SC: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Return wave_S of the first channel of each block wave_SC."""
    # A copy: a view would keep the other channels in memory.
    return (np.ascontiguousarray(block_SC[:, 0]) for block_SC in blocks_SC)
