"""Pitch: a crop becomes higher or lower, formants included; tempo and length stay.

A phase vocoder makes the crop longer at the same pitch, and reading it faster restores its length
at another pitch. The vocoder puts frames that are taken from the crop every G / ratio samples at
distances of G. In each bin the phase has to advance by what the sound advances in G samples. So
each place is taken twice, G samples apart, and the differences of the two phases are added up
(Puckette, "Phase-locked vocoder", IEEE Workshop on Applications of Signal Processing to Audio and
Acoustics, 1995). The bins around a harmonic have to turn by the same angle (Laroche & Dolson,
"Improved phase vocoder time-scale modification of audio", IEEE Transactions on Speech and Audio
Processing, 1999). Here a bin turns by the mean of its neighbours, weighted by amplitude, instead of
by the nearest peak: the choice of a peak would make large differences out of rounding errors.

Letters: R rows that are changed, S samples, T frames, N samples of a frame, G samples from one
frame to the next, K = N / 2 + 1 bins of a spectrum, P places between two samples, L taps.
"""

from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional as F

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation
from speakerlab.frontend.augment.spectra import (
    Frames,
    at_level_of,
    overlap_add,
    refuse_range,
    rows_at_once,
)

OCTAVE = 12  # semitones; larger changes are refused
# Several periods of a low voice: the harmonics are in different bins.
FRAME_SECONDS = 0.05
NEIGHBOURS = 2  # on each side; a harmonic fills four bins
# Bins over which the spectrum falls to 0 where the new pitch exceeds the highest frequency.
EDGE_BINS = 4.0

# A ratio of pitches is an integer in units of 2^-16: 1.5 is 98304. So positions in a crop are exact
# on any device, and `>> RATIO_BITS` takes their whole samples.
RATIO_BITS = 16
# The longer wave has twice the samples, so that few taps suffice between them. A Kaiser window of
# this shape leaves -58 dB of the images that are beyond its frequencies.
OVERSAMPLING = 2
NUM_TAPS = 8
KAISER_BETA = 5.4
PLACE_BITS = 9  # 512 places between two samples: the highest bits below a whole sample


class Pitch(Augmentation):
    """Change of pitch by a number of semitones from `pitch_semitones`, at the same tempo.

    The result is the voice of nobody. Use it where the changed crop gets a target of its own, as
    from a teacher that hears the crop. With speaker labels, the crop would keep the label of a
    speaker who does not sound like that: unlike `speed`, this adds no classes.
    """

    changes_voice = True
    window: Tensor
    filters: Tensor

    def __init__(
        self,
        *,
        pitch_prob: Annotated[float, Ge(0), Le(1)],
        num_samples: int,
        pitch_semitones: tuple[float, float] = (-3.0, 3.0),
        sample_rate: int = 16000,
    ) -> None:
        """Take the [lowest, highest] number of semitones; above 0, the pitch becomes higher."""
        super().__init__()
        refuse_range(
            "pitch_semitones",
            pitch_semitones,
            lowest=-OCTAVE,
            highest=OCTAVE,
        )
        self.prob = pitch_prob
        self.pitch_semitones = pitch_semitones
        self.num_samples = num_samples
        self.frames = Frames(seconds=FRAME_SECONDS, sample_rate=sample_rate)

        # Every row has the frames that the highest pitch needs.
        highest = ratio_of(pitch_semitones[1])
        num_stretched = (num_samples * highest >> RATIO_BITS) + 1
        self.num_frames = self.frames.count(num_stretched)

        window_N = torch.hann_window(OVERSAMPLING * self.frames.length)
        self.register_buffer("window", window_N, persistent=False)
        self.register_buffer("filters", interpolation_filters(), persistent=False)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if rng.random() >= self.prob:
            return None
        low, high = self.pitch_semitones
        semitones = float(rng.uniform(low, high))
        return Draw({"semitones": semitones, "ratio": ratio_of(semitones)})

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        num_rows = rows_at_once(x_R)
        waves = x_R.split(num_rows)
        ratios = draws.values["ratio"].split(num_rows)
        shifted: list[Tensor] = []
        for wave_RS, ratio_R in zip(waves, ratios):
            shifted.append(self._shift(wave_RS, ratio_R[:, None]))
        return torch.cat(shifted)

    def _shift(self, wave_RS: Tensor, ratio_R1: Tensor) -> Tensor:
        """Return waves (R, S) whose frequencies are multiplied by the ratios."""
        here_RTK, before_RTK = self._spectra(wave_RS, ratio_R1)
        turned_RTK = here_RTK * rotations(here_RTK, before_RTK)
        band_RK = self._band(ratio_R1)
        audible_RTK = turned_RTK * band_RK[:, None]
        stretched = self._join(audible_RTK)
        pitched_RS = self._read(stretched, ratio_R1)
        return at_level_of(wave_RS, pitched_RS)

    def _spectra(self, x_RS: Tensor, ratio_R1: Tensor) -> tuple[Tensor, Tensor]:
        """Return spectra (R, T, K) of the places of all frames, and of one frame shift before."""
        shift = self.frames.shift
        # Frame t of the longer wave has its centre at (t - 1) G, and takes the sound from this time
        # divided by the ratio: an octave higher, frame 9 with its centre at 8 G takes it from 4 G.
        frame_T = torch.arange(self.num_frames, device=x_RS.device)
        centre_T = (frame_T - 1) * shift
        source_RT = torch.div(
            centre_T << RATIO_BITS,
            ratio_R1,
            rounding_mode="floor",
        )
        # Beyond the crop everything is zero: rows of lower pitches end there.
        source_RT = source_RT.clamp_max(self.num_samples + 3 * shift)

        # The first centre is at -2 G or later, a frame begins 2 G before its centre, and the frame
        # before another G: 5 G. Candidate k begins at the sample k - 5 G, so the frame that begins
        # 2 G before its centre is candidate centre + 3 G.
        padding = 5 * shift
        padded_RS = F.pad(x_RS, (padding, padding))
        candidates = padded_RS.unfold(1, self.frames.length, 1)
        candidate_RT = source_RT + 3 * shift
        row_R1 = torch.arange(len(x_RS), device=x_RS.device)[:, None]
        here_RTN = candidates[row_R1, candidate_RT]
        before_RTN = candidates[row_R1, candidate_RT - shift]
        here_RTK = torch.fft.rfft(here_RTN.mul_(self.frames.window))
        before_RTK = torch.fft.rfft(before_RTN.mul_(self.frames.window))
        return here_RTK, before_RTK

    def _band(self, ratio_R1: Tensor) -> Tensor:
        """Return factors (R, K): 0 for frequencies that would exceed the highest frequency."""
        highest_bin = self.frames.num_bins - 1
        bin_K = torch.arange(self.frames.num_bins, device=ratio_R1.device)
        limit_R1 = highest_bin * 2**RATIO_BITS / ratio_R1
        band_RK = (limit_R1 - bin_K) / EDGE_BINS
        return band_RK.clamp(0.0, 1.0)

    def _join(self, spectrum_RTK: Tensor) -> Tensor:
        """Return the longer waves, at twice the samples, from 3 G before the crop begins."""
        length = OVERSAMPLING * self.frames.length
        # The inverse FFT adds the missing frequencies, which are zero.
        frames_RTN = torch.fft.irfft(spectrum_RTK, n=length)
        frames_RTN *= self.window * OVERSAMPLING
        return overlap_add(frames_RTN)

    def _read(self, stretched: Tensor, ratio_R1: Tensor) -> Tensor:
        """Return the samples (R, S) of the longer waves, read `ratio` times as fast."""
        # The crop begins 3 G after the longer wave does.
        first = OVERSAMPLING * 3 * self.frames.shift
        sample_S = torch.arange(self.num_samples, device=stretched.device)
        position_RS = sample_S * (OVERSAMPLING * ratio_R1) + (first << RATIO_BITS)

        # The whole samples of a position, and the place between two samples: the position 10.75 has
        # the whole sample 10, the first tap at 10 - 3 = 7, and the place 0.75 * 512 = 384.
        whole_RS = position_RS >> RATIO_BITS
        begin_RS = whole_RS - (NUM_TAPS // 2 - 1)
        place_RS = position_RS >> (RATIO_BITS - PLACE_BITS)
        place_RS &= 2**PLACE_BITS - 1

        read_RS = torch.zeros_like(begin_RS, dtype=stretched.dtype)
        for tap, filter_P in enumerate(self.filters):
            sample_RS = stretched.gather(1, begin_RS + tap)
            filter_RP = filter_P.expand(len(place_RS), -1)
            weight_RS = filter_RP.gather(1, place_RS)
            read_RS.addcmul_(sample_RS, weight_RS)
        return read_RS


def ratio_of(semitones: float) -> int:
    """Return the ratio of two frequencies so many semitones apart, in units of 2^-16."""
    ratio = 2 ** (semitones / OCTAVE)
    return round(ratio * 2**RATIO_BITS)


def rotations(here_RTK: Tensor, before_RTK: Tensor) -> Tensor:
    """Return the factors of magnitude 1 that give each frame the phases of the longer wave."""
    # The phase of a frame is the sum of the advances up to it. The first frame keeps its phases.
    advance_RTK = here_RTK * before_RTK.conj()
    advance_RTK[:, 0] = here_RTK[:, 0]
    phase_RTK = unit(advance_RTK).cumprod(1)

    # From a bin's phase to its new phase, weighted by the bin's amplitude.
    turn_RTK = phase_RTK * here_RTK.conj()
    num_bins = turn_RTK.shape[2]
    padded_RTK = F.pad(turn_RTK, (NEIGHBOURS, NEIGHBOURS))
    num_summed = 2 * NEIGHBOURS + 1
    sum_RTK = padded_RTK[..., :num_bins].clone()
    for first in range(1, num_summed):
        sum_RTK += padded_RTK[..., first : first + num_bins]
    return unit(sum_RTK)


def unit(z: Tensor) -> Tensor:
    """Return complex numbers divided by their magnitudes; 1 for 0."""
    unit_z = torch.sgn(z)
    return unit_z.masked_fill_(unit_z == 0, 1)


def interpolation_filters() -> Tensor:
    """Return the weights (L, P) of L samples for each of P places between the middle two."""
    num_places = 2**PLACE_BITS
    half = NUM_TAPS // 2
    tap_L1 = np.arange(1 - half, half + 1)[:, None]
    distance_LP = tap_L1 - np.arange(num_places) / num_places
    shape_LP = np.sqrt(1 - (distance_LP / half) ** 2)
    window_LP = np.i0(KAISER_BETA * shape_LP) / np.i0(KAISER_BETA)
    weight_LP = np.sinc(distance_LP) * window_LP
    # The weights of a place sum to 1, so that a constant stays what it is.
    weight_LP /= weight_LP.sum(0)
    return torch.from_numpy(weight_LP).float()
