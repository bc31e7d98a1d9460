"""Levels of a recording, to find sample values that no recording of speech has.

Speech is neither steady nor white, it has both signs, and it uses a good part of the full scale.
Values of another scale or sample format, tones and noise differ in that. The extremes in comments
are of 2,267 recordings of speech: LibriSpeech, speechocean762, Speech Commands and AMI.
Letters: S samples, T frames, L samples of a frame, N spectra, F frequencies.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from speakerlab.data.decoders import BLOCK_SAMPLES, FULL_SCALE

# The lowest peak of speech is -34 dB of full scale. Below three steps of 16 bits, -80 dB, nothing
# can be understood; 16-bit values in int32 have a peak below -90 dB, 24-bit values below -48 dB.
SILENT_DB = -80.0
FAINT_DB = -48.0
INT24_DB = -48.0
# The largest mean is 0.12, of a speaker of LibriSpeech; values from 0 to 1 have one of 0.5.
MAX_OFFSET = 0.25
# At most 4.7 % of the samples of speech are near the peak, in 99 % of the recordings 0.6 %. At
# three times full scale, clipping leaves 2 to 8 % there, at ten times 14 to 38 %.
MAX_CLIPPED = 0.05
NEAR_PEAK = 0.99
# A sine is near its peak, too, but round: a third of these samples is that near. Of clipped ones,
# nine tenths are.
AT_PEAK = 0.999
MIN_FLAT_SHARE = 0.5
MIN_SECONDS = 1.0  # a shorter recording may be a single sound
# Shorter than a short syllable. The share of clipped samples of so few says nothing.
MIN_VOICE_SECONDS = 0.1
# The correlation of neighbouring samples is 0.4 or more in 99 % of the recordings of speech. In
# white noise, it is 0 at all distances; where two sounds alternate, as in interleaved channels, at
# odd distances only. Neither occurs in 10,000 pieces of speech of 1 and 3 s. With bytes in the
# wrong order, neighbours reach 0.32, but at full scale: the power of uniform noise is 0.33, of
# speech at most 0.14, and then with a correlation of 0.5 or more.
MAX_WHITE = 0.05
MIN_ALTERNATING = 0.4
MAX_DISTANCE = 8
MAX_LOUD_WHITE = 0.5
LOUD_POWER = 0.16
# The levels of the frames near the loudest have a standard deviation of 1.3 dB or more in speech,
# of 0.2 dB in white and 0.6 dB in pink noise, and of 0 dB in a tone.
FRAME_SECONDS = 0.05
NEAR_LOUDEST_DB = 20.0
MIN_SPREAD_DB = 0.7
# A held vowel may be as steady. The spectrum of noise is flatter: its geometric mean by its mean
# is 1 for white and 0.5 for pink noise. At any time, the spectrum of a tone, a chirp or a dialled
# digit is a few lines.
SPECTRUM_SAMPLES = 1024
MIN_FLATNESS = 0.03
LINES_SHARE = 0.03  # of the frequencies
MIN_TONE_POWER = 0.999  # share of the power in these lines
# Of speech, at most 0.7 % are digital zeros at the beginning and the end.
MAX_ZEROS = 0.4
MAX_NAMES = 3  # in a line about recordings of one kind
# Kinds of faults, which continue "N recordings ".
SILENT = "are silent"
FAINT = "are too faint for speech"
OFFSET = "are far from 0 in their mean"
OTHER_SOUND = "are noise or tones"
CLIPPED = "are clipped"
PADDED = "are mostly digital silence"
KINDS = (SILENT, FAINT, OFFSET, OTHER_SOUND, CLIPPED, PADDED)


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


def find_fault(wave_S: np.ndarray, levels: Levels, *, sample_rate: int) -> str | None:
    """Return what shows that a wave is no recording of speech; None if it may be one.

    levels: of `measure`. The text continues "NAME: ".
    """
    fault = classify(wave_S, levels, sample_rate=sample_rate)
    return None if fault is None else fault.text


def find_kind(wave_S: np.ndarray, *, sample_rate: int) -> str | None:
    """Return the fault of a wave as one of KINDS; None if it may be a recording of speech."""
    if not len(wave_S):
        return None
    levels = measure(wave_S, sample_rate=sample_rate)
    fault = classify(wave_S, levels, sample_rate=sample_rate)
    if fault is not None:
        return fault.kind
    return None if find_padding(wave_S) is None else PADDED


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


def classify(wave_S: np.ndarray, levels: Levels, *, sample_rate: int) -> Fault | None:
    """Return what shows that a wave is no recording of speech, as `find_fault`, with its kind."""
    if levels.peak_db < FAINT_DB:
        kind = SILENT if levels.peak_db < SILENT_DB else FAINT
        text = (
            f"has a peak of {levels.peak_db:.0f} dB of full scale, too faint for speech"
        )
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
    clipped = clipped_share(wave_S, levels)
    if clipped > MAX_CLIPPED:
        return Fault(CLIPPED, f"is clipped in {100 * clipped:.0f} % of its samples")
    return None


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
    lowest, highest = np.inf, -np.inf
    total = energy = products = 0.0
    powers: list[np.ndarray] = []
    average_L = np.full(frame_samples, 1 / frame_samples, dtype=np.float32)
    for block_S in _blocks(wave_S, multiple=frame_samples):
        lowest = min(lowest, float(block_S.min()))
        highest = max(highest, float(block_S.max()))
        products += float(block_S[1:] @ block_S[:-1])

        # Products with a matrix, because sums along rows take most of the time here.
        num_framed = len(block_S) // frame_samples * frame_samples
        frames_TL = block_S[:num_framed].reshape(-1, frame_samples)
        mean_T = frames_TL @ average_L
        energy_T = np.einsum("tl,tl->t", frames_TL, frames_TL)
        powers.append(energy_T / frame_samples - mean_T**2)
        rest_S = block_S[num_framed:]
        total += float(mean_T.sum() * frame_samples + rest_S.sum())
        energy += float(energy_T.sum() + rest_S @ rest_S)

    num_samples = len(wave_S)
    mean = total / num_samples
    power = max(energy / num_samples - mean**2, 0.0)
    covariance = products / num_samples - mean**2
    correlation = covariance / power if power > 0 else 0.0
    return Levels(
        lowest=lowest,
        highest=highest,
        mean=mean,
        power=power,
        correlation=correlation,
        spread_db=_spread_db(np.concatenate(powers)),
    )


def is_white(wave_S: np.ndarray, levels: Levels) -> bool:
    """Return whether samples have nothing to do with their neighbours."""
    if levels.power > LOUD_POWER and abs(levels.correlation) < MAX_LOUD_WHITE:
        return True
    # Most recordings are decided here.
    if abs(levels.correlation) >= MAX_WHITE:
        return False
    block_S = next(_blocks(wave_S))
    centred_S = block_S - np.float32(levels.mean)
    energy = float(centred_S @ centred_S)
    correlations: list[float] = []
    for distance in range(1, MAX_DISTANCE + 1):
        product = float(centred_S[distance:] @ centred_S[:-distance])
        correlations.append(product / energy)
    odd, even = correlations[::2], correlations[1::2]
    if max(map(abs, odd)) >= MAX_WHITE:
        return False
    return even[0] > MIN_ALTERNATING or max(map(abs, even)) < MAX_WHITE


def clipped_share(wave_S: np.ndarray, levels: Levels) -> float:
    """Return the share of clipped samples; 0.0 if it cannot exceed MAX_CLIPPED."""
    # Resampling takes clipped samples beyond full scale.
    peak = min(max(levels.highest, -levels.lowest), 1.0)
    # So many samples near the peak have at least this power: few recordings need the count.
    least_power = MAX_CLIPPED * (NEAR_PEAK * peak) ** 2
    if levels.power + levels.mean**2 < least_power:
        return 0.0
    num_near = num_at = 0
    for block_S in _blocks(wave_S):
        magnitude_S = np.abs(block_S)
        num_near += int(np.count_nonzero(magnitude_S >= NEAR_PEAK * peak))
        num_at += int(np.count_nonzero(magnitude_S >= AT_PEAK * peak))
    is_flat = num_at >= MIN_FLAT_SHARE * num_near
    return num_near / len(wave_S) if is_flat else 0.0


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

    # A chirp has other lines at another time. The median leaves out the ends of dialled digits.
    total_N = power_NF.sum(axis=1)
    if not total_N.any():
        return None
    is_loud_N = total_N > 10 ** (-NEAR_LOUDEST_DB / 10) * total_N.max()
    strongest_NF = np.sort(power_NF[is_loud_N], axis=1)
    num_lines = round(LINES_SHARE * strongest_NF.shape[1])
    lines_N = strongest_NF[:, -num_lines:].sum(axis=1)
    if np.median(lines_N / total_N[is_loud_N]) > MIN_TONE_POWER:
        return "a tone"

    power_F = power_NF.mean(axis=0)
    flatness = np.exp(np.log(power_F + 1e-12).mean()) / power_F.mean()
    return "steady noise" if flatness > MIN_FLATNESS else None


def find_shortness(wave_S: np.ndarray, *, sample_rate: int) -> str | None:
    """Return what shows that a wave is too short, as `find_fault`; None if it may have a voice."""
    if len(wave_S) >= MIN_VOICE_SECONDS * sample_rate:
        return None
    return f"lasts {1000 * len(wave_S) / sample_rate:.0f} ms, too short for a voice"


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


def _spread_db(power_T: np.ndarray) -> float:
    """Return the standard deviation in dB of the frames near the loudest; inf without frames."""
    if not len(power_T):
        return np.inf
    level_T = 10 * np.log10(np.maximum(power_T, 1e-12))
    level_T.sort()
    near_T = level_T[level_T >= level_T[-1] - NEAR_LOUDEST_DB]
    # A tone that begins or ends within a frame is not steady in that frame.
    num_outer = len(near_T) // 10
    inner_T = near_T[num_outer : len(near_T) - num_outer]
    return float(inner_T.std())
