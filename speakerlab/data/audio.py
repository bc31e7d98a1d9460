"""The only file that opens audio. In: path and range of samples. Out: int16, first channel.

Letters: S samples, C channels. Formats are libsndfile's; training reads wav and flac.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

FULL_SCALE = 32768  # int16 value of amplitude 1.0
# libsndfile does not rescale floating-point files when asked for integers.
INTEGER_SUBTYPES = ("PCM_", "ULAW", "ALAW", "GSM", "IMA_ADPCM", "MS_ADPCM")
# libsndfile silently shortens a file whose header promises more than there is; only its log tells.
SHORTENED = re.compile(r"^(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)
UNKNOWN_LENGTH = 0x7FFF0000  # bytes; a header says this or more where it was written into a pipe


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """What a file's header says."""

    num_samples: int
    sample_rate: int
    num_channels: int

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sample_rate


def read_info(path: str | Path) -> AudioInfo:
    """Header of an audio file; ValueError or FileNotFoundError with one line if there is none."""
    with _open(path) as file:
        return AudioInfo(file.frames, file.samplerate, file.channels)


def read(path: str | Path, start: int = 0, num_samples: int = -1) -> np.ndarray:
    """wave_S, int16, of the first channel: `num_samples` from `start`, or all (-1).

    Only the range asked for is read. Raises ValueError where the file holds less than that.
    """
    with _open(path) as file:
        wanted = file.frames - start if num_samples < 0 else num_samples
        try:
            file.seek(start)
            wave_SC = _read_int16(file, wanted)
        except soundfile.LibsndfileError as error:
            raise ValueError(f"{path}: cannot be decoded, got '{error}'; copy it again") from error
    if len(wave_SC) < wanted:
        raise ValueError(
            f"{path}: ends early, got {len(wave_SC)} of {wanted} samples; copy it again"
        )
    return np.ascontiguousarray(wave_SC[:, 0])


def read_cyclic(path: str | Path, start: int, num_samples: int, available: int) -> np.ndarray:
    """Like `read`, but a piece of only `available` samples is repeated until it is long enough."""
    if available >= num_samples:
        return read(path, start, num_samples)
    return np.resize(read(path, start, available), num_samples)


def decode_fault(path: str | Path, num_samples: int) -> str | None:
    """Decode the whole file in pieces; one line if it does not give `num_samples`, else None."""
    piece, found = 1 << 20, 0
    try:
        with _open(path) as file:
            short = SHORTENED.search(file.extra_info)
            if short and int(short[2]) < int(short[1]) < UNKNOWN_LENGTH:
                return f"{path}: is cut short, got {short[2]} of {short[1]} bytes; copy it again"
            while len(wave_SC := _read_int16(file, piece)):
                found += len(wave_SC)
    except soundfile.LibsndfileError as error:
        return f"{path}: cannot be decoded after {found} samples, got '{error}'; copy it again"
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    if found != num_samples:
        return f"{path}: ends early, got {found} of {num_samples} samples; copy it again"
    return None


def write(path: str | Path, wave_S: np.ndarray, sample_rate: int) -> None:
    """Write int16 samples as 16-bit PCM; the format follows the file's ending (.wav, .flac)."""
    soundfile.write(str(path), wave_S, sample_rate, subtype="PCM_16")


def _open(path: str | Path) -> soundfile.SoundFile:
    try:
        return soundfile.SoundFile(str(path))
    except soundfile.LibsndfileError as error:
        if not Path(path).exists():
            raise FileNotFoundError(
                f"{path}: no such file; correct wav.scp or restore it"
            ) from None
        reason = str(error).split(": ", 1)[-1]
        raise ValueError(
            f"{path}: is not readable audio, got '{reason}'; convert it to 16-bit wav or flac"
        ) from error


def _read_int16(file: soundfile.SoundFile, num_samples: int) -> np.ndarray:
    if file.subtype.startswith(INTEGER_SUBTYPES):
        return file.read(num_samples, dtype="int16", always_2d=True)
    wave_SC = file.read(num_samples, dtype="float32", always_2d=True)
    return np.clip(np.rint(wave_SC * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)
