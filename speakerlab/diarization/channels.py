"""Cross-talk between the channels of a call. In: waves and speech regions. Out: regions.

A microphone or a telephone line picks up the voice of another channel, too: later, quieter and
filtered. In such pieces of time a channel has no speech of its own.
Letters: S samples, P pieces of the regions of a channel, F frequencies.
"""

from collections.abc import Sequence

import numpy as np

from speakerlab.diarization.regions import Region, merge_regions
from speakerlab.diarization.windows import MIN_SPEECH_SECONDS

PIECE_SECONDS = 0.25
WINDOW_SECONDS = 0.5  # around a piece, in which channels are compared
LAG_SECONDS = 0.05  # largest delay of cross-talk
# Sentences of two speakers have a similarity below 0.15 in 99 % of the windows; a sentence and its
# copy by a room, with noise 10 dB below it, one of 0.2 or more in 75 %.
MIN_SIMILARITY = 0.2
# There is cross-talk if so many of the pieces in which another channel is louder are similar to it.
MIN_SIMILAR_SHARE = 0.2
MIN_SIMILAR = 2
# The channel's own speech makes it louder than cross-talk alone.
OWN_SPEECH_DB = 6.0
EQUAL_DB = 0.5  # of copies that are equally loud, the first channel counts


def remove_cross_talk(
    waves: Sequence[np.ndarray],
    regions_of: Sequence[Sequence[Region]],
    *,
    sample_rate: int,
) -> list[list[Region]]:
    """Return the regions of each channel without the pieces that are a copy of a louder channel.

    waves: wave_S of each channel, of the same length; regions_of: speech regions of each channel.
    """
    own_regions: list[list[Region]] = []
    for channel, regions in enumerate(regions_of):
        pieces = _cut(regions)
        is_copy_P = _find_copies(waves, channel, pieces, sample_rate)
        own_pieces = [piece for piece, is_copy in zip(pieces, is_copy_P) if not is_copy]
        own: list[Region] = []
        for start, end in merge_regions(own_pieces):
            # A short region is as it was found, unless cross-talk was removed around it.
            if end - start >= MIN_SPEECH_SECONDS or (start, end) in regions:
                own.append((start, end))
        own_regions.append(own)
    return own_regions


def _cut(regions: Sequence[Region]) -> list[Region]:
    """Return consecutive pieces of the regions; the last of a region may be shorter."""
    pieces: list[Region] = []
    for start, end in regions:
        num_pieces = max(int(np.ceil((end - start) / PIECE_SECONDS - 1e-9)), 1)
        bounds = [start + index * PIECE_SECONDS for index in range(num_pieces)]
        pieces += zip(bounds, [*bounds[1:], end])
    return pieces


def _find_copies(
    waves: Sequence[np.ndarray],
    channel: int,
    pieces: Sequence[Region],
    sample_rate: int,
) -> np.ndarray:
    """Return whether each piece of a channel is only a copy of a louder channel, (P,)."""
    gain_P = np.zeros(len(pieces))
    is_quieter_P = np.zeros(len(pieces), dtype=np.bool_)
    is_similar_P = np.zeros(len(pieces), dtype=np.bool_)
    num_samples = round(WINDOW_SECONDS * sample_rate)
    max_lag = round(LAG_SECONDS * sample_rate)
    for index, (start, end) in enumerate(pieces):
        middle = round((start + end) / 2 * sample_rate)
        first = max(middle - num_samples // 2, 0)
        windows = [_window(wave_S, first, num_samples) for wave_S in waves]
        levels_db = [_level_db(window_S) for window_S in windows]
        others = [other for other in range(len(waves)) if other != channel]
        loudest = max(others, key=lambda other: levels_db[other])
        gain_P[index] = levels_db[channel] - levels_db[loudest]
        limit_db = EQUAL_DB if loudest < channel else -EQUAL_DB
        if gain_P[index] < limit_db:
            is_quieter_P[index] = True
            similarity = _similarity(windows[channel], windows[loudest], max_lag)
            is_similar_P[index] = similarity >= MIN_SIMILARITY

    num_similar = is_similar_P.sum()
    least = max(MIN_SIMILAR_SHARE * is_quieter_P.sum(), MIN_SIMILAR)
    if num_similar < least:
        return np.zeros(len(pieces), dtype=np.bool_)
    # Reverberation and noise hide some copies; all are about as much quieter.
    copy_gain = np.median(gain_P[is_similar_P])
    return is_quieter_P & (gain_P <= copy_gain + OWN_SPEECH_DB)


def _window(wave_S: np.ndarray, first: int, num_samples: int) -> np.ndarray:
    """Return a window around its mean, float32; zeros follow the end of the wave."""
    window_S = np.asarray(wave_S[first : first + num_samples], dtype=np.float32)
    if len(window_S):
        window_S = window_S - window_S.mean()
    return np.pad(window_S, (0, num_samples - len(window_S)))


def _level_db(window_S: np.ndarray) -> float:
    """Return the level of a window of 16-bit samples, in dB, at least 0."""
    power = float(window_S @ window_S) / len(window_S)
    return 10 * np.log10(max(power, 1.0))


def _similarity(a_S: np.ndarray, b_S: np.ndarray, max_lag: int) -> float:
    """Return the largest correlation of two windows within a lag: 1 for copies.

    Spectra are flattened by half in dB: the strong low frequencies of two voices are similar.
    """
    length = 2 * len(a_S)
    spectrum_a_F = np.fft.rfft(a_S, length)
    spectrum_b_F = np.fft.rfft(b_S, length)
    power_a = np.abs(spectrum_a_F).sum()
    power_b = np.abs(spectrum_b_F).sum()
    if power_a == 0 or power_b == 0:
        return 0.0
    cross_F = spectrum_a_F * spectrum_b_F.conj()
    flattened_F = cross_F / np.sqrt(np.abs(cross_F) + 1e-9)
    correlation_S = np.abs(np.fft.irfft(flattened_F))
    peak = max(correlation_S[: max_lag + 1].max(), correlation_S[-max_lag:].max())
    return float(peak * len(cross_F) / np.sqrt(power_a * power_b))
