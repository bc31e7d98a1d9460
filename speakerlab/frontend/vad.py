"""Energy-based voice activity detection. In: wave_S. Out: its louder frames, joined.

A frame counts as speech where it is at most `range_db` quieter than the loudest and above
`floor_dbfs` (Kinnunen and Li, "An overview of text-independent speaker recognition: from features
to supervectors", Speech Communication 52, 2010, section 3.1), and is kept where enough frames
around it count, as in Kaldi's `compute-vad` (Povey et al., "The Kaldi speech recognition toolkit",
ASRU 2011). Only the level within the recording matters: music and noise as loud as speech stay.
With `above_noise`, a frame must also be above the noise, the level of the quietest frames, by this
share of the decibels from there to the loudest, so that no signal-to-noise ratio is assumed.
Letters: S samples, T frames, L samples of a frame.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt, Interval

from speakerlab.core.reading import ONLY_FINITE

LOUDEST = 99  # percentile of the frames taken as the loudest: one click does not count
NOISE = 5  # percentile of the frames taken as the noise: even short pauses are as long together
QUIETEST_POWER = 1e-12  # -120 dBFS, for frames of digital silence
INT16_POWER = 2.0**30  # of full scale


@dataclass(frozen=True, kw_only=True)
class EnergyVad:
    """wave_S -> its speech or, if no frame counts as speech, the whole wave: never empty."""

    __pydantic_config__ = ONLY_FINITE

    sample_rate: int = 16000
    range_db: Annotated[float, Gt(0)] = 30.0
    floor_dbfs: float = -55.0
    frame_ms: Annotated[float, Interval(ge=1, le=1000)] = 20.0
    context_frames: Annotated[int, Interval(ge=0, le=1000)] = 5
    min_share: Annotated[float, Interval(gt=0, le=1)] = 0.25
    above_noise: Annotated[float, Interval(ge=0, lt=1)] = 0.0

    @property
    def frame_samples(self) -> int:
        return max(round(self.frame_ms * self.sample_rate / 1000), 2)

    def __call__(self, wave_S: np.ndarray) -> np.ndarray:
        """Return the speech of a wave, int16 or floating point in [-1, 1], in the same type.

        The last samples, if less than a frame, go with the last frame.
        """
        voiced_T = self.voiced_frames(wave_S)
        if voiced_T.all() or not voiced_T.any():
            return wave_S
        mask_S = np.repeat(voiced_T, self.frame_samples)
        return wave_S[np.pad(mask_S, (0, len(wave_S) - len(mask_S)), mode="edge")]

    def voiced_frames(self, wave_S: np.ndarray) -> np.ndarray:
        """Return which frames, side by side from the first sample on, are kept, (T,)."""
        level_T = self._levels_dbfs(wave_S)
        if not len(level_T):
            return np.zeros(0, dtype=np.bool_)
        noise, loudest = np.percentile(level_T, [NOISE, LOUDEST])
        least = max(loudest - self.range_db, self.floor_dbfs)
        if self.above_noise:  # at 0, the quietest frames count if they are within the range
            least = max(least, noise + self.above_noise * (loudest - noise))
        loud_T = level_T >= least
        window = np.ones(2 * self.context_frames + 1)
        first, stop = self.context_frames, self.context_frames + len(level_T)
        votes_T = np.convolve(loud_T, window)[first:stop]
        present_T = np.convolve(np.ones(len(level_T)), window)[first:stop]
        return votes_T >= self.min_share * present_T

    def _levels_dbfs(self, wave_S: np.ndarray) -> np.ndarray:
        """Return the power of each frame around its own mean, so that an offset is not loud."""
        whole = len(wave_S) - len(wave_S) % self.frame_samples
        frames_TL = wave_S[:whole].reshape(-1, self.frame_samples)
        mean_T = frames_TL.mean(axis=1, dtype=np.float64)
        power_T = np.einsum("tl,tl->t", frames_TL, frames_TL, dtype=np.float64)
        power_T = power_T / self.frame_samples - mean_T**2
        if np.issubdtype(wave_S.dtype, np.integer):
            power_T /= INT16_POWER  # exact, so that the type changes no decision
        return 10 * np.log10(np.maximum(power_T, QUIETEST_POWER))
