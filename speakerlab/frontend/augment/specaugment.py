"""SpecAugment: mask bands of frequency and stretches of time with zero, the features' mean.

Letters: R rows that are changed, T frames, F mel bins, M masks (frequency first), D bins or frames.

Park et al., "SpecAugment: a simple data augmentation method for automatic speech recognition",
Interspeech 2019, without its time warping.
"""

import numpy as np
import torch
from torch import Tensor

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation


class SpecAugment(Augmentation):
    """Masks of random width and place over the features of each crop."""

    on_features = True

    def __init__(
        self,
        *,
        num_freq_masks: int = 0,
        max_freq_width: int = 8,
        num_time_masks: int = 0,
        max_time_width: int = 20,
    ) -> None:
        """Widths are drawn from 0 to the maximum, in mel bins and in frames."""
        super().__init__()
        if min(num_freq_masks, max_freq_width, num_time_masks, max_time_width) < 0:
            raise ValueError(
                f"augment.spec: {num_freq_masks} x {max_freq_width} bins, {num_time_masks} x "
                f"{max_time_width} frames: a number or width of masks is negative; use 0 for none"
            )
        self.num_freq_masks, self.max_freq_width = num_freq_masks, max_freq_width
        self.num_masks, self.max_time_width = num_freq_masks + num_time_masks, max_time_width

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if not self.num_masks:
            return None
        return Draw({"mask": rng.random((self.num_masks, 2), dtype=np.float32)})

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        """Return features (R, T, F) with the masked cells at zero."""
        mask_RM2 = draws.values["mask"]
        freq_RM2, time_RM2 = mask_RM2.tensor_split([self.num_freq_masks], dim=1)
        freq_RF = masked_cells(freq_RM2, size=x_R.shape[2], max_width=self.max_freq_width)
        time_RT = masked_cells(time_RM2, size=x_R.shape[1], max_width=self.max_time_width)
        return x_R.masked_fill_(freq_RF[:, None, :] | time_RT[:, :, None], 0.0)


def masked_cells(mask_RM2: Tensor, *, size: int, max_width: int) -> Tensor:
    """Return (R, D), true inside a mask, D = `size`, from (R, M, 2) uniforms: width and place.

    width = floor(u x (max_width + 1)), at most `size`; start = floor(u' x (size - width + 1)).
    """
    # A draw just below 1 in double precision is 1 in float32: it must not leave its range.
    width_RM = (mask_RM2[..., 0] * (max_width + 1)).floor().clamp_max(min(max_width, size))
    start_RM = (mask_RM2[..., 1] * (size - width_RM + 1)).floor().minimum(size - width_RM)
    place_D = torch.arange(size, device=mask_RM2.device)
    inside_RMD = (place_D >= start_RM[..., None]) & (place_D < (start_RM + width_RM)[..., None])
    return inside_RMD.any(1)
