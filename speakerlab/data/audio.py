"""Audio files, read as int16 samples of the first channel; nothing else opens audio.

`read` returns a range of a file in a format of libsndfile. `stream` decodes whole recordings in
blocks, also from memory, and formats unknown to libsndfile with PyAV (extra `aac`).
Letters: S samples, C channels.
"""

import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

import numpy as np
import soundfile

FULL_SCALE = 32768  # int16 value of amplitude 1.0
# libsndfile does not rescale floating-point files when asked for integers.
INTEGER_SUBTYPES = ("PCM_", "ULAW", "ALAW", "GSM", "IMA_ADPCM", "MS_ADPCM")
# libsndfile silently shortens a file whose header claims more than there is; its log shows it.
SHORTENED = re.compile(r"^(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)
UNKNOWN_LENGTH = 0x7FFF0000  # bytes; a header says this or more where it was written into a pipe
BLOCK_SAMPLES = 1 << 18  # decoded at a time
UNKNOWN_SAMPLES = 1 << 40  # the same, as libsndfile counts them
UNKNOWN_FORMAT = 1  # libsndfile's code
RATES = range(2000, 1_000_001)  # Hz; a header that says another is wrong
MAX_PEAK = 2.0  # of floating point: above 1 is an overshoot and clipped, above this another scale
NO_SAMPLES = np.zeros(0, dtype=np.int16)
# Formats that PyAV may open. Others of FFmpeg are lists of files or addresses to read instead.
AV_FORMATS = (
    "mov,mp4,m4a,3gp,matroska,webm,aac,adts,ac3,amr,aiff,ape,asf,au,avi,caf,flac,flv,mp3,mpeg,"
    "mpegts,nistsphere,ogg,tta,w64,wav,wv"
)

Source = str | Path | bytes | BinaryIO  # a file by its path or content, or one that is open


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """Header of an audio file."""

    num_samples: int
    sample_rate: int
    num_channels: int

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sample_rate


def read_info(path: str | Path, *, sample_rate: int | None = None) -> AudioInfo:
    """Read the header of an audio file; raise ValueError or FileNotFoundError with one line.

    sample_rate: refuse files of another rate, and files without samples.
    """
    with _open(path) as file:
        info = AudioInfo(file.frames, file.samplerate, file.channels)
    if info.num_samples >= UNKNOWN_SAMPLES:
        line = f"{path}: its header has no length because it was written into a pipe"
        raise ValueError(f"{line}; write it to a file: ffmpeg -i IN.flac OUT.flac")
    if sample_rate is not None and not info.num_samples:
        raise ValueError(f"{path}: is empty (0 samples); record it again or drop it")
    if sample_rate not in (None, info.sample_rate):
        raise ValueError(
            f"{path}: must have {sample_rate} Hz, got {info.sample_rate}; convert it: "
            f"ffmpeg -i {quote(str(path))} -ar {sample_rate} OUT.wav (or set frontend.sample_rate)"
        )
    return info


def read(
    path: str | Path, start: int = 0, num_samples: int = -1, *, whole: bool = False
) -> np.ndarray:
    """Read wave_S, int16, of the first channel: `num_samples` from `start`, or all (-1).

    Only the range asked for is read. Raises ValueError where the file holds less than that or,
    with `whole`, less than its header says.
    """
    with _open(path) as file:
        if whole:
            _refuse_shortened(file, str(path))
        wanted = file.frames - start if num_samples < 0 else num_samples
        return np.concatenate([NO_SAMPLES, *_decoded(file, wanted, str(path), start=start)])


@contextmanager
def stream(source: Source) -> Iterator[tuple[int, Iterator[np.ndarray]]]:
    """Yield (sample rate, blocks of bounded size) of a recording: the same samples as `read`.

    Raises ValueError, while it decodes too, and FileNotFoundError, with one line.
    """
    where = name_of(source)
    given = _openable(source, where)
    file = None
    try:
        file = _sound_file(given)
    except (soundfile.LibsndfileError, TypeError) as error:
        if getattr(error, "code", UNKNOWN_FORMAT) != UNKNOWN_FORMAT:
            raise ValueError(_unreadable(where, error)) from error
    if file is None or file.frames >= UNKNOWN_SAMPLES:  # libsndfile cannot seek there, nor read
        with _stream_av(given, where) as stream:
            yield stream
    else:
        with file:
            _refuse_rate(file.samplerate, where)
            _refuse_shortened(file, where)
            yield file.samplerate, _decoded(file, file.frames, where)


def name_of(source: object) -> str:
    """Return the name of a recording for messages."""
    if isinstance(source, str | Path):
        return str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else f"audio ({type(source).__name__})"


def write(path: str | Path, wave_S: np.ndarray, sample_rate: int) -> None:
    """Write int16 samples as 16-bit PCM; the format follows the file's ending (.wav, .flac)."""
    soundfile.write(str(path), wave_S, sample_rate, subtype="PCM_16")


def encode(wave_S: np.ndarray, sample_rate: int, kind: str, **options: Any) -> bytes:
    """Encode int16 samples as the content of a file: FLAC, MP3, ...; options: of libsndfile."""
    file = io.BytesIO()
    try:
        soundfile.write(file, wave_S, sample_rate, format=kind, **options)  # 16-bit if it can be
    except soundfile.LibsndfileError as error:
        fix = "install the package soundfile with its own libsndfile: pip install soundfile"
        raise ValueError(f"libsndfile: cannot write {kind} ('{error}'); {fix}") from error
    return file.getvalue()


def from_flac(data: bytes | memoryview) -> np.ndarray:
    """Decode the content of a FLAC file into wave_S, int16; raise ValueError if it is not FLAC."""
    try:
        return soundfile.read(io.BytesIO(data), dtype="int16")[0]
    except soundfile.LibsndfileError as error:
        raise ValueError(_unreadable("a packed FLAC member", error)) from error


def to_int16(wave: np.ndarray) -> np.ndarray:
    """Convert amplitudes of any shape to 16-bit samples; values outside [-1, 1] are clipped."""
    return np.clip(np.rint(wave * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def require_file(path: str | Path) -> None:
    """Raise FileNotFoundError or ValueError unless a plain file, or a link to one, is there.

    Opening something else may have effects, and reading from a pipe may wait for ever.
    """
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: no such file; correct the path or restore it") from None
    except (OSError, ValueError) as error:  # links in a circle, a name too long, no permission
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: cannot be opened ({reason}); repair it or drop it") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ValueError(f"{path}: is {what}; give the path of a recording")


def _refuse_rate(sample_rate: int, where: str) -> None:
    """Refuse impossible rates: a second at 1 Hz would become four hours at 16 kHz."""
    if sample_rate not in RATES:
        line = f"{where}: must have a sample rate from {RATES[0]} to {RATES[-1]} Hz"
        raise ValueError(f"{line}, got {sample_rate}; its header is wrong: copy it again")


def _unreadable(where: str, error: object) -> str:
    if Path(where).is_file() and not os.access(where, os.R_OK):
        return f"{where}: cannot be opened (Permission denied); correct its permissions"
    reason = str(error).split(": ", 1)[-1]
    return f"{where}: is not readable audio: '{reason}'; convert it to 16-bit wav or flac"


def _refuse_shortened(file: soundfile.SoundFile, where: str) -> None:
    short = SHORTENED.search(file.extra_info)
    if short and int(short[2]) < int(short[1]) < UNKNOWN_LENGTH:
        line = f"{where}: is cut short, after {short[2]} of {short[1]} bytes"
        raise ValueError(f"{line}; copy it again")


def _openable(source: Source, where: str) -> str | BinaryIO:
    """Return what libsndfile and PyAV open: a path, or a file that can be sought in."""
    if isinstance(source, str | Path):
        require_file(source)
        given, is_empty = str(source), not Path(source).stat().st_size
    elif isinstance(source, bytes):
        given, is_empty = io.BytesIO(source), not source
    else:
        given, is_empty = source if source.seekable() else io.BytesIO(source.read()), False
    if is_empty:
        raise ValueError(f"{where}: is empty (0 bytes); copy it again or give another recording")
    return given


def _sound_file(given: str | BinaryIO) -> soundfile.SoundFile:
    name: Any = os.fsencode(given) if isinstance(given, str) else given
    return soundfile.SoundFile(name)


def _open(path: str | Path) -> soundfile.SoundFile:
    given = _openable(path, str(path))
    try:
        file = _sound_file(given)
    except (soundfile.LibsndfileError, TypeError) as error:  # TypeError: x.raw has no header
        raise ValueError(_unreadable(str(path), error)) from error
    _refuse_rate(file.samplerate, str(path))
    return file


@contextmanager
def _stream_av(given: str | BinaryIO, where: str) -> Iterator[tuple[int, Iterator[np.ndarray]]]:
    """Decode with PyAV, which opens no other files that this one refers to."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        raise ValueError(
            f"{where}: not a format that libsndfile reads; for m4a and aac, pip install av"
        ) from None
    if not isinstance(given, str):
        given.seek(0)
    options = {"format_whitelist": AV_FORMATS, "protocol_whitelist": "file"}
    to_int16 = av.AudioResampler(format="s16p")  # rate and channels stay
    try:
        with av.open(given, "r", options=options) as container:
            coded = container.decode(audio=0) if container.streams.audio else ()
            frames = chain.from_iterable(map(to_int16.resample, coded))
            first = next(frames, None)
            if first is None:
                raise ValueError(f"{where}: holds no sound; give a recording")
            _refuse_rate(first.sample_rate, where)
            blocks = (frame.to_ndarray()[0] for frame in chain([first], frames))
            yield first.sample_rate, blocks
    except FFmpegError as error:
        raise ValueError(_unreadable(where, error.strerror)) from error


def _decoded(
    file: soundfile.SoundFile, wanted: int, where: str, *, start: int = 0
) -> Iterator[np.ndarray]:
    """Yield `wanted` samples of the first channel in blocks."""
    found = 0
    try:
        if start or file.seekable():  # GSM and some ADPCM are not
            file.seek(start)
        while found < wanted:
            wave_SC = _read_int16(file, min(wanted - found, BLOCK_SAMPLES), where)
            if not len(wave_SC):
                line = f"{where}: ends early, after {found} of {wanted} samples"
                raise ValueError(f"{line}; copy it again")
            found += len(wave_SC)
            yield np.ascontiguousarray(wave_SC[:, 0])  # a view would keep the other channels
    except soundfile.LibsndfileError as error:
        line = f"{where}: cannot be decoded after sample {start + found}: '{error}'"
        raise ValueError(f"{line}; copy it again") from error


def _read_int16(file: soundfile.SoundFile, num_samples: int, where: str) -> np.ndarray:
    if file.subtype.startswith(INTEGER_SUBTYPES):
        return file.read(num_samples, dtype="int16", always_2d=True)
    wave_SC = file.read(num_samples, dtype="float32", always_2d=True)
    peak = float(np.abs(wave_SC).max(initial=0.0))
    if not peak < np.inf:  # NaN is not
        raise ValueError(
            f"{where}: must hold finite samples, got NaN or infinity; make the recording again"
        )
    if peak > MAX_PEAK:
        raise ValueError(
            f"{where}: floating-point samples must be in [-1, 1], got {peak:g}; divide them by "
            "their full scale"
        )
    return to_int16(wave_SC)
