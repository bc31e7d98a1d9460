"""Find waves that are no recording of speech, by the levels of their samples.

A wave is wrong if its samples were read in another scale, format or number of channels, or if the
recording is a tone, noise or silence. `measure` collects statistics in one pass, and the checks
compare them with limits, in this order:

    kind          what shows it
    SILENT        a peak below -80 dB of full scale
    FAINT         a peak below -48 dB
    OFFSET        samples of one sign, or a mean far from 0
    OTHER_SOUND   white noise: neighbouring samples have nothing in common
                  other noise and tones: the level is steady, which that of syllables is not
    CLIPPED       more than 5 % of the samples at the peak
    PADDED        more than 40 % zeros at the beginning and the end

The limits are beyond the extremes of 2,267 recordings of speech, which comments give: LibriSpeech,
speechocean762, Speech Commands and AMI. They are above the functions that use them.

Letters: S samples, T frames, L samples of a frame, N spectra, F frequencies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from speakerlab.data.decoders import BLOCK_SAMPLES, FULL_SCALE

# Kinds of faults, which continue "N recordings ".
SILENT = "are silent"
FAINT = "are too faint for speech"
OFFSET = "are far from 0 in their mean"
OTHER_SOUND = "are noise or tones"
CLIPPED = "are clipped"
PADDED = "are mostly digital silence"
KINDS = (SILENT, FAINT, OFFSET, OTHER_SOUND, CLIPPED, PADDED)
MAX_NAMES = 3  # in a line about recordings of one kind

# Shorter than a short syllable. The share of clipped samples of so few says nothing.
MIN_VOICE_SECONDS = 0.1
MIN_SECONDS = 1.0  # a shorter recording may be a single sound


@dataclass(frozen=True)
class Levels:
    """Statistics of a wave; amplitudes are in [-1, 1]."""

    lowest: float
    highest: float
    mean: float
    power: float  # around the mean
    correlation: float  # of neighbouring samples
    spread_db: float  # standard deviation of the levels of the frames near the loudest

    @property
    def peak_db(self) -> float:
        """Return the largest distance from the mean, in dB of full scale."""
        peak = max(self.highest - self.mean, self.mean - self.lowest)
        return float(20 * np.log10(max(peak, 1e-10)))


class Fault(NamedTuple):
    """What shows that a wave is no recording of speech."""

    kind: str  # one of KINDS
    text: str  # continues "NAME: "


def find_kind(wave_S: np.ndarray, *, sample_rate: int) -> str | None:
    """Return the fault of a wave as one of KINDS; None if it may be a recording of speech."""
    if not len(wave_S):
        return None
    levels = measure(wave_S, sample_rate=sample_rate)
    fault = _find_fault(wave_S, levels, sample_rate=sample_rate)
    if fault is not None:
        return fault.kind
    return None if find_padding(wave_S) is None else PADDED


def find_fault(wave_S: np.ndarray, levels: Levels, *, sample_rate: int) -> str | None:
    """Return what shows that a wave is no recording of speech; None if it may be one.

    levels: of `measure`. The text continues "NAME: ". Zeros at the ends are no fault here: see
    `find_padding`.
    """
    fault = _find_fault(wave_S, levels, sample_rate=sample_rate)
    return None if fault is None else fault.text


def find_shortness(wave_S: np.ndarray, *, sample_rate: int) -> str | None:
    """Return what shows that a wave is too short, as `find_fault`; None if it may have a voice."""
    if len(wave_S) >= MIN_VOICE_SECONDS * sample_rate:
        return None
    return f"lasts {1000 * len(wave_S) / sample_rate:.0f} ms, too short for a voice"


def describe_kinds(
    kind_of: Mapping[str, str], total: int, *, where: str, unit: str
) -> list[str]:
    """Return a line for each kind of fault, with its number and the first names.

    kind_of: name -> one of KINDS. total: of all recordings or utterances; unit: these, in the
    plural.
    """
    names_of: dict[str, list[str]] = {}
    for name, kind in kind_of.items():
        names_of.setdefault(kind, []).append(name)
    lines: list[str] = []
    for kind in KINDS:
        names = names_of.get(kind, [])
        if not names:
            continue
        text = ", ".join(names[:MAX_NAMES])
        if len(names) > MAX_NAMES:
            text += ", ..."
        counts = f"{len(names)} of {total} {unit}"
        lines.append(f"{where}: {counts} {kind} ({text}); listen to them")
    return lines


# The lowest peak of speech is -34 dB of full scale. Below three steps of 16 bits, -80 dB, nothing
# can be understood. 16-bit values in int32 have a peak below -90 dB, 24-bit values in int32 and
# 8-bit values in int16 below -48 dB.
SILENT_DB = -80.0
FAINT_DB = -48.0
INT24_DB = -48.0
# The largest mean is 0.12, of a speaker of LibriSpeech; values from 0 to 1 have a mean of 0.5.
MAX_OFFSET = 0.25


def _find_fault(
    wave_S: np.ndarray, levels: Levels, *, sample_rate: int
) -> Fault | None:
    peak_db = levels.peak_db
    if peak_db < FAINT_DB:
        kind = SILENT if peak_db < SILENT_DB else FAINT
        text = f"has a peak of {peak_db:.0f} dB of full scale, too faint for speech"
        return Fault(kind, text)

    has_one_sign = levels.lowest >= 0 or levels.highest <= 0
    if has_one_sign or abs(levels.mean) > MAX_OFFSET:
        text = (
            f"has samples from {levels.lowest:.2f} to {levels.highest:.2f} around"
            f" {levels.mean:.2f} instead of 0: subtract the value of silence"
        )
        return Fault(OFFSET, text)

    sound = find_other_sound(wave_S, levels, sample_rate=sample_rate)
    if sound is not None:
        return Fault(OTHER_SOUND, f"is {sound}")

    if len(wave_S) < MIN_VOICE_SECONDS * sample_rate:
        return None
    share = clipped_share(wave_S, levels)
    if share > MAX_CLIPPED:
        return Fault(CLIPPED, f"is clipped in {100 * share:.0f} % of its samples")
    return None


# The levels of the frames near the loudest have a standard deviation of 1.3 dB or more in speech,
# of 0.2 dB in white and 0.6 dB in pink noise, and of 0 dB in a tone.
FRAME_SECONDS = 0.05
NEAR_LOUDEST_DB = 20.0
MIN_SPREAD_DB = 0.7


def find_other_sound(
    wave_S: np.ndarray, levels: Levels, *, sample_rate: int
) -> str | None:
    """Return the kind of sound of a wave without speech; None if it may be speech.

    levels: of `measure`. The text continues "NAME: is ".
    """
    if len(wave_S) < MIN_SECONDS * sample_rate:
        return None
    if is_white(wave_S, levels):
        return "white noise, as are samples read in a wrong format"
    if levels.spread_db >= MIN_SPREAD_DB:
        return None
    kind = steady_kind(wave_S)
    return None if kind is None else f"{kind}, not speech"


def measure(wave_S: np.ndarray, *, sample_rate: int) -> Levels:
    """Measure a wave of at least one sample, float32 in [-1, 1] or int16, block by block."""
    frame_samples = round(FRAME_SECONDS * sample_rate)
    average_L = np.full(frame_samples, 1 / frame_samples, dtype=np.float32)
    lowest = np.inf
    highest = -np.inf
    sum_of_samples = 0.0
    sum_of_squares = 0.0
    sum_of_products = 0.0  # of neighbouring samples
    powers: list[np.ndarray] = []  # of frames, around the mean of each
    for block_S in _blocks(wave_S, multiple=frame_samples):
        lowest = min(lowest, float(block_S.min()))
        highest = max(highest, float(block_S.max()))
        # The pair across two blocks is left out, one of 260,000.
        sum_of_products += float(block_S[1:] @ block_S[:-1])

        num_framed = len(block_S) // frame_samples * frame_samples
        frames_TL = block_S[:num_framed].reshape(-1, frame_samples)
        rest_S = block_S[num_framed:]  # only in the last block

        # Products, because sums along rows would take most of the time here.
        mean_T = frames_TL @ average_L
        energy_T = np.einsum("tl,tl->t", frames_TL, frames_TL)
        powers.append(energy_T / frame_samples - mean_T**2)
        sum_of_samples += float(mean_T.sum() * frame_samples + rest_S.sum())
        sum_of_squares += float(energy_T.sum() + rest_S @ rest_S)

    num_samples = len(wave_S)
    mean = sum_of_samples / num_samples
    power = max(sum_of_squares / num_samples - mean**2, 0.0)
    covariance = sum_of_products / num_samples - mean**2
    return Levels(
        lowest=lowest,
        highest=highest,
        mean=mean,
        power=power,
        correlation=covariance / power if power > 0 else 0.0,
        spread_db=_spread_db(np.concatenate(powers)),
    )


def _spread_db(power_T: np.ndarray) -> float:
    """Return the standard deviation in dB of the frames near the loudest; inf without frames."""
    if not len(power_T):
        return np.inf
    level_T = 10 * np.log10(np.maximum(power_T, 1e-12))
    level_T.sort()
    near_T = level_T[level_T >= level_T[-1] - NEAR_LOUDEST_DB]
    # A tone that begins or ends within a frame is not steady in that frame, so the tenth of the
    # frames with the lowest levels, and that with the highest, do not count.
    num_outer = len(near_T) // 10
    inner_T = near_T[num_outer : len(near_T) - num_outer]
    return float(inner_T.std())


# The correlation of neighbouring samples is 0.4 or more in 99 % of the recordings of speech. In
# white noise it is 0, at all distances. Neither that nor alternating sounds (see `is_white`) occur
# in 10,000 pieces of speech of 1 and 3 s.
MAX_WHITE = 0.05
MIN_ALTERNATING = 0.4
MAX_DISTANCE = 8  # in samples; even
TINY_ENERGY = 1e-30
# With bytes in the wrong order the correlation reaches 0.32, but at full scale: the power of
# uniform noise is 0.33. The power of speech is at most 0.14, and then its correlation 0.5 or more.
LOUD_POWER = 0.16
MAX_LOUD_WHITE = 0.5


def is_white(wave_S: np.ndarray, levels: Levels) -> bool:
    """Return whether samples have nothing to do with their neighbours.

    The same is true of two alternating sounds, as in interleaved channels a b a b: samples at an
    even distance are of the same sound, and correlated; samples at an odd distance are not.
    """
    correlation = abs(levels.correlation)
    if levels.power > LOUD_POWER and correlation < MAX_LOUD_WHITE:
        return True
    # Most recordings are decided here.
    if correlation >= MAX_WHITE:
        return False

    correlations = _correlations(next(_blocks(wave_S)), levels.mean)
    at_odd = correlations[::2]  # distances 1, 3, 5, 7
    at_even = correlations[1::2]  # distances 2, 4, 6, 8
    if max(map(abs, at_odd)) >= MAX_WHITE:
        return False
    is_alternating = at_even[0] > MIN_ALTERNATING
    return is_alternating or max(map(abs, at_even)) < MAX_WHITE


def _correlations(block_S: np.ndarray, mean: float) -> list[float]:
    """Return the correlations of samples at the distances 1 to MAX_DISTANCE."""
    centred_S = block_S - np.float32(mean)
    energy = float(centred_S @ centred_S)
    # A block of equal samples, such as silence at the mean of the wave, has no correlations.
    energy = max(energy, TINY_ENERGY)
    correlations: list[float] = []
    for distance in range(1, MAX_DISTANCE + 1):
        product = float(centred_S[distance:] @ centred_S[:-distance])
        correlations.append(product / energy)
    return correlations


# A steady sound is not always noise or a tone: a held vowel may be as steady. The spectrum of noise
# is flatter: its geometric mean by its mean is 1 for white and 0.5 for pink noise. The spectrum of
# a tone, a chirp or a dialled digit is a few lines at any time.
SPECTRUM_SAMPLES = 1024
MIN_FLATNESS = 0.03
LINES_SHARE = 0.03  # of the frequencies
MIN_TONE_POWER = 0.999  # share of the power in these lines


def steady_kind(wave_S: np.ndarray) -> str | None:
    """Return "a tone" or "steady noise", the kind of a steady wave; None for a held vowel."""
    block_S = next(_blocks(wave_S))
    num_spectra = len(block_S) // SPECTRUM_SAMPLES
    if not num_spectra:
        return None
    frames_NL = block_S[: num_spectra * SPECTRUM_SAMPLES].reshape(num_spectra, -1)
    centred_NL = frames_NL - frames_NL.mean(axis=1, keepdims=True)
    spectrum_NF = np.fft.rfft(centred_NL * np.hanning(SPECTRUM_SAMPLES))
    power_NF = np.abs(spectrum_NF) ** 2
    if not power_NF.any():
        return None
    if _is_tone(power_NF):
        return "a tone"
    power_F = power_NF.mean(axis=0)
    flatness = np.exp(np.log(power_F + 1e-12).mean()) / power_F.mean()
    return "steady noise" if flatness > MIN_FLATNESS else None


def _is_tone(power_NF: np.ndarray) -> bool:
    """Return whether a few lines have all the power in most of the loud spectra.

    Each spectrum has lines of its own, because a chirp has other lines at another time. The median
    leaves out the spectra at the ends of dialled digits.
    """
    power_N = power_NF.sum(axis=1)
    lowest_power = power_N.max() * 10 ** (-NEAR_LOUDEST_DB / 10)
    is_loud_N = power_N > lowest_power
    loud_NF = power_NF[is_loud_N]

    num_lines = round(LINES_SHARE * loud_NF.shape[1])
    ascending_NF = np.sort(loud_NF, axis=1)
    strongest_NF = ascending_NF[:, -num_lines:]
    share_N = strongest_NF.sum(axis=1) / power_N[is_loud_N]
    return bool(np.median(share_N) > MIN_TONE_POWER)


# At most 4.7 % of the samples of speech are near the peak, in 99 % of the recordings 0.6 %. At
# three times full scale, clipping leaves 2 to 8 % there, at ten times 14 to 38 %.
MAX_CLIPPED = 0.05
NEAR_PEAK = 0.99
# A sine is near its peak, too, but round: a third of these samples is that near. Of clipped ones,
# nine tenths are.
AT_PEAK = 0.999
MIN_FLAT_SHARE = 0.5


def clipped_share(wave_S: np.ndarray, levels: Levels) -> float:
    """Return the share of clipped samples; 0.0 if it cannot exceed MAX_CLIPPED."""
    # Resampling takes clipped samples beyond full scale.
    peak = min(max(levels.highest, -levels.lowest), 1.0)
    # A share of MAX_CLIPPED has at least this power. Most recordings have less, and are not read
    # again.
    least_power = MAX_CLIPPED * (NEAR_PEAK * peak) ** 2
    if levels.power + levels.mean**2 < least_power:
        return 0.0

    num_near = 0
    num_at = 0
    for block_S in _blocks(wave_S):
        magnitude_S = np.abs(block_S)
        num_near += int(np.count_nonzero(magnitude_S >= NEAR_PEAK * peak))
        num_at += int(np.count_nonzero(magnitude_S >= AT_PEAK * peak))
    is_flat = num_at >= MIN_FLAT_SHARE * num_near
    return num_near / len(wave_S) if is_flat else 0.0


# Of speech, at most 0.7 % are digital zeros at the beginning and the end.
MAX_ZEROS = 0.4


def find_padding(wave_S: np.ndarray) -> str | None:
    """Return what shows that a wave is padded with zeros, as `find_fault`; None if it is not."""
    if wave_S[0] != 0 and wave_S[-1] != 0:
        return None
    is_sound_S = wave_S != 0
    num_before = int(is_sound_S.argmax())
    num_after = int(is_sound_S[::-1].argmax())
    share = (num_before + num_after) / len(wave_S)
    if share <= MAX_ZEROS:
        return None
    return f"is digital silence for {100 * share:.0f} % of its length, at its ends"


def _blocks(wave_S: np.ndarray, *, multiple: int = 1) -> Iterator[np.ndarray]:
    """Yield parts of a wave, float32 in [-1, 1]; all but the last a multiple of samples long."""
    size = BLOCK_SAMPLES // multiple * multiple
    for start in range(0, len(wave_S), size):
        block_S = np.asarray(wave_S[start : start + size])
        if block_S.dtype == np.int16:
            block_S = block_S.astype(np.float32) / FULL_SCALE
        yield block_S
