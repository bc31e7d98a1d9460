"""Cross-talk between the channels of a call. In: waves and speech regions. Out: regions.

A microphone or a telephone line picks up the voice of another channel, too: later, quieter and
filtered. Where both channels have the same sound, the gain of each frequency band from one to the
other is measured. A channel then speaks itself where it is louder than the other channels, through
these gains, explain. So both sides may speak at once, and the levels of the lines do not matter.
Letters: S samples, T frames, L samples of a frame, F frequencies, B bands, N windows, M channels.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

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

# Frames in which speech is compared with the cross-talk that is expected.
FRAME_SECONDS = 0.02
NUM_BANDS = 16
LOWEST_HZ, SECOND_HZ, HIGHEST_HZ = 80, 200, 8000  # bounds of the bands
FLOOR_POWER = 1e-3  # of 16-bit samples, below the steps of rounding
# Cross-talk lasts longer than the speech: a delay is no whole number of frames, and rooms echo.
FRAMES_BEFORE = 1
FRAMES_AFTER = 2
# The following was chosen on calls of training speakers of speechocean762 (benchmarks/calls.py).
OWN_SPEECH_DB = 6.0  # by which a channel's own speech exceeds the expected cross-talk
RANGE_DB = (-20.0, 30.0)  # of this excess in a band
# Frames count by their level as in `find_speech` with `energy`.
LOUDEST, NOISE = 99, 5  # percentiles
BELOW_LOUDEST_DB = 30.0
ABOVE_NOISE = 0.25
CONTEXT_FRAMES = 5
MIN_CONTEXT_SHARE = 0.25


class Leak(NamedTuple):
    """Cross-talk from one channel in another."""

    gain_B: np.ndarray  # of powers
    lag: int  # frames by which it is later; negative: earlier


class Window(NamedTuple):
    """The same time of two channels."""

    frame: int  # the first
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
    A region in which nothing is heard of other channels is as it was found.
    """
    power_of = [_band_powers(wave_S, sample_rate) for wave_S in waves]
    leaks = _find_leaks(waves, power_of, regions_of, sample_rate)
    own_regions: list[list[Region]] = []
    for channel, regions in enumerate(regions_of):
        expected_TB = np.zeros_like(power_of[channel])
        for (source, target), leak in leaks.items():
            if target == channel:
                expected_TB += leak.gain_B * _delayed(power_of[source], leak.lag)
        if expected_TB.any():
            # Where cross-talk is quiet, only its sum with the noise is expected.
            noise_B = np.percentile(power_of[channel], NOISE, axis=0)
            expected_TB += noise_B
            regions = _keep_own(regions, power_of[channel], expected_TB)
        own_regions.append(list(regions))
    return own_regions


def _keep_own(
    regions: Sequence[Region], power_TB: np.ndarray, expected_TB: np.ndarray
) -> list[Region]:
    """Return the regions without cross-talk, given its expected power."""
    is_own_T = _excess_db(power_TB, expected_TB) > OWN_SPEECH_DB
    is_loud_T = _is_loud(power_TB)
    is_heard_T = is_loud_T & ~is_own_T
    # A word is found by most of its frames, not by a single one.
    context_T = np.ones(2 * CONTEXT_FRAMES + 1)
    num_own_T = np.convolve(is_loud_T & is_own_T, context_T)
    num_own_T = num_own_T[CONTEXT_FRAMES : CONTEXT_FRAMES + len(is_own_T)]
    own_speech = speech_regions(
        num_own_T >= MIN_CONTEXT_SHARE * len(context_T),
        frame_seconds=FRAME_SECONDS,
    )

    kept: list[Region] = []
    for start, end in regions:
        first = int(start / FRAME_SECONDS)
        stop = int(np.ceil(end / FRAME_SECONDS))
        if not is_heard_T[first:stop].any():
            kept.append((start, end))
            continue
        for own_start, own_end in own_speech:
            low, high = max(start, own_start), min(end, own_end)
            if high - low >= MIN_SPEECH_SECONDS:
                kept.append((low, high))
    return merge_regions(kept)


def _is_loud(power_TB: np.ndarray) -> np.ndarray:
    """Return whether each frame is as loud as speech, (T,)."""
    level_T = 10 * np.log10(power_TB.sum(axis=1))
    noise, loudest = np.percentile(level_T, [NOISE, LOUDEST])
    above_noise = noise + ABOVE_NOISE * (loudest - noise)
    return level_T >= max(loudest - BELOW_LOUDEST_DB, above_noise)


def _excess_db(power_TB: np.ndarray, expected_TB: np.ndarray) -> np.ndarray:
    """Return by how much frames exceed what is expected, (T,): the mean over the bands.

    Bands count by their amplitudes: one that has no speech shows nothing.
    """
    excess_TB = 10 * np.log10(power_TB / (expected_TB + FLOOR_POWER))
    excess_TB = np.clip(excess_TB, *RANGE_DB)
    weight_TB = np.sqrt(power_TB)
    return (excess_TB * weight_TB).sum(axis=1) / weight_TB.sum(axis=1)


def _find_leaks(
    waves: Sequence[np.ndarray],
    power_of: Sequence[np.ndarray],
    regions_of: Sequence[Sequence[Region]],
    sample_rate: int,
) -> dict[tuple[int, int], Leak]:
    """Return the cross-talk in each direction that has some: (source, target) -> Leak."""
    starts = _window_starts(regions_of)
    level_NM = _levels_db(waves, starts, sample_rate)
    leaks: dict[tuple[int, int], Leak] = {}
    for first, second in combinations(range(len(waves)), 2):
        # What two channels hear of a third, louder one is no cross-talk between them.
        is_louder_N = level_NM[:, [first, second]].max(axis=1) >= level_NM.max(axis=1)
        windows: list[Window] = []
        for index in np.flatnonzero(is_louder_N).tolist():
            gain_db = float(level_NM[index, first] - level_NM[index, second])
            window = _compare(
                waves[first], waves[second], starts[index], gain_db, sample_rate
            )
            windows.append(window)

        # The channel that speaks is louder, but each line has a level of its own.
        similar = [window for window in windows if window.similarity >= MIN_SIMILARITY]
        bound_db = _find_bound([window.gain_db for window in similar])
        by_first = [window for window in windows if window.gain_db > bound_db]
        by_second = [window for window in windows if window.gain_db <= bound_db]
        for source, target, sign, spoken in (
            (first, second, 1, by_first),
            (second, first, -1, by_second),
        ):
            leak = _measure(spoken, power_of[source], power_of[target], sign)
            if leak is not None:
                leaks[source, target] = leak
    return leaks


def _window_starts(regions_of: Sequence[Sequence[Region]]) -> list[float]:
    """Return the starts, in seconds, of windows in the speech of any channel."""
    starts: list[float] = []
    for start, end in merge_regions(
        region for regions in regions_of for region in regions
    ):
        # The windows of a region begin and end half a step outside of it.
        num_windows = max(int(np.ceil((end - start) / STEP_SECONDS)), 1)
        first = start - (WINDOW_SECONDS - STEP_SECONDS) / 2
        places = first + STEP_SECONDS * np.arange(num_windows)
        starts += np.maximum(places, 0.0).tolist()
    num_sampled = min(len(starts), MAX_WINDOWS)
    rows = np.linspace(0, len(starts) - 1, num_sampled).round().astype(int)
    return [starts[row] for row in rows]


def _levels_db(
    waves: Sequence[np.ndarray], starts: Sequence[float], sample_rate: int
) -> np.ndarray:
    """Return the levels of 16-bit samples in dB, at least 0, (N, M)."""
    level_NM = np.zeros((len(starts), len(waves)))
    for index, start in enumerate(starts):
        for channel, wave_S in enumerate(waves):
            window_S = _samples(wave_S, start, sample_rate)
            power = float(window_S @ window_S) / len(window_S)
            level_NM[index, channel] = 10 * np.log10(max(power, 1.0))
    return level_NM


def _compare(
    first_S: np.ndarray,
    second_S: np.ndarray,
    start: float,
    gain_db: float,
    sample_rate: int,
) -> Window:
    similarity, lag = _similarity(
        _samples(second_S, start, sample_rate),
        _samples(first_S, start, sample_rate),
        round(LAG_SECONDS * sample_rate),
    )
    return Window(
        frame=round(start / FRAME_SECONDS),
        gain_db=gain_db,
        similarity=similarity,
        lag_seconds=lag / sample_rate,
    )


def _samples(wave_S: np.ndarray, start: float, sample_rate: int) -> np.ndarray:
    """Return a window around its mean, float32; zeros follow the end of the wave."""
    num_samples = round(WINDOW_SECONDS * sample_rate)
    first = round(start * sample_rate)
    window_S = np.asarray(wave_S[first : first + num_samples], dtype=np.float32)
    if len(window_S):
        window_S = window_S - window_S.mean()
    return np.pad(window_S, (0, num_samples - len(window_S)))


def _similarity(a_S: np.ndarray, b_S: np.ndarray, max_lag: int) -> tuple[float, int]:
    """Return the largest correlation of two windows, 1 for copies, and by how much a is later.

    Spectra are flattened by half in dB: the strong low frequencies of two voices are similar.
    """
    length = 2 * len(a_S)
    spectrum_a_F = np.fft.rfft(a_S, length)
    spectrum_b_F = np.fft.rfft(b_S, length)
    power_a = np.abs(spectrum_a_F).sum()
    power_b = np.abs(spectrum_b_F).sum()
    if power_a == 0 or power_b == 0:
        return 0.0, 0
    cross_F = spectrum_a_F * spectrum_b_F.conj()
    flattened_F = cross_F / np.sqrt(np.abs(cross_F) + 1e-9)
    correlation_S = np.abs(np.fft.irfft(flattened_F))
    # From the largest negative to the largest positive lag.
    near_S = np.concatenate([correlation_S[-max_lag:], correlation_S[: max_lag + 1]])
    lag = int(near_S.argmax())
    peak = near_S[lag] * len(cross_F) / np.sqrt(power_a * power_b)
    return float(peak), lag - max_lag


def _find_bound(gains_db: Sequence[float]) -> float:
    """Return the gain above which the first of two channels speaks, from gains of similar windows.

    That is 0 if only one of them is heard in the other, else the middle between the two groups of
    gains.
    """
    # Of equally loud copies, the first channel counts.
    equal = -EQUAL_DB
    if not gains_db:
        return equal
    gain_N = np.array(gains_db)
    low, high = gain_N.min(), gain_N.max()
    is_high_N = gain_N > (low + high) / 2
    # k-means with two groups.
    while high - low >= MIN_GROUPS_DB:
        low, high = gain_N[~is_high_N].mean(), gain_N[is_high_N].mean()
        was_high_N = is_high_N
        is_high_N = gain_N > (low + high) / 2
        if (is_high_N == was_high_N).all():
            num_smaller = min(is_high_N.sum(), (~is_high_N).sum())
            is_group = num_smaller >= max(MIN_SIMILAR, 0.1 * len(gain_N))
            return float(low + high) / 2 if is_group else equal
    return equal


def _measure(
    spoken: Sequence[Window],
    source_TB: np.ndarray,
    target_TB: np.ndarray,
    sign: int,
) -> Leak | None:
    """Measure the cross-talk in windows in which the source speaks; None if there is none."""
    similar = [window for window in spoken if window.similarity >= MIN_SIMILARITY]
    if len(similar) < max(MIN_SIMILAR_SHARE * len(spoken), MIN_SIMILAR):
        return None
    lag_seconds = sign * float(np.median([window.lag_seconds for window in similar]))
    lag = round(lag_seconds / FRAME_SECONDS)
    is_measured_T = np.zeros(len(source_TB), dtype=np.bool_)
    num_frames = round(WINDOW_SECONDS / FRAME_SECONDS)
    for window in similar:
        is_measured_T[window.frame : window.frame + num_frames] = True
    measured_TB = target_TB[is_measured_T]
    delayed_TB = _delayed(source_TB, lag)[is_measured_T]
    if not len(delayed_TB):
        return None
    # In quiet frames, only the noise would be measured.
    level_T = delayed_TB.sum(axis=1)
    is_loud_T = level_T >= np.percentile(level_T, 40)
    # The median, because in some frames the target speaks, too.
    gain_TB = measured_TB[is_loud_T] / delayed_TB[is_loud_T]
    return Leak(gain_B=np.median(gain_TB, axis=0), lag=lag)


def _delayed(power_TB: np.ndarray, lag: int) -> np.ndarray:
    """Return the largest power of the frames that cross-talk may come from."""
    num_frames = len(power_TB)
    largest_TB = np.full_like(power_TB, FLOOR_POWER)
    for shift in range(lag - FRAMES_BEFORE, lag + FRAMES_AFTER + 1):
        later, earlier = max(shift, 0), max(-shift, 0)
        if max(later, earlier) < num_frames:
            moved_TB = power_TB[earlier : num_frames - later]
            place_TB = largest_TB[later : num_frames - earlier]
            np.maximum(place_TB, moved_TB, out=place_TB)
    return largest_TB


def _band_powers(wave_S: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return the power in each band of frames around consecutive times, float32, (T, B)."""
    step = round(FRAME_SECONDS * sample_rate)
    num_frames = len(wave_S) // step
    window_L = np.hanning(2 * step).astype(np.float32)
    frequency_F = np.fft.rfftfreq(2 * step, 1 / sample_rate)
    highest = min(HIGHEST_HZ, sample_rate / 2)
    bounds = [LOWEST_HZ, *np.geomspace(SECOND_HZ, highest, NUM_BANDS)[:-1], np.inf]
    band_F = np.searchsorted(bounds, frequency_F, side="right") - 1
    is_in_band_FB = band_F[:, None] == np.arange(NUM_BANDS)

    powers = [np.zeros((0, NUM_BANDS), dtype=np.float32)]
    # In blocks, because frames of hours would need much memory.
    for first in range(0, num_frames, 4096):
        stop = min(first + 4096, num_frames)
        # A frame is twice as long as a step, around its middle.
        begin = first * step - step // 2
        block_S = wave_S[max(begin, 0) : stop * step + step].astype(np.float32)
        block_S = np.pad(block_S, (max(-begin, 0), 2 * step))
        frames_TL = np.lib.stride_tricks.sliding_window_view(block_S, 2 * step)
        frames_TL = frames_TL[::step][: stop - first] * window_L
        spectrum_TF = np.fft.rfft(frames_TL)
        power_TF = spectrum_TF.real**2 + spectrum_TF.imag**2
        powers.append((power_TF @ is_in_band_FB).astype(np.float32))
    return np.concatenate(powers) / (2 * step) ** 2 + np.float32(FLOOR_POWER)
