"""Energy-based voice activity detection. In: wave_S. Out: its louder frames, joined.

A frame counts as speech where it is at most `range_db` quieter than the loudest and above
`floor_dbfs` (Kinnunen and Li, "An overview of text-independent speaker recognition: from features
to supervectors", Speech Communication 52, 2010, section 3.1), and is kept where enough frames
around it count, as in Kaldi's `compute-vad` (Povey et al., "The Kaldi speech recognition toolkit",
ASRU 2011). Only the level within the recording matters: music and noise as loud as speech stay.
With `above_noise`, a frame must also exceed the noise, the level of the quietest frames, by this
share of the range in dB from the noise to the loudest, so that no signal-to-noise ratio is assumed.
Letters: S samples, T frames, L samples of a frame.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt, Interval

from speakerlab.core.reading import ONLY_FINITE

LOUDEST = 99  # percentile of the frames taken as the loudest: one click does not count
# Percentile of the frames taken as the noise: even short pauses add up to this share.
NOISE = 5
QUIETEST_POWER = 1e-12  # -120 dBFS, for frames of digital silence
INT16_POWER = 2.0**30  # of full scale


@dataclass(frozen=True, kw_only=True)
class EnergyVad:
    """Voice activity detector: wave_S -> its speech, or the whole wave if no frame is speech."""

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
        num_samples = round(self.frame_ms * self.sample_rate / 1000)
        return max(num_samples, 2)

    def __call__(self, wave_S: np.ndarray) -> np.ndarray:
        """Return the speech of a wave, int16 or floating point in [-1, 1], in the same type.

        Samples after the last frame, fewer than a frame, are kept or removed together with it.
        """
        mask_S = self.speech_mask(wave_S)
        return wave_S if mask_S.all() else wave_S[mask_S]

    def speech_mask(self, wave_S: np.ndarray) -> np.ndarray:
        """Return a mask (S,) of the samples to keep: all if no frame is speech."""
        voiced_T = self.voiced_frames(wave_S)
        # Without speech, nothing would be left.
        if not voiced_T.any():
            return np.ones(len(wave_S), dtype=np.bool_)
        framed_S = np.repeat(voiced_T, self.frame_samples)
        # Samples after the last frame are kept or removed together with it.
        num_last = len(wave_S) - len(framed_S)
        return np.pad(framed_S, (0, num_last), mode="edge")

    def voiced_frames(self, wave_S: np.ndarray) -> np.ndarray:
        """Return a mask (T,) of the frames to keep; frames follow each other without overlap."""
        level_T = self.levels_dbfs(wave_S)
        if not len(level_T):
            return np.zeros(0, dtype=np.bool_)
        loud_T = level_T >= self.threshold_dbfs(level_T)
        return self.keep_around(loud_T)

    def threshold_dbfs(self, level_T: np.ndarray) -> float:
        """Return the level at which a frame counts as speech, given the levels of all frames."""
        noise, loudest = np.percentile(level_T, [NOISE, LOUDEST])
        below_loudest = loudest - self.range_db
        threshold = max(below_loudest, self.floor_dbfs)
        if self.above_noise > 0:
            above_noise = noise + self.above_noise * (loudest - noise)
            threshold = max(threshold, above_noise)
        return threshold

    def keep_around(self, loud_T: np.ndarray) -> np.ndarray:
        """Return the frames to keep by the share of loud frames around each, (T,)."""
        # There are fewer frames around those at the edges.
        num_loud_T = self._count_around(loud_T)
        every_frame_T = np.ones(len(loud_T))
        num_around_T = self._count_around(every_frame_T)
        return num_loud_T >= self.min_share * num_around_T

    def _count_around(self, frame_T: np.ndarray) -> np.ndarray:
        """Return the sum of a frame and the `context_frames` on both sides of it, (T,)."""
        width = 2 * self.context_frames + 1
        sum_T = np.convolve(frame_T, np.ones(width))
        # The convolution also has sums around the frames before the first and after the last. For
        # example, of 1 1 0 1 with one frame on both sides: 1, 2 2 2 1, 1.
        first = self.context_frames
        end = first + len(frame_T)
        return sum_T[first:end]

    def levels_dbfs(self, wave_S: np.ndarray) -> np.ndarray:
        """Return the power of each frame around its own mean, so that an offset is not loud."""
        # Samples after the last frame, fewer than a frame, are left out.
        num_last = len(wave_S) % self.frame_samples
        framed_S = wave_S[: len(wave_S) - num_last]
        frames_TL = framed_S.reshape(-1, self.frame_samples)

        # The variance as E[x^2] - E[x]^2: einsum adds the squares without a float64 copy of x.
        mean_T = frames_TL.mean(axis=1, dtype=np.float64)
        energy_T = np.einsum(
            "tl,tl->t",
            frames_TL,
            frames_TL,
            dtype=np.float64,
        )
        power_T = energy_T / self.frame_samples - mean_T**2
        is_int16 = np.issubdtype(wave_S.dtype, np.integer)
        if is_int16:
            power_T /= INT16_POWER  # exact, so that the type changes no decision
        power_T = np.maximum(power_T, QUIETEST_POWER)
        return 10 * np.log10(power_T)
