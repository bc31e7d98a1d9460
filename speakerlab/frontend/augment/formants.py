"""Formants: the resonances of the vocal tract move; pitch, tempo and length stay.

A vocal tract that is shorter by a factor has its resonances, the formants, higher by that factor
(Fant, "Acoustic theory of speech production", 1960). They are the envelope of the spectrum, and the
pitch is the distance between the harmonics under it. So the envelope is moved alone: each bin is
multiplied by the ratio of the moved envelope to the envelope. The envelope is the low part of the
real cepstrum (Oppenheim & Schafer, "Homomorphic analysis of speech", IEEE Transactions on Audio and
Electroacoustics, 1968): a sum of cosines over frequency, which has a value at any frequency.

Letters: R rows that are changed, S samples, T frames, N samples of a frame, K = N / 2 + 1 bins of a
spectrum, Q coefficients of the cepstrum.
"""

import math
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation
from speakerlab.frontend.augment.spectra import (
    Frames,
    at_level_of,
    refuse_range,
    rows_at_once,
)

FRAME_SECONDS = 0.032
# Length of the cepstrum: shorter than a period of voices up to 330 Hz, whose harmonics would
# otherwise count as envelope. Shorter ones miss more of the lowest formant.
ENVELOPE_SECONDS = 0.003
# Added to the power of a bin, whose rounding to int16 is about as much: bins without sound have a
# flat envelope.
POWER_FLOOR = 1e-8
# Limit for the gain of a bin. At the edge of a telephone's band, for example, the envelope falls by
# more, but what is beyond the edge is noise.
MAX_GAIN_DB = 20.0
# Factors that are accepted; adults differ less.
LOWEST_FACTOR = 0.5
HIGHEST_FACTOR = 2.0


class Formants(Augmentation):
    """Envelope of the spectrum, scaled along frequency by a factor from `formant_range`.

    The result is the voice of nobody. Use it where the changed crop gets a target of its own, as
    from a teacher that hears the crop. With speaker labels, the crop would keep the label of a
    speaker who does not sound like that: unlike `speed`, this adds no classes.
    """

    changes_voice = True
    frequency: Tensor
    coefficient: Tensor
    analysis: Tensor

    def __init__(
        self,
        *,
        formants_prob: Annotated[float, Ge(0), Le(1)],
        formant_range: tuple[float, float] = (0.85, 1.15),
        sample_rate: int = 16000,
    ) -> None:
        """Take the [lowest, highest] factor; above 1, formants become higher."""
        super().__init__()
        refuse_range(
            "formant_range",
            formant_range,
            lowest=LOWEST_FACTOR,
            highest=HIGHEST_FACTOR,
        )
        self.prob = formants_prob
        self.formant_range = formant_range
        self.frames = Frames(seconds=FRAME_SECONDS, sample_rate=sample_rate)

        num_bins = self.frames.num_bins
        frequency_K = torch.linspace(0, math.pi, num_bins, dtype=torch.float64)
        # Coefficient 0 is the level of a frame, which does not change.
        num_coefficients = max(1, round(ENVELOPE_SECONDS * sample_rate))
        coefficient_Q = torch.arange(1, num_coefficients + 1, dtype=torch.float64)
        analysis_KQ = cepstrum_matrix(frequency_K, coefficient_Q)
        self.register_buffer("frequency", frequency_K.float(), persistent=False)
        self.register_buffer("coefficient", coefficient_Q.float(), persistent=False)
        self.register_buffer("analysis", analysis_KQ.float(), persistent=False)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if rng.random() >= self.prob:
            return None
        # Evenly on a logarithmic scale: halving is as frequent as doubling.
        low, high = self.formant_range
        log_factor = rng.uniform(math.log(low), math.log(high))
        return Draw({"factor": math.exp(log_factor)})

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        num_rows = rows_at_once(x_R)
        waves = x_R.split(num_rows)
        factors = draws.values["factor"].split(num_rows)
        moved: list[Tensor] = []
        for wave_RS, factor_R in zip(waves, factors):
            moved.append(self._move(wave_RS, factor_R))
        return torch.cat(moved)

    def _move(self, wave_RS: Tensor, factor_R: Tensor) -> Tensor:
        """Return waves (R, S) whose envelopes are scaled by the factors."""
        frames_RTN = self.frames.cut(wave_RS)
        spectrum_RTK = torch.fft.rfft(frames_RTN)
        gain_RTK = self._gain(spectrum_RTK, factor_R)
        moved_RTK = spectrum_RTK * gain_RTK
        moved_RTN = torch.fft.irfft(moved_RTK, n=self.frames.length)
        num_samples = wave_RS.shape[1]
        moved_RS = self.frames.join(moved_RTN, num_samples=num_samples)
        return at_level_of(wave_RS, moved_RS)

    def _gain(self, spectrum_RTK: Tensor, factor_R: Tensor) -> Tensor:
        """Return the moved envelope over the envelope, of the amplitude of each bin."""
        parts_RTK2 = torch.view_as_real(spectrum_RTK)
        power_RTK = parts_RTK2.square().sum(-1)
        log_power_RTK = power_RTK.add_(POWER_FLOOR).log_()
        cepstrum_RTQ = log_power_RTK @ self.analysis

        # The moved envelope has at a frequency what the envelope has at frequency / factor: with a
        # factor of 1.25, at 1250 Hz what was at 1000 Hz. Where that exceeds the highest frequency,
        # it has the envelope's last value.
        source_RK = self.frequency / factor_R[:, None]
        source_RK = source_RK.clamp_max(math.pi)

        # Each envelope is a sum of cosines with the same coefficients, so is their log ratio.
        coefficient_Q1 = self.coefficient[:, None]
        moved_RQK = torch.cos(coefficient_Q1 * source_RK[:, None, :])
        envelope_QK = torch.cos(coefficient_Q1 * self.frequency)
        log_gain_RTK = cepstrum_RTQ @ (moved_RQK - envelope_QK)

        limit = MAX_GAIN_DB / 20 * math.log(10)  # from dB to a natural logarithm
        return log_gain_RTK.clamp_(-limit, limit).exp_()


def cepstrum_matrix(frequency_K: Tensor, coefficient_Q: Tensor) -> Tensor:
    """Return the matrix (K, Q) from log power to coefficients of the cepstrum.

    The sum over q of (coefficient q) x cos(q x frequency) is the log amplitude.
    """
    # A coefficient is a mean over the N = 2 K - 2 frequencies of both signs. All bins but the first
    # and the last stand for two of them: 1 + 2 + 2 + 2 + 1 = 8 for K = 5.
    num_bins = len(frequency_K)
    weight_K = torch.full_like(frequency_K, 2.0)
    weight_K[0] = 1.0
    weight_K[-1] = 1.0
    mean_K1 = weight_K[:, None] / (2 * num_bins - 2)

    # Log power is twice the log amplitude, but a sum of cosines has each of them twice.
    return mean_K1 * torch.cos(frequency_K[:, None] * coefficient_Q)
