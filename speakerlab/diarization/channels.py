"""Cross-talk between the channels of a call. In: waves and speech regions. Out: regions.

A microphone or a telephone line picks up the voice of another channel, too: later, quieter and
filtered. Where both channels have the same sound, the gain of each frequency band from one to the
other is measured. A channel then has speech of its own where it is louder than the cross-talk that
the other channels, through these gains, explain. So both sides may speak at once, and the levels of
the lines do not matter.
Letters: S samples, T frames, L samples of a frame, F frequencies, B bands, N windows, M channels.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speakerlab.diarization.clustering import sample_rows
from speakerlab.diarization.regions import Region, merge_regions
from speakerlab.diarization.windows import MIN_SPEECH_SECONDS, speech_regions

# Windows in which channels are compared.
WINDOW_SECONDS = 0.5
STEP_SECONDS = 0.25
MAX_WINDOWS = 800  # more are a sample, evenly spaced in time
# Largest delay of cross-talk: 0.05 s, and of a reflection that is stronger than the direct sound.
LAG_SECONDS = 0.07
# Sentences of two speakers have a similarity below 0.15 in 99 % of the windows; a sentence and its
# copy by a room, with noise 10 dB below it, one of 0.2 or more in 75 %.
MIN_SIMILARITY = 0.2
# There is cross-talk if so many of the windows of the louder channel are similar to it.
MIN_SIMILAR_SHARE = 0.2
MIN_SIMILAR = 2
EQUAL_DB = 0.5  # of copies that are equally loud, the first channel counts
# If each channel hears the other, the differences of their levels have two groups, which are the
# two attenuations apart. The levels of two speakers of one channel differ by less.
MIN_GROUPS_DB = 20.0
MIN_GROUP_SHARE = 0.1  # of the similar windows, in the smaller group

# Frames in which speech is compared with the cross-talk that is expected.
FRAME_SECONDS = 0.02
BLOCK_FRAMES = 4096  # frames in memory at once
# Bands: the lowest from LOWEST_HZ to SECOND_HZ, the others in equal ratios up to HIGHEST_HZ.
NUM_BANDS = 16
LOWEST_HZ = 80
SECOND_HZ = 200
HIGHEST_HZ = 8000
FLOOR_POWER = 1e-3  # of 16-bit samples, below the steps of rounding
# Percentile of the levels of frames below which gains are not measured: there is mostly noise.
QUIET_PERCENTILE = 40
# Cross-talk lasts longer than the speech: a delay is no whole number of frames, and rooms echo.
FRAMES_BEFORE = 1
FRAMES_AFTER = 2
# The following was chosen on calls of training speakers of speechocean762 (benchmarks/calls.py).
OWN_SPEECH_DB = 6.0  # by which a channel's own speech exceeds the expected cross-talk
# Limits of this excess in a band.
LOWEST_EXCESS_DB = -20.0
HIGHEST_EXCESS_DB = 30.0
# Frames count by their level as in `find_speech` with `energy`.
LOUDEST_PERCENTILE = 99
NOISE_PERCENTILE = 5
BELOW_LOUDEST_DB = 30.0
ABOVE_NOISE = 0.25  # of the way from the noise to the loudest level
# A frame is within own speech if so many of the frames around it, and of itself, are own speech.
CONTEXT_FRAMES = 5  # on each side
MIN_CONTEXT_SHARE = 0.25


class Leak(NamedTuple):
    """Cross-talk from one channel in another."""

    gain_B: np.ndarray  # of powers
    lag: int  # frames by which it is later; negative: earlier


class Window(NamedTuple):
    """The same time of two channels."""

    first_frame: int
    gain_db: float  # level of the first channel above that of the second
    similarity: float
    lag_seconds: float  # by which the second channel is later


def remove_cross_talk(
    waves: Sequence[np.ndarray],
    regions_of: Sequence[Sequence[Region]],
    *,
    sample_rate: int,
) -> list[list[Region]]:
    """Return the regions of each channel without the times in which it only hears another one.

    waves: wave_S of each channel, of the same length; regions_of: speech regions of each channel.
    A region without cross-talk is returned as it is.
    """
    powers = [_band_powers(wave_S, sample_rate) for wave_S in waves]
    leaks = _find_leaks(waves, powers, regions_of, sample_rate)
    own_regions: list[list[Region]] = []
    for channel, (power_TB, regions) in enumerate(zip(powers, regions_of)):
        expected_TB = np.zeros_like(power_TB)
        for (source, target), leak in leaks.items():
            if target == channel:
                expected_TB += leak.gain_B * _delayed(powers[source], leak.lag)
        if not expected_TB.any():
            own_regions.append(list(regions))
            continue
        # Where cross-talk is quiet, only its sum with the noise is expected.
        noise_B = np.percentile(power_TB, NOISE_PERCENTILE, axis=0)
        expected_TB += noise_B
        own_regions.append(_keep_own_speech(regions, power_TB, expected_TB))
    return own_regions


def _keep_own_speech(
    regions: Sequence[Region], power_TB: np.ndarray, expected_TB: np.ndarray
) -> list[Region]:
    """Return the regions without cross-talk, given the power that is expected of it."""
    is_loud_T = _is_loud(power_TB)
    exceeds_T = _excess_db(power_TB, expected_TB) > OWN_SPEECH_DB
    is_own_T = is_loud_T & exceeds_T
    is_cross_talk_T = is_loud_T & ~exceeds_T

    # A word is found by most of its frames, not by a single one: count the frames of own speech in
    # the context of each frame. The convolution also has a context before the first frame and after
    # the last one, which are cut off.
    context_frames = 2 * CONTEXT_FRAMES + 1
    num_own_T = np.convolve(is_own_T, np.ones(context_frames))
    num_own_T = num_own_T[CONTEXT_FRAMES:][: len(is_own_T)]
    own_speech = speech_regions(
        num_own_T >= MIN_CONTEXT_SHARE * context_frames,
        frame_seconds=FRAME_SECONDS,
    )

    own_regions: list[Region] = []
    for start, end in regions:
        first = int(start / FRAME_SECONDS)
        stop = int(np.ceil(end / FRAME_SECONDS))
        if not is_cross_talk_T[first:stop].any():
            own_regions.append((start, end))
            continue
        for own_start, own_end in own_speech:
            common_start = max(start, own_start)
            common_end = min(end, own_end)
            if common_end - common_start >= MIN_SPEECH_SECONDS:
                own_regions.append((common_start, common_end))
    return merge_regions(own_regions)


def _is_loud(power_TB: np.ndarray) -> np.ndarray:
    """Return whether each frame is as loud as speech, (T,)."""
    power_T = power_TB.sum(axis=1)
    level_T = 10 * np.log10(power_T)
    noise = np.percentile(level_T, NOISE_PERCENTILE)
    loudest = np.percentile(level_T, LOUDEST_PERCENTILE)
    above_noise = noise + ABOVE_NOISE * (loudest - noise)
    below_loudest = loudest - BELOW_LOUDEST_DB
    return level_T >= max(below_loudest, above_noise)


def _excess_db(power_TB: np.ndarray, expected_TB: np.ndarray) -> np.ndarray:
    """Return by how much frames exceed the expected power, (T,): the mean over the bands.

    Bands count by their amplitudes: one that has no speech shows nothing.
    """
    ratio_TB = power_TB / (expected_TB + FLOOR_POWER)
    excess_TB = 10 * np.log10(ratio_TB)
    excess_TB = np.clip(excess_TB, LOWEST_EXCESS_DB, HIGHEST_EXCESS_DB)
    amplitude_TB = np.sqrt(power_TB)
    return np.average(excess_TB, axis=1, weights=amplitude_TB)


def _find_leaks(
    waves: Sequence[np.ndarray],
    powers: Sequence[np.ndarray],
    regions_of: Sequence[Sequence[Region]],
    sample_rate: int,
) -> dict[tuple[int, int], Leak]:
    """Return the cross-talk in each direction that has some: (source, target) -> Leak."""
    starts = _window_starts(regions_of)
    level_NM = _levels_db(waves, starts, sample_rate)
    leaks: dict[tuple[int, int], Leak] = {}
    for first, second in combinations(range(len(waves)), 2):
        # What two channels hear of a third, louder one is no cross-talk between them.
        louder_N = np.maximum(level_NM[:, first], level_NM[:, second])
        is_loudest_N = louder_N == level_NM.max(axis=1)
        windows: list[Window] = []
        for index in np.flatnonzero(is_loudest_N).tolist():
            window = _compare(
                waves[first],
                waves[second],
                start=starts[index],
                gain_db=float(level_NM[index, first] - level_NM[index, second]),
                sample_rate=sample_rate,
            )
            windows.append(window)

        first_speaks, second_speaks = _divide(windows)
        in_second = _measure(
            first_speaks,
            source_TB=powers[first],
            target_TB=powers[second],
            lag_sign=1,
        )
        # Lags are those of the second channel; as source, it is earlier.
        in_first = _measure(
            second_speaks,
            source_TB=powers[second],
            target_TB=powers[first],
            lag_sign=-1,
        )
        if in_second is not None:
            leaks[first, second] = in_second
        if in_first is not None:
            leaks[second, first] = in_first
    return leaks


def _divide(windows: Sequence[Window]) -> tuple[list[Window], list[Window]]:
    """Return the windows in which the first channel speaks, and those in which the second does."""
    # The channel that speaks is louder, up to a bound: the lines differ in their levels.
    similar_gains: list[float] = []
    for window in windows:
        if window.similarity >= MIN_SIMILARITY:
            similar_gains.append(window.gain_db)
    bound_db = _find_bound(similar_gains)
    first_speaks = [window for window in windows if window.gain_db > bound_db]
    second_speaks = [window for window in windows if window.gain_db <= bound_db]
    return first_speaks, second_speaks


def _window_starts(regions_of: Sequence[Sequence[Region]]) -> list[float]:
    """Return the starts, in seconds, of windows in the speech of any channel."""
    all_regions: list[Region] = []
    for regions in regions_of:
        all_regions += regions

    starts: list[float] = []
    for start, end in merge_regions(all_regions):
        num_windows = int(np.ceil((end - start) / STEP_SECONDS))
        num_windows = max(num_windows, 1)
        # Each window is around its step: steps of 0.25 s from 3 s have windows of 0.5 s from
        # 2.875 s, 3.125 s and so on.
        first_start = start - (WINDOW_SECONDS - STEP_SECONDS) / 2
        places = first_start + STEP_SECONDS * np.arange(num_windows)
        starts += np.maximum(places, 0.0).tolist()
    rows = sample_rows(len(starts), MAX_WINDOWS)
    return [starts[row] for row in rows]


def _levels_db(
    waves: Sequence[np.ndarray], starts: Sequence[float], sample_rate: int
) -> np.ndarray:
    """Return the levels of 16-bit samples in dB, at least 0, (N, M)."""
    level_NM = np.zeros((len(starts), len(waves)))
    for index, start in enumerate(starts):
        for channel, wave_S in enumerate(waves):
            window_S = _window_samples(wave_S, start, sample_rate)
            power = float(window_S @ window_S) / len(window_S)
            level_NM[index, channel] = 10 * np.log10(max(power, 1.0))
    return level_NM


def _compare(
    first_S: np.ndarray,
    second_S: np.ndarray,
    *,
    start: float,
    gain_db: float,
    sample_rate: int,
) -> Window:
    """Compare the waves of two channels in the window that starts at `start` seconds."""
    similarity, lag = _similarity(
        _window_samples(second_S, start, sample_rate),
        _window_samples(first_S, start, sample_rate),
        max_lag=round(LAG_SECONDS * sample_rate),
    )
    return Window(
        first_frame=round(start / FRAME_SECONDS),
        gain_db=gain_db,
        similarity=similarity,
        lag_seconds=lag / sample_rate,
    )


def _window_samples(wave_S: np.ndarray, start: float, sample_rate: int) -> np.ndarray:
    """Return the samples of a window minus their mean, float32; zeros follow the wave's end."""
    num_samples = round(WINDOW_SECONDS * sample_rate)
    first = round(start * sample_rate)
    window_S = np.asarray(wave_S[first : first + num_samples], dtype=np.float32)
    if len(window_S):
        window_S = window_S - window_S.mean()
    num_missing = num_samples - len(window_S)
    return np.pad(window_S, (0, num_missing))


def _similarity(
    window_S: np.ndarray, reference_S: np.ndarray, max_lag: int
) -> tuple[float, int]:
    """Return the largest correlation of two windows, and by how much the first one is later.

    The correlation is 1 for copies; the lag is in samples. Spectra are flattened by half in dB: the
    strong low frequencies of two voices are similar.
    """
    length = 2 * len(window_S)
    spectrum_F = np.fft.rfft(window_S, length)
    reference_F = np.fft.rfft(reference_S, length)
    # A flattened spectrum has the root of each amplitude, so the amplitudes are its energy.
    energy = np.abs(spectrum_F).sum()
    reference_energy = np.abs(reference_F).sum()
    if energy == 0 or reference_energy == 0:
        return 0.0, 0
    cross_F = spectrum_F * reference_F.conj()
    flattened_F = cross_F / np.sqrt(np.abs(cross_F) + 1e-9)
    correlation_S = np.abs(np.fft.irfft(flattened_F))

    # Lags 0, 1, 2, ... stand at the start, and ..., -2, -1 at the end: put the latter first.
    negative_lags_S = correlation_S[-max_lag:]
    other_lags_S = correlation_S[: max_lag + 1]
    near_S = np.concatenate([negative_lags_S, other_lags_S])
    best = int(near_S.argmax())
    # `irfft` gives the mean over the frequencies, the energies are sums.
    num_frequencies = len(cross_F)
    peak = near_S[best] * num_frequencies / np.sqrt(energy * reference_energy)
    return float(peak), best - max_lag


def _find_bound(gains_db: Sequence[float]) -> float:
    """Return the gain above which the first of two channels speaks, from gains of similar windows.

    That is 0 if only one of them is heard in the other, else the middle between the two groups of
    gains.
    """
    # Of equally loud copies, the first channel counts.
    no_groups = -EQUAL_DB
    if not gains_db:
        return no_groups
    gain_N = np.array(gains_db)
    low = gain_N.min()
    high = gain_N.max()
    is_high_N = gain_N > (low + high) / 2
    # k-means with two groups, until no gain changes its group.
    is_converged = False
    while not is_converged:
        if high - low < MIN_GROUPS_DB:
            return no_groups
        low = gain_N[~is_high_N].mean()
        high = gain_N[is_high_N].mean()
        was_high_N = is_high_N
        is_high_N = gain_N > (low + high) / 2
        is_converged = np.array_equal(is_high_N, was_high_N)

    num_high = np.count_nonzero(is_high_N)
    smaller_size = min(num_high, len(gain_N) - num_high)
    if smaller_size < max(MIN_SIMILAR, MIN_GROUP_SHARE * len(gain_N)):
        return no_groups
    return float(low + high) / 2


def _measure(
    windows: Sequence[Window],
    *,
    source_TB: np.ndarray,
    target_TB: np.ndarray,
    lag_sign: int,
) -> Leak | None:
    """Measure the cross-talk in windows in which the source speaks; None if there is none.

    lag_sign: 1 if the target is the second channel of the windows, -1 if it is the first.
    """
    similar = [window for window in windows if window.similarity >= MIN_SIMILARITY]
    if len(similar) < max(MIN_SIMILAR_SHARE * len(windows), MIN_SIMILAR):
        return None
    lags_seconds = [window.lag_seconds for window in similar]
    lag_seconds = lag_sign * float(np.median(lags_seconds))
    lag = round(lag_seconds / FRAME_SECONDS)

    is_similar_T = np.zeros(len(source_TB), dtype=np.bool_)
    window_frames = round(WINDOW_SECONDS / FRAME_SECONDS)
    for window in similar:
        is_similar_T[window.first_frame :][:window_frames] = True
    heard_TB = target_TB[is_similar_T]
    spoken_TB = _delayed(source_TB, lag)[is_similar_T]
    if not len(spoken_TB):
        return None
    # In quiet frames, only the noise would be measured.
    spoken_T = spoken_TB.sum(axis=1)
    is_loud_T = spoken_T >= np.percentile(spoken_T, QUIET_PERCENTILE)
    # The median, because in some frames the target speaks, too.
    gain_TB = heard_TB[is_loud_T] / spoken_TB[is_loud_T]
    return Leak(gain_B=np.median(gain_TB, axis=0), lag=lag)


def _delayed(power_TB: np.ndarray, lag: int) -> np.ndarray:
    """Return, for each frame, the largest power of the frames that cross-talk may come from.

    With a lag of 5 frames, the cross-talk of frame 20 may come from frames 13 to 16.
    """
    num_frames = len(power_TB)
    largest_TB = np.full_like(power_TB, FLOOR_POWER)
    for shift in range(lag - FRAMES_BEFORE, lag + FRAMES_AFTER + 1):
        # The frames from which frame - shift is in the recording.
        first = max(shift, 0)
        stop = min(num_frames + shift, num_frames)
        if first < stop:
            moved_TB = power_TB[first - shift : stop - shift]
            largest_TB[first:stop] = np.maximum(largest_TB[first:stop], moved_TB)
    return largest_TB


def _band_powers(wave_S: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return the power in each band of frames around consecutive times, float32, (T, B)."""
    step = round(FRAME_SECONDS * sample_rate)
    num_frames = len(wave_S) // step
    # A frame is twice as long as its step, which is in its middle.
    length = 2 * step
    window_L = np.hanning(length).astype(np.float32)
    is_in_band_FB = _bands_of_frequencies(length, sample_rate)

    power_TB = np.zeros((num_frames, NUM_BANDS), dtype=np.float32)
    # In blocks, because frames of hours would need much memory.
    for first in range(0, num_frames, BLOCK_FRAMES):
        stop = min(first + BLOCK_FRAMES, num_frames)
        # The first frame of the block begins half a step before its time; the last one ends half a
        # step after the end of its time.
        start = first * step - step // 2
        end = start + (stop - first + 1) * step
        block_S = _padded(wave_S, start, end)
        overlapping = np.lib.stride_tricks.sliding_window_view(block_S, length)
        frames_TL = overlapping[::step] * window_L
        spectrum_TF = np.fft.rfft(frames_TL)
        power_TF = spectrum_TF.real**2 + spectrum_TF.imag**2
        power_TB[first:stop] = power_TF @ is_in_band_FB
    return power_TB / length**2 + np.float32(FLOOR_POWER)


def _bands_of_frequencies(length: int, sample_rate: int) -> NDArray[np.bool_]:
    """Return whether each frequency of frames of `length` samples is in each band, (F, B)."""
    # The lower bounds of the bands; frequencies below the lowest are in no band.
    highest = min(HIGHEST_HZ, sample_rate / 2)
    bounds = np.geomspace(SECOND_HZ, highest, NUM_BANDS)
    lower_bounds = [LOWEST_HZ, *bounds[:-1]]
    frequency_F = np.fft.rfftfreq(length, 1 / sample_rate)
    band_F = np.searchsorted(lower_bounds, frequency_F, side="right") - 1
    return band_F[:, None] == np.arange(NUM_BANDS)


def _padded(wave_S: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return samples start to end - 1, float32, with zeros for those outside the wave."""
    inside_S = wave_S[max(start, 0) : end].astype(np.float32)
    num_outside = (end - start) - len(inside_S)
    num_before = max(-start, 0)
    num_after = num_outside - num_before
    return np.pad(inside_S, (num_before, num_after))
