"""Input audio of a model. In: a file, its content, an array. Out: wave_S at the model's rate.

By default, the first channel is used, as in training. Letters: S samples, C channels.
A file is read as int16 like the recordings of a data directory, so that both give equal samples.
"""

import logging
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from numbers import Real
from typing import Any, Literal

import numpy as np

from speakerlab.core.counting import count_of
from speakerlab.data import audio, levels

log = logging.getLogger(__name__)
# Number of a channel, from 1; "mix": their mean; None: the first, with a warning if others differ.
Channels = int | Literal["mix"] | None
MAX_CHANNELS = 32  # more in the shorter direction of an array is a batch
# dtype -> (value of silence, value of amplitude 1.0)
INTEGERS = {
    np.dtype(np.uint8): (128, 128.0),
    np.dtype(np.int16): (0, 32768.0),
    np.dtype(np.int32): (0, 2147483648.0),
}
# A channel differs from the first one where it is not only a louder or quieter copy: a share of its
# power remains when the copy is subtracted. The noise of an open input, below -60 dB of full scale,
# is no difference.
MIN_OTHER_SHARE = 0.01
MIN_OTHER_PEAK = 0.001
# Waves that were normalised to a variance of 1, or amplified, have smaller peaks.
MIN_INTEGER_PEAK = 64.0
# Resampling from 2 to 192 kHz held back at most 1,030 samples, or 0.08 s.
RESAMPLING_SAMPLES = 1100
RESAMPLING_SECONDS = 0.1
# Amplitudes of 16-bit values in int32 are smaller, and vanish when they are rounded to 16 bits.
MIN_ROUNDED = 0.75 / audio.FULL_SCALE


def read_wave(
    source: Any,
    *,
    sample_rate: int,
    source_rate: int | None = None,
    channels: Channels = None,
    check_levels: bool = True,
) -> np.ndarray:
    """Read wave_S, float32 in [-1, 1], at `sample_rate`.

    source: a path, the content of a file (bytes), an open binary file, or an array or tensor of
    floating point, int16, int32 or uint8 with shape (S,), (S, C) or (C, S); the shorter axis holds
    the channels. `source_rate` is the rate of an array; None: it has `sample_rate`. channels: which
    channel to read; an array of more than two needs it. check_levels: refuse a peak below -80 dB of
    full scale, and warn of other samples that no recording of speech has.
    Raises ValueError with one line for audio that is broken, empty, silent or constant.
    """
    reading = _Reading(audio.name_of(source), channels)
    wave_S = _read(source, reading, sample_rate, source_rate)[:, 0]
    if reading.is_cancelled():
        raise ValueError(reading.describe_cancelled())
    reading.refuse_silence()
    reading.warn_of_other_channel()
    reading.warn_of_narrow_band(sample_rate)
    if check_levels:
        _check_levels(wave_S, sample_rate, reading.where, source)
    return wave_S


def read_channels(
    source: Any, *, sample_rate: int, source_rate: int | None = None
) -> np.ndarray:
    """Read wave_CS, every channel of a recording, as `read_wave` reads it."""
    reading = _Reading(audio.name_of(source), None, reads_each=True)
    wave_SC = _read(source, reading, sample_rate, source_rate)
    reading.warn_of_narrow_band(sample_rate)
    wave_CS = np.ascontiguousarray(wave_SC.T)
    for index, wave_S in enumerate(wave_CS):
        reading.refuse_silence(index)
        where = f"{reading.where}, channel {index + 1}"
        _check_levels(wave_S, sample_rate, where, source)
    return wave_CS


def spool_wave(
    source: Any,
    *,
    sample_rate: int,
    source_rate: int | None = None,
    channels: Channels = None,
) -> np.ndarray:
    """Read wave_S, int16, at `sample_rate`, into a temporary file that ends with the array.

    Like `read_wave`, but hours of audio need little memory, and levels are not checked.
    """
    reading = _Reading(audio.name_of(source), channels)
    (wave_S,) = _spool(source, reading, sample_rate, source_rate)
    # Silence is no error here.
    if reading.is_cancelled():
        log.warning("%s", reading.describe_cancelled())
    reading.warn_of_other_channel()
    reading.warn_of_narrow_band(sample_rate)
    return wave_S


def spool_channels(
    source: Any, *, sample_rate: int, source_rate: int | None = None
) -> list[np.ndarray]:
    """Read wave_S of every channel, as `spool_wave` reads it."""
    reading = _Reading(audio.name_of(source), None, reads_each=True)
    waves = _spool(source, reading, sample_rate, source_rate)
    reading.warn_of_copies()
    reading.warn_of_narrow_band(sample_rate)
    return waves


class ChunkReader:
    """Reader of audio that comes in arrays of any length: the samples that `spool_wave` gives.

    An array has shape (S,) or (S, C); for types and parameters see `read_wave`.
    """

    def __init__(
        self,
        *,
        sample_rate: int,
        source_rate: int | None = None,
        channels: Channels = None,
        where: str = "stream",
    ) -> None:
        self._reading = _Reading(where, channels)
        self._to_rate = sample_rate
        self._from_rate = _whole_rate(source_rate or sample_rate, self._reading)
        self._reading.rate = self._from_rate
        self._reading.warn_of_narrow_band(sample_rate)
        self._resampler: Any = None
        self._last_chunk: Any = None  # its type is in messages
        self._has_warned = False

    @property
    def delay_seconds(self) -> float:
        """Return how much of the audio resampling holds back at most."""
        if self._from_rate == self._to_rate:
            return 0.0
        return max(RESAMPLING_SAMPLES / self._from_rate, RESAMPLING_SECONDS)

    def read(self, chunk: Any) -> np.ndarray:
        """Return the next wave_S, int16, at `sample_rate`; resampling holds some of it back."""
        reading = self._reading
        raw_SC = _as_array(chunk, reading.where)
        # The longer axis is no hint here: a chunk may have fewer samples than channels.
        num_channels = raw_SC.shape[1] if raw_SC.ndim == 2 else 1
        if raw_SC.ndim not in (1, 2) or not 1 <= num_channels <= MAX_CHANNELS:
            raise ValueError(
                f"{reading.where}: must have shape (samples,) or (samples, channels), got"
                f" {raw_SC.shape}; transpose it"
            )
        if reading.num_channels not in (0, num_channels):
            raise ValueError(
                f"{reading.where}: changes from {reading.num_channels} to {num_channels}"
                " channels; give the same number in each chunk"
            )
        if not len(raw_SC):
            return np.zeros(0, dtype=np.int16)
        self._last_chunk = chunk
        wave_S1 = reading.amplitudes(raw_SC.reshape(-1, num_channels))
        if not self._has_warned and reading.has_other_channel():
            self._has_warned = True
            reading.warn_of_other_channel()
        return self._resample(wave_S1)

    def finish(self) -> np.ndarray:
        """Return the last wave_S; ValueError if there was no audio, or too faint to be read."""
        reading = self._reading
        if self._last_chunk is None:
            raise ValueError(_no_audio(reading.where))
        _refuse_rounded_to_silence(reading, self._last_chunk)
        if reading.is_cancelled():
            log.warning("%s", reading.describe_cancelled())
        no_samples = np.zeros((0, 1), dtype=np.float32)
        return self._resample(no_samples, is_last=True)

    def _resample(self, wave_S1: np.ndarray, *, is_last: bool = False) -> np.ndarray:
        """Return wave_S, int16, at the model's rate."""
        if self._from_rate != self._to_rate:
            if self._resampler is None:
                self._resampler = _open_resampler(
                    self._from_rate,
                    self._to_rate,
                    num_channels=1,
                )
            wave_S1 = self._resampler.resample_chunk(wave_S1, last=is_last)
        return audio.to_int16(wave_S1[:, 0])


def warn_of_levels(wave_S: np.ndarray, *, sample_rate: int, where: str) -> None:
    """Warn of a spooled wave that is no recording of speech, unless it is silent."""
    measured = levels.measure(wave_S, sample_rate=sample_rate)
    if measured.lowest == measured.highest:
        return
    fault = levels.find_shortness(wave_S, sample_rate=sample_rate)
    if fault is None:
        fault = levels.find_fault(wave_S, measured, sample_rate=sample_rate)
    if fault is not None:
        log.warning("%s: %s; check the recording", where, fault)


def differ_from(
    channel: int,
    power_C: np.ndarray,
    product_C: np.ndarray,
    peak_C: np.ndarray,
) -> np.ndarray:
    """Return whether each channel has other sound than `channel`, (C,).

    A louder or quieter copy has no other sound. product_C: products with `channel`, summed over the
    samples, as are the powers.
    """
    copied_C = np.zeros(len(power_C))
    if power_C[channel] > 0:
        copied_C = product_C**2 / power_C[channel]
    differs_C = power_C - copied_C > MIN_OTHER_SHARE * power_C
    differs_C &= peak_C > MIN_OTHER_PEAK
    differs_C[channel] = False
    return differs_C


class _Reading:
    """Channels of a recording to read, and statistics of its samples, block by block."""

    def __init__(
        self, where: str, channels: Channels, *, reads_each: bool = False
    ) -> None:
        is_number = isinstance(channels, int | np.integer)
        is_valid = channels in (None, "mix")
        # True is 1 in Python, but no number of a channel.
        if is_number and not isinstance(channels, bool):
            is_valid = channels >= 1
        if not is_valid:
            raise ValueError(
                "channels: must be the number of a channel, from 1, or 'mix' ('each'"
                f" only to embed or diarize one recording), got {channels!r}; correct it"
            )
        self.where = where
        self.channels = channels
        self.reads_each = reads_each
        self.choice = "--channel N or mix (in Python channels=)"  # for messages
        self.rate = 0  # of the recording
        self.num_channels = 0
        # Of the channels that are read.
        self.lowest_C = np.array(np.inf)
        self.highest_C = np.array(-np.inf)
        # Of all channels: power, product with the first channel, and peak.
        self.power_C = np.zeros(1)
        self.product_C = np.zeros(1)
        self.peak_C = np.zeros(1)

    def amplitudes(self, raw_SC: np.ndarray) -> np.ndarray:
        """Return the channels to read of a block, as float32 in [-1, 1]."""
        all_SC = _amplitudes(raw_SC, self.where)
        _, num_channels = all_SC.shape
        # Some AAC streams become stereo after their first frames.
        is_change = self.num_channels not in (0, num_channels)
        if is_change and self.reads_each:
            raise ValueError(
                f"{self.where}: changes from {self.num_channels} to {num_channels}"
                " channels; convert it to wav or flac"
            )
        self.num_channels = num_channels
        if num_channels > 1 and len(self.power_C) in (1, num_channels):
            self._compare(all_SC)

        wave_SC = self._choose(all_SC)
        self.lowest_C = np.minimum(self.lowest_C, wave_SC.min(axis=0))
        self.highest_C = np.maximum(self.highest_C, wave_SC.max(axis=0))
        return wave_SC

    def _choose(self, all_SC: np.ndarray) -> np.ndarray:
        """Return the channels to read of a block; ValueError if it has too few channels."""
        if self.reads_each:
            return all_SC
        if self.channels == "mix":
            return all_SC.mean(axis=1, keepdims=True)
        number = int(self.channels or 1)
        _, num_channels = all_SC.shape
        if number > num_channels:
            present = count_of(num_channels, "channel")
            fix = f"give one from 1 to {num_channels}"
            if num_channels == 1:
                fix = "give channel 1"
            raise ValueError(
                f"{self.where}: has {present}, got channel {number}; {fix}"
            )
        # A copy: a view would keep the other channels in memory.
        return np.ascontiguousarray(all_SC[:, number - 1 : number])

    def _compare(self, all_SC: np.ndarray) -> None:
        """Add a block to the statistics of all channels."""
        first_S = all_SC[:, 0]
        block_power_C = np.einsum("sc,sc->c", all_SC, all_SC)
        block_peak_C = np.abs(all_SC).max(axis=0)
        # Not `+=`: the arrays begin with a single channel.
        self.power_C = self.power_C + block_power_C
        self.product_C = self.product_C + first_S @ all_SC
        self.peak_C = np.maximum(self.peak_C, block_peak_C)

    @property
    def differs_C(self) -> np.ndarray:
        """Return whether each channel has other sound than the first one."""
        return differ_from(0, self.power_C, self.product_C, self.peak_C)

    @property
    def is_audible_C(self) -> np.ndarray:
        """Return whether each channel has more than the noise of an open input."""
        return self.peak_C > MIN_OTHER_PEAK

    @property
    def peak(self) -> float:
        """Return the largest magnitude in the channels that are read."""
        lowest_peak = np.abs(self.lowest_C).max()
        highest_peak = np.abs(self.highest_C).max()
        return max(lowest_peak, highest_peak)

    def has_other_channel(self) -> bool:
        """Return whether a channel has other sound than the first one."""
        return bool(self.differs_C.any())

    def is_cancelled(self) -> bool:
        """Return whether the mean of the channels is silent though a channel has sound.

        This happens to channels in opposite phase.
        """
        if self.channels != "mix" or not self.is_audible_C.any():
            return False
        return bool(self.peak < 10 ** (levels.SILENT_DB / 20))

    def describe_cancelled(self) -> str:
        """Return the line about channels that cancel each other in their mean."""
        return (
            f"{self.where}: has {self.num_channels} channels that cancel each other in"
            " their mean; choose one of them with --channel N (in Python channels=N)"
        )

    def refuse_silence(self, index: int = 0) -> None:
        """Raise ValueError if all samples of a channel that was read are equal."""
        value = self.lowest_C[index]
        if value != self.highest_C[index]:
            return
        number = index + 1 if self.reads_each else self.channels or 1
        where = self.where
        is_audible_C = self.is_audible_C
        if self.num_channels > 1 and number != "mix":
            where = f"{self.where}, channel {number}"
            # A constant has a peak, too.
            is_audible_C[int(number) - 1] = False
        fix = "give a recording of a voice"
        if is_audible_C.any():
            other = np.flatnonzero(is_audible_C)[0] + 1
            fix = f"channel {other} has sound, choose with {self.choice}"
        kind = f"is constant, got {value:g}" if value else "is silent, got 0"
        raise ValueError(f"{where}: {kind} in every sample; {fix}")

    def warn_of_other_channel(self) -> None:
        """Warn if the first channel was read by default, and another one has other sound."""
        if self.channels is None and self.has_other_channel():
            log.warning(
                "%s: has %d channels that differ, and only channel 1 was read; choose"
                " with %s",
                self.where,
                self.num_channels,
                self.choice,
            )

    def warn_of_copies(self) -> None:
        """Warn of channels that are a louder or quieter copy of the first one."""
        is_copy_C = ~self.differs_C & self.is_audible_C
        if self.num_channels > 1 and is_copy_C[0] and is_copy_C[1:].any():
            number = 2 + int(is_copy_C[1:].argmax())
            log.warning(
                "%s: channel %d is a copy of channel 1, as in a mono recording saved as"
                " stereo; choose one of them with %s",
                self.where,
                number,
                self.choice,
            )

    def warn_of_narrow_band(self, sample_rate: int) -> None:
        """Warn of a telephone's rate, at which a voice sounds like another one's to a model."""
        if self.rate <= sample_rate / 2:
            log.warning(
                "%s: has %d Hz, and is read at %d Hz: scores beside recordings of %d"
                " Hz are too low; compare it with recordings of %d Hz",
                self.where,
                self.rate,
                sample_rate,
                sample_rate,
                self.rate,
            )


def _check_levels(
    wave_S: np.ndarray, sample_rate: int, where: str, source: Any
) -> None:
    """Refuse a wave without sound; warn of one that is no recording of speech."""
    measured = levels.measure(wave_S, sample_rate=sample_rate)
    if measured.peak_db < levels.SILENT_DB:
        raise ValueError(_too_faint(where, measured.peak_db, source))
    dtype = _dtype_of(source)
    # 128 / 32768 is the same level.
    if dtype in ("int16", "int32") and measured.peak_db < levels.INT24_DB:
        bits = 24 if dtype == "int32" else 8
        fault = f"has {bits}-bit values in {dtype}; multiply them by 256"
    else:
        # The length first: the statistics of a few samples say nothing.
        fault = levels.find_shortness(wave_S, sample_rate=sample_rate)
    if fault is None:
        fault = levels.find_fault(wave_S, measured, sample_rate=sample_rate)
    if fault is None:
        fault = levels.find_padding(wave_S)
    if fault is not None:
        log.warning("%s: %s; check the recording", where, fault)


def _too_faint(where: str, peak_db: float, source: Any) -> str:
    fix = "give a louder recording, or scale it to [-1, 1]"
    if _dtype_of(source) == "int32":
        fix = "cast 16-bit values to int16"
    return (
        f"{where}: has a peak of {peak_db:.0f} dB of full scale, which is no speech;"
        f" {fix}"
    )


def _dtype_of(source: Any) -> str:
    """Return the name of the type of an array's or tensor's samples; "" for other sources."""
    return str(getattr(source, "dtype", "")).removeprefix("torch.")


def _read(
    source: Any, reading: _Reading, sample_rate: int, source_rate: int | None
) -> np.ndarray:
    """Return wave_SC, float32, of the channels to read."""
    with _stream_waves(source, reading, sample_rate, source_rate) as blocks:
        waves = list(blocks)
    wave_SC = np.concatenate(waves) if waves else np.zeros((0, 1), dtype=np.float32)
    if not len(wave_SC):
        raise ValueError(_no_audio(reading.where))
    return wave_SC


def _spool(
    source: Any, reading: _Reading, sample_rate: int, source_rate: int | None
) -> list[np.ndarray]:
    """Write the channels to read, int16, into temporary files; return wave_S of each."""
    with ExitStack() as stack:
        opened = _stream_waves(source, reading, sample_rate, source_rate)
        blocks = stack.enter_context(opened)
        files: list[Any] = []
        for wave_SC in blocks:
            int16_SC = audio.to_int16(wave_SC)
            for index, int16_S in enumerate(int16_SC.T):
                if index == len(files):
                    file = stack.enter_context(tempfile.TemporaryFile())
                    files.append(file)
                files[index].write(int16_S.tobytes())

        waves: list[np.ndarray] = []
        for file in files:
            file.flush()
            if file.tell():
                # The file has no name: the kernel removes it when the array is gone.
                waves.append(np.memmap(file, dtype=np.int16, mode="r"))
    if not waves:
        raise ValueError(_no_audio(reading.where))
    _refuse_rounded_to_silence(reading, source)
    return waves


def _refuse_rounded_to_silence(reading: _Reading, source: Any) -> None:
    """Refuse values that only rounding to 16 bits made silent; silence itself is no error."""
    peak = reading.peak
    if 0 < peak < MIN_ROUNDED and not reading.is_cancelled():
        peak_db = 20 * np.log10(peak)
        raise ValueError(_too_faint(reading.where, peak_db, source))


def _no_audio(where: str) -> str:
    return f"{where}: holds no audio (0 samples); give a recording"


@contextmanager
def _stream_waves(
    source: Any, reading: _Reading, sample_rate: int, source_rate: int | None
) -> Iterator[Iterator[np.ndarray]]:
    """Decode and resample the channels to read in blocks wave_SC, float32 in [-1, 1]."""
    where = reading.where
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    is_open_file = hasattr(source, "read")
    if is_open_file or isinstance(source, str | os.PathLike | bytes):
        opened = audio.stream(source, all_channels=True)
    else:
        given_rate = sample_rate if source_rate is None else source_rate
        array_rate = _whole_rate(given_rate, reading)
        array_SC = _array_channels(source, reading)
        opened = nullcontext((array_rate, _blocks_of(array_SC)))
    with opened as (rate, blocks):
        reading.rate = rate
        if source_rate not in (None, rate):
            line = f"{where}: the file says {rate} Hz, got sample_rate={source_rate}"
            raise ValueError(f"{line}; leave it out for files")
        waves = (reading.amplitudes(raw_SC) for raw_SC in blocks if len(raw_SC))
        yield _resampled(waves, rate, sample_rate)


def _blocks_of(array_SC: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array in blocks as long as those of a file."""
    block_samples = audio.BLOCK_SAMPLES
    for start in range(0, len(array_SC), block_samples):
        yield array_SC[start : start + block_samples]


def _whole_rate(rate: Any, reading: _Reading) -> int:
    """Return the rate of an array; raise ValueError if it is none."""
    hertz = float(rate) if isinstance(rate, Real) else math.nan
    # A rate in kHz would make an hour of 4 s.
    if not hertz.is_integer() or int(hertz) not in audio.RATES:
        raise ValueError(
            f"{reading.where}: sample_rate must be a whole number from"
            f" {audio.RATES[0]} to {audio.RATES[-1]} Hz, got {rate!r}; correct it"
        )
    return int(hertz)


def _array_channels(source: Any, reading: _Reading) -> np.ndarray:
    """Return raw_SC, if possible as a view, of a numpy array or torch tensor."""
    where = reading.where
    source = _as_array(source, where)
    if not source.size or source.ndim == 1:
        return source.reshape(-1, 1)
    num_channels = min(source.shape, default=0)
    if source.ndim != 2 or num_channels > MAX_CHANNELS:
        raise ValueError(
            f"{where}: must have shape (samples,), (samples, channels) or (channels,"
            f" samples), got {source.shape}; give recordings one by one"
        )
    # In most programs, more rows than two are a batch.
    is_undecided = reading.channels is None and not reading.reads_each
    if num_channels > 2 and is_undecided:
        raise ValueError(
            f"{where}: may be a batch or have {num_channels} channels, got shape"
            f" {source.shape}; embed_many(list(x)) takes a batch, channels=1 or mix"
            " a recording"
        )
    reading.choice = "channels=N or 'mix'; a batch is for embed_many(list(x))"
    # The shorter direction is the channels, because a recording has more samples than channels.
    num_rows, num_columns = source.shape
    return source.T if num_rows <= num_columns else source


def _as_array(source: Any, where: str) -> np.ndarray:
    """Return a numpy array or torch tensor as an array of a type that samples have."""
    # A tensor, recognised without importing torch.
    if hasattr(source, "detach"):
        source = _tensor_values(source, where)
    if not isinstance(source, np.ndarray):
        fix = "give a path, bytes, an open file, a numpy array or a tensor"
        if isinstance(source, Iterator):
            fix = "make a list of several recordings with list(...)"
        raise ValueError(f"{where}: is no audio, got {type(source).__name__}; {fix}")
    is_floating = np.issubdtype(source.dtype, np.floating)
    if source.dtype not in INTEGERS and not is_floating:
        raise ValueError(
            f"{where}: must be floating point, int16, int32 or uint8, got"
            f" {source.dtype}; cast it"
        )
    # Not a subclass such as memmap, which the resampler refuses.
    return np.asarray(source)


def _tensor_values(tensor: Any, where: str) -> np.ndarray:
    """Return the values of a torch tensor."""
    try:
        tensor = tensor.detach().cpu().resolve_neg()
        # numpy has no bfloat16; float32 holds all its values, and waves are float32 in the end.
        if tensor.is_floating_point():
            tensor = tensor.float()
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        # Sparse, nested or without values.
        raise ValueError(
            f"{where}: is a tensor of a kind ({tensor.layout} on {tensor.device}) that"
            " holds no plain samples; give a dense one"
        ) from error


def _amplitudes(raw_SC: np.ndarray, where: str) -> np.ndarray:
    """Return samples as float32 in [-1, 1]; refuse values not finite or of another scale."""
    if raw_SC.dtype in INTEGERS:
        silence, full_scale = INTEGERS[raw_SC.dtype]
        # float32 rounds large int32 values, but the division is exact (the scales are powers of
        # two), so the result is as near as float32 allows.
        centred_SC = raw_SC.astype(np.float32) - silence
        return centred_SC / full_scale
    is_finite_SC = np.isfinite(raw_SC)
    if not is_finite_SC.all():
        raise ValueError(
            f"{where}: must be finite, got NaN or infinity; look at its source"
        )
    peak = np.abs(raw_SC).max()
    if peak > audio.MAX_PEAK:
        fix = "divide by the full scale (32768 for 16 bits)"
        if peak < MIN_INTEGER_PEAK:
            fix = "divide by the peak"
        elif raw_SC.min() >= 0 and peak <= 255:
            fix = "for 8 bits, subtract 128 and divide by 128"
        raise ValueError(
            f"{where}: floating point must be in [-1, 1], got {peak:g}; {fix}"
        )
    clipped_SC = np.clip(raw_SC, -1.0, 1.0)
    return clipped_SC.astype(np.float32)


def _resampled(
    blocks: Iterator[np.ndarray], from_rate: int, to_rate: int
) -> Iterator[np.ndarray]:
    """Resample waves; their spectrum is cut below the lower Nyquist frequency.

    They are rounded to 16 bits, as in a data directory. The features show the noise of this
    rounding: there is nothing else above half of the rate of a telephone recording.
    """
    if from_rate == to_rate:
        yield from blocks
        return
    for wave_SC in _unrounded(blocks, from_rate, to_rate):
        yield audio.to_int16(wave_SC).astype(np.float32) / audio.FULL_SCALE


def _unrounded(
    blocks: Iterator[np.ndarray], from_rate: int, to_rate: int
) -> Iterator[np.ndarray]:
    """Resample waves, float32, without rounding."""
    resampler: Any = None
    num_channels = 0
    for wave_SC in blocks:
        if resampler is None:
            _, num_channels = wave_SC.shape
            resampler = _open_resampler(from_rate, to_rate, num_channels)
        yield resampler.resample_chunk(np.ascontiguousarray(wave_SC))
    # The filter holds back the last samples until the end of the input is signalled.
    if resampler is not None:
        no_samples = np.zeros((0, num_channels), dtype=np.float32)
        yield resampler.resample_chunk(no_samples, last=True)


def _open_resampler(from_rate: int, to_rate: int, num_channels: int) -> Any:
    """Return a resampler of waves; the sizes of its chunks change no sample."""
    import soxr

    return soxr.ResampleStream(
        from_rate,
        to_rate,
        num_channels=num_channels,
        dtype="float32",
        quality="HQ",
    )
