"""SpecAugment: mask bands of frequency and stretches of time with zero, the features' mean.

Letters: R rows that are changed, T frames, F mel bins, M masks (frequency first), D bins or frames.

Park et al., "SpecAugment: a simple data augmentation method for automatic speech recognition",
Interspeech 2019, without its time warping.
"""

from typing import Annotated

import numpy as np
from annotated_types import Ge
from torch import Tensor

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation

Natural = Annotated[int, Ge(0)]


class SpecAugment(Augmentation):
    """Masks of random width and place over the features of each crop."""

    on_features = True

    def __init__(
        self,
        *,
        num_frames: int,
        num_mel_bins: int,
        num_freq_masks: Natural = 0,
        max_freq_width: Natural = 8,
        num_time_masks: Natural = 0,
        max_time_width: Natural = 20,
    ) -> None:
        """Take the maximum widths, in mel bins and in frames of a crop; the minimum is 0."""
        super().__init__()
        self.num_frames = num_frames
        self.num_mel_bins = num_mel_bins
        self.num_freq_masks = num_freq_masks
        self.max_freq_width = max_freq_width
        self.max_time_width = max_time_width
        self.num_masks = num_freq_masks + num_time_masks

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if not self.num_masks:
            return None
        shape = (self.num_masks, 2)  # width and place of each mask
        uniform_M2 = rng.random(shape, dtype=np.float32)
        return Draw(self.masks(uniform_M2))

    def masks(self, uniform_M2: np.ndarray) -> dict[str, np.ndarray]:
        """Return which bins (F,) and frames (T,) are masked, from the draws of each mask."""
        freq_M2, time_M2 = np.split(uniform_M2, [self.num_freq_masks])
        bin_F = masked_cells(
            freq_M2,
            size=self.num_mel_bins,
            max_width=self.max_freq_width,
        )
        frame_T = masked_cells(
            time_M2,
            size=self.num_frames,
            max_width=self.max_time_width,
        )
        return {"bins": bin_F, "frames": frame_T}

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        """Return features (R, T, F) with the masked cells at zero."""
        bin_RF = draws.values["bins"]
        frame_RT = draws.values["frames"]
        bin_R1F = bin_RF[:, None, :]
        frame_RT1 = frame_RT[:, :, None]
        masked_RTF = bin_R1F | frame_RT1
        return x_R.masked_fill_(masked_RTF, 0.0)


def masked_cells(uniform_M2: np.ndarray, *, size: int, max_width: int) -> np.ndarray:
    """Return (D,), true inside a mask, D = `size`, from (M, 2) uniforms: width and place.

    width = floor(u x (max_width + 1)), at most `size`; start = floor(u' x (size - width + 1)).
    For example, u = 0.5 and u' = 0.9 with the size 10 and the largest width 5 give the width 3 and
    the start 7: the cells 7, 8 and 9.
    """
    width_u_M = uniform_M2[:, 0]
    place_u_M = uniform_M2[:, 1]

    # A draw just below 1 in double precision is 1 in float32: it must not leave its range.
    largest_width = min(max_width, size)
    width_M = np.floor(width_u_M * (max_width + 1))
    width_M = np.minimum(width_M, largest_width)
    last_start_M = size - width_M
    start_M = np.floor(place_u_M * (last_start_M + 1))
    start_M = np.minimum(start_M, last_start_M)
    end_M = start_M + width_M

    cell_D1 = np.arange(size)[:, None]
    inside_DM = (cell_D1 >= start_M) & (cell_D1 < end_M)
    return np.logical_or.reduce(inside_DM, axis=1)
