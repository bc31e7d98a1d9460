"""Input audio of a model. In: a file, its content, an array. Out: wave_S at the model's rate.

Only the first channel is used, as in training. Letters: S samples, C channels.
A file is read as int16 like the recordings of a data directory, so that both give equal samples.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from speakerlab.data import audio

MAX_CHANNELS = 32  # more in the shorter direction of an array is a batch
# dtype -> (value of silence, value of amplitude 1.0)
INTEGERS = {
    np.dtype(np.uint8): (128, 128.0),
    np.dtype(np.int16): (0, 32768.0),
    np.dtype(np.int32): (0, 2147483648.0),
}


def read_wave(
    source: Any, *, sample_rate: int, source_rate: int | None = None
) -> np.ndarray:
    """Read wave_S, float32 in [-1, 1], at `sample_rate`.

    source: a path, the content of a file (bytes), an open binary file, or an array or tensor of
    floating point, int16, int32 or uint8 with shape (S,), (S, C) or (C, S); the shorter axis holds
    the channels. `source_rate` is the rate of an array; None: it has `sample_rate`.
    Raises ValueError with one line for audio that is broken, empty or constant.
    """
    where = audio.name_of(source)
    # numpy cannot join zero arrays, and a recording may have no block.
    no_samples = np.zeros(0, dtype=np.float32)
    with _stream_wave(source, sample_rate, source_rate) as blocks:
        wave_S = np.concatenate([no_samples, *blocks])
    if not len(wave_S):
        raise ValueError(_no_audio(where))
    if wave_S.min() == wave_S.max():
        raise ValueError(
            f"{where}: is silent, got {wave_S[0]:g} in every sample; give a recording"
            " of a voice"
        )
    return wave_S


def spool_wave(
    source: Any, *, sample_rate: int, source_rate: int | None = None
) -> np.ndarray:
    """Read wave_S, int16, at `sample_rate`, into a temporary file that ends with the array.

    Like `read_wave`, but hours of audio need little memory, and silence is not refused.
    """
    with (
        tempfile.TemporaryFile() as file,
        _stream_wave(source, sample_rate, source_rate) as blocks,
    ):
        for wave_S in blocks:
            int16_S = audio.to_int16(wave_S)
            file.write(int16_S.tobytes())
        file.flush()
        if not file.tell():
            raise ValueError(_no_audio(audio.name_of(source)))
        # The file has no name: the kernel removes it when the array is gone.
        return np.memmap(file, dtype=np.int16, mode="r")


def _no_audio(where: str) -> str:
    return f"{where}: holds no audio (0 samples); give a recording"


@contextmanager
def _stream_wave(
    source: Any, sample_rate: int, source_rate: int | None
) -> Iterator[Iterator[np.ndarray]]:
    """Decode and resample a recording in blocks, float32 in [-1, 1]."""
    where = audio.name_of(source)
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    is_open_file = hasattr(source, "read")
    if is_open_file or isinstance(source, str | Path | bytes):
        opened = audio.stream(source)
    else:
        rate = sample_rate if source_rate is None else source_rate
        array_blocks = _array_blocks(source, rate, where)
        opened = nullcontext((rate, array_blocks))
    with opened as (rate, blocks):
        if source_rate not in (None, rate):
            line = f"{where}: the file says {rate} Hz, got sample_rate={source_rate}"
            raise ValueError(f"{line}; leave it out for files")
        waves = (_amplitudes(block_S, where) for block_S in blocks)
        yield _resampled(waves, rate, sample_rate)


def _array_blocks(source: Any, rate: int, where: str) -> Iterator[np.ndarray]:
    is_whole = isinstance(rate, int | np.integer)
    if not is_whole or rate < 1:
        raise ValueError(
            f"{where}: sample_rate must be a whole number above 0, got {rate!r};"
            " correct it"
        )
    raw_S = _first_channel(source, where)
    # Errors of an array are raised here, before the first block is read.
    block_samples = audio.BLOCK_SAMPLES
    starts = range(0, len(raw_S), block_samples)
    return (raw_S[start : start + block_samples] for start in starts)


def _first_channel(source: Any, where: str) -> np.ndarray:
    """Return raw_S, if possible as a view, of a numpy array or torch tensor."""
    # A tensor, recognised without importing torch.
    if hasattr(source, "detach"):
        source = source.detach().cpu()
        # numpy has no bfloat16; float32 holds all its values, and waves are float32 in the end.
        if source.is_floating_point():
            source = source.float()
        source = source.numpy()
    if not isinstance(source, np.ndarray):
        raise ValueError(
            f"{where}: is no audio, got {type(source).__name__}; give a path, bytes, an"
            " open file, a numpy array or a tensor"
        )
    is_floating = np.issubdtype(source.dtype, np.floating)
    if source.dtype not in INTEGERS and not is_floating:
        raise ValueError(
            f"{where}: must be floating point, int16, int32 or uint8, got"
            f" {source.dtype}; cast it"
        )
    if not source.size:
        return source.reshape(-1)
    # The shorter direction is the channels, because a recording has more samples than channels.
    if source.ndim == 2 and min(source.shape) <= MAX_CHANNELS:
        num_rows, num_columns = source.shape
        if num_rows <= num_columns:
            return source[0]
        return source[:, 0]
    if source.ndim != 1:
        raise ValueError(
            f"{where}: must have shape (samples,), (samples, channels) or (channels,"
            f" samples), got {source.shape}; give recordings one by one"
        )
    return source


def _amplitudes(block_S: np.ndarray, where: str) -> np.ndarray:
    """Return samples as float32 in [-1, 1]; refuse values not finite or of another scale."""
    if block_S.dtype in INTEGERS:
        silence, full_scale = INTEGERS[block_S.dtype]
        # float32 rounds large int32 values, but the division is exact (the scales are powers of
        # two), so the result is as near as float32 allows.
        centred_S = block_S.astype(np.float32) - silence
        return centred_S / full_scale
    is_finite_S = np.isfinite(block_S)
    if not is_finite_S.all():
        raise ValueError(
            f"{where}: must be finite, got NaN or infinity; look at its source"
        )
    peak = np.abs(block_S).max()
    if peak > audio.MAX_PEAK:
        raise ValueError(
            f"{where}: floating point must be in [-1, 1], got {peak:g}; divide by the"
            " full scale (32768 for 16 bits)"
        )
    clipped_S = np.clip(block_S, -1.0, 1.0)
    return clipped_S.astype(np.float32)


def _resampled(
    blocks: Iterator[np.ndarray], from_rate: int, to_rate: int
) -> Iterator[np.ndarray]:
    """Resample a wave; its spectrum is cut below the lower Nyquist frequency."""
    if from_rate == to_rate:
        yield from blocks
        return
    import soxr

    stream = soxr.ResampleStream(
        from_rate,
        to_rate,
        num_channels=1,
        dtype="float32",
        quality="HQ",
    )
    for wave_S in blocks:
        yield stream.resample_chunk(wave_S)
    # The filter holds back the last samples until the end of the input is signalled.
    no_samples = np.zeros(0, dtype=np.float32)
    yield stream.resample_chunk(no_samples, last=True)
