"""Audio files, read as int16 samples of the first channel; no other module opens audio.

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
# The header of a file that was written to a pipe claims at least this many bytes.
UNKNOWN_LENGTH = 0x7FFF0000
UNKNOWN_SAMPLES = 1 << 40  # such a length in samples, as libsndfile counts them
UNKNOWN_FORMAT = 1  # libsndfile's code
BLOCK_SAMPLES = 1 << 18  # decoded at a time
RATES = range(2000, 1_000_001)  # Hz; a header with another rate is wrong
# Of floating point: a peak above 1 is an overshoot and clipped, above this it is another scale.
MAX_PEAK = 2.0
NO_SAMPLES = np.zeros(0, dtype=np.int16)
# Endings of the files that data directories list as they are; recipes convert other formats first.
ENDINGS = (".wav", ".flac")
# Formats that PyAV may open. Other formats of FFmpeg are lists of files or addresses to read.
AV_FORMATS = (
    "mov,mp4,m4a,3gp,matroska,webm,aac,adts,ac3,amr,aiff,ape,asf,au,avi,caf,flac,flv,mp3,mpeg,"
    "mpegts,nistsphere,ogg,tta,w64,wav,wv"
)

# A file by its path, its content, or an open file.
Source = str | Path | bytes | BinaryIO


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
        info = AudioInfo(
            num_samples=file.frames,
            sample_rate=file.samplerate,
            num_channels=file.channels,
        )
    if info.num_samples >= UNKNOWN_SAMPLES:
        line = f"{path}: its header has no length because it was written into a pipe"
        raise ValueError(f"{line}; write it to a file: ffmpeg -i IN.flac OUT.flac")
    if sample_rate is not None and not info.num_samples:
        raise ValueError(f"{path}: is empty (0 samples); record it again or drop it")
    if sample_rate not in (None, info.sample_rate):
        raise ValueError(
            f"{path}: must have {sample_rate} Hz, got {info.sample_rate}; convert it:"
            f" ffmpeg -i {quote(str(path))} -ar {sample_rate} OUT.wav (or set"
            " frontend.sample_rate)"
        )
    return info


def read(
    path: str | Path, start: int = 0, num_samples: int = -1, *, whole: bool = False
) -> np.ndarray:
    """Read wave_S, int16, of the first channel: `num_samples` from `start`, or all (-1).

    Only this range is read. Raises ValueError if the file holds fewer samples or, with `whole`,
    fewer than its header claims.
    """
    with _open(path) as file:
        if whole:
            _refuse_shortened(file, str(path))
        if num_samples < 0:
            num_samples = file.frames - start
        blocks = _decoded(file, num_samples, str(path), start=start)
        # NO_SAMPLES, because numpy cannot join zero arrays: a range may be empty.
        return np.concatenate([NO_SAMPLES, *blocks])


@contextmanager
def stream(source: Source) -> Iterator[tuple[int, Iterator[np.ndarray]]]:
    """Yield (sample rate, blocks of bounded size) of a recording: the same samples as `read`.

    Raises ValueError, also during decoding, and FileNotFoundError, with one line.
    """
    where = name_of(source)
    path_or_file = _openable(source, where)
    file = None
    try:
        file = _sound_file(path_or_file)
    except (soundfile.LibsndfileError, TypeError) as error:
        # PyAV decodes formats unknown to libsndfile; for the TypeError see `_open`.
        code = getattr(error, "code", UNKNOWN_FORMAT)
        if code != UNKNOWN_FORMAT:
            raise ValueError(_unreadable(where, error)) from error
    # libsndfile can neither seek nor read in a file of unknown length.
    if file is None or file.frames >= UNKNOWN_SAMPLES:
        with _stream_av(path_or_file, where) as stream:
            yield stream
    else:
        with file:
            _refuse_rate(file.samplerate, where)
            _refuse_shortened(file, where)
            blocks = _decoded(file, file.frames, where)
            yield file.samplerate, blocks


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
        raise ValueError(_unreadable("a packed FLAC member", error)) from error
    return wave_S


def to_int16(wave: np.ndarray) -> np.ndarray:
    """Convert amplitudes of any shape to 16-bit samples; values outside [-1, 1] are clipped."""
    rounded = np.rint(wave * FULL_SCALE)
    # An amplitude of 1.0 is 32768, one more than int16 holds.
    clipped = np.clip(rounded, -FULL_SCALE, FULL_SCALE - 1)
    return clipped.astype(np.int16)


def require_file(path: str | Path) -> None:
    """Raise FileNotFoundError or ValueError unless a plain file, or a link to one, is there.

    Opening something else may have effects, and reading from a pipe may wait for ever.
    """
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{path}: no such file; correct the path or restore it"
        ) from None
    except (OSError, ValueError) as error:
        # Links in a circle, a name that is too long, or no permission.
        reason: object = error
        if isinstance(error, OSError):
            reason = error.strerror
        raise ValueError(
            f"{path}: cannot be opened ({reason}); repair it or drop it"
        ) from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ValueError(f"{path}: is {kind}; give the path of a recording")


def _refuse_rate(sample_rate: int, where: str) -> None:
    """Refuse impossible rates: a second at 1 Hz would become four hours at 16 kHz."""
    if sample_rate not in RATES:
        line = f"{where}: must have a sample rate from {RATES[0]} to {RATES[-1]} Hz"
        raise ValueError(
            f"{line}, got {sample_rate}; its header is wrong: copy it again"
        )


def _unreadable(where: str, error: object) -> str:
    # libsndfile reports a missing permission as a "System error".
    is_file = Path(where).is_file()
    if is_file and not os.access(where, os.R_OK):
        return f"{where}: cannot be opened (Permission denied); correct its permissions"
    # soundfile begins its messages with "Error opening <file>: ".
    reason = str(error).split(": ", 1)[-1]
    return (
        f"{where}: is not readable audio: '{reason}'; convert it to 16-bit wav or flac"
    )


def _refuse_shortened(file: soundfile.SoundFile, where: str) -> None:
    """Refuse a file that ends before the length in its header."""
    match = SHORTENED.search(file.extra_info)
    if match is None:
        return
    header_bytes = int(match[1])
    present_bytes = int(match[2])
    if present_bytes < header_bytes < UNKNOWN_LENGTH:
        line = f"{where}: is cut short, after {match[2]} of {match[1]} bytes"
        raise ValueError(f"{line}; copy it again")


def _openable(source: Source, where: str) -> str | BinaryIO:
    """Return a source that libsndfile and PyAV can open: a path or a seekable file."""
    if isinstance(source, str | Path):
        require_file(source)
        path_or_file = str(source)
        num_bytes = Path(source).stat().st_size
        is_empty = num_bytes == 0
    elif isinstance(source, bytes):
        path_or_file = io.BytesIO(source)
        is_empty = not source
    elif source.seekable():
        path_or_file = source
        is_empty = False
    else:
        # A pipe or a socket: libsndfile and PyAV need to seek back in it.
        path_or_file = io.BytesIO(source.read())
        is_empty = False
    if is_empty:
        raise ValueError(
            f"{where}: is empty (0 bytes); copy it again or give another recording"
        )
    return path_or_file


def _sound_file(path_or_file: str | BinaryIO) -> soundfile.SoundFile:
    file: Any = path_or_file
    if isinstance(path_or_file, str):
        # As bytes, because a path may not be valid UTF-8.
        file = os.fsencode(path_or_file)
    return soundfile.SoundFile(file)


def _open(path: str | Path) -> soundfile.SoundFile:
    path_or_file = _openable(path, str(path))
    try:
        file = _sound_file(path_or_file)
    except (soundfile.LibsndfileError, TypeError) as error:
        # TypeError: soundfile needs a sample rate for x.raw, which has no header.
        line = _unreadable(str(path), error)
        raise ValueError(line) from error
    _refuse_rate(file.samplerate, str(path))
    return file


@contextmanager
def _stream_av(
    path_or_file: str | BinaryIO, where: str
) -> Iterator[tuple[int, Iterator[np.ndarray]]]:
    """Decode with PyAV, which opens no other files that this one refers to."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        raise ValueError(
            f"{where}: not a format that libsndfile reads; for m4a and aac, pip"
            " install av"
        ) from None
    if not isinstance(path_or_file, str):
        path_or_file.seek(0)  # libsndfile has read its header
    options = {"format_whitelist": AV_FORMATS, "protocol_whitelist": "file"}
    to_int16 = av.AudioResampler(format="s16p")  # rate and channels stay
    try:
        with av.open(path_or_file, "r", options=options) as container:
            coded_frames = ()
            if container.streams.audio:
                coded_frames = container.decode(audio=0)
            # Convert any format to 16-bit samples in planes: one row for each channel.
            frames_of_each = map(to_int16.resample, coded_frames)
            frames = chain.from_iterable(frames_of_each)
            # Decode the first frame now: it has the rate, and proves that there is audio.
            first = next(frames, None)
            if first is None:
                raise ValueError(f"{where}: holds no sound; give a recording")
            _refuse_rate(first.sample_rate, where)
            all_frames = chain([first], frames)
            blocks = (frame.to_ndarray()[0] for frame in all_frames)
            yield first.sample_rate, blocks
    except FFmpegError as error:
        raise ValueError(_unreadable(where, error.strerror)) from error


def _decoded(
    file: soundfile.SoundFile, num_samples: int, where: str, *, start: int = 0
) -> Iterator[np.ndarray]:
    """Yield `num_samples` samples of the first channel, from `start`, in blocks."""
    num_decoded = 0
    try:
        if start or file.seekable():  # GSM and some ADPCM are not
            file.seek(start)
        while num_decoded < num_samples:
            block_samples = min(num_samples - num_decoded, BLOCK_SAMPLES)
            wave_SC = _read_int16(file, block_samples, where)
            if not len(wave_SC):
                progress = f"after {num_decoded} of {num_samples} samples"
                raise ValueError(f"{where}: ends early, {progress}; copy it again")
            num_decoded += len(wave_SC)
            # A copy: a view would keep the other channels in memory.
            yield np.ascontiguousarray(wave_SC[:, 0])
    except soundfile.LibsndfileError as error:
        sample = start + num_decoded
        line = f"{where}: cannot be decoded after sample {sample}: '{error}'"
        raise ValueError(f"{line}; copy it again") from error


def _read_int16(file: soundfile.SoundFile, num_samples: int, where: str) -> np.ndarray:
    if file.subtype.startswith(INTEGER_SUBTYPES):
        return file.read(num_samples, dtype="int16", always_2d=True)
    wave_SC = file.read(num_samples, dtype="float32", always_2d=True)
    magnitude_SC = np.abs(wave_SC)
    peak = float(magnitude_SC.max(initial=0.0))
    if not peak < np.inf:  # NaN is not
        raise ValueError(
            f"{where}: must hold finite samples, got NaN or infinity; make the"
            " recording again"
        )
    if peak > MAX_PEAK:
        raise ValueError(
            f"{where}: floating-point samples must be in [-1, 1], got {peak:g}; divide"
            " them by their full scale"
        )
    return to_int16(wave_SC)
