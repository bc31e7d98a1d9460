"""Bands of frequency and stretches of time set to zero, the mean of mean-normalised features.

In: feats_BTF and mask_BM2, uniforms drawn by the data set. Out: feats_BTF.
Letters: B rows of the batch, T frames, F mel bins, M masks (frequency first), D bins or frames.

Park et al., "SpecAugment: a simple data augmentation method for automatic speech recognition",
Interspeech 2019, without its time warping.
"""

import torch
from torch import Tensor, nn


def masked_cells(mask_BM2: Tensor, *, size: int, max_width: int) -> Tensor:
    """(B, D) true where a mask lies, D = `size`, from (B, M, 2) uniforms: width and place.

    width = floor(u x (max_width + 1)), at most `size`; start = floor(u' x (size - width + 1)).
    """
    # A draw just below 1 in double precision is 1 in float32: it must not leave its range.
    width_BM = (mask_BM2[..., 0] * (max_width + 1)).floor().clamp_max(min(max_width, size))
    start_BM = (mask_BM2[..., 1] * (size - width_BM + 1)).floor().minimum(size - width_BM)
    place_D = torch.arange(size, device=mask_BM2.device)
    inside_BMD = (place_D >= start_BM[..., None]) & (place_D < (start_BM + width_BM)[..., None])
    return inside_BMD.any(1)


class SpecAugment(nn.Module):
    """Masks each row by its own draws; keeps no state and draws nothing."""

    def __init__(
        self,
        *,
        num_freq_masks: int = 0,
        max_freq_width: int = 8,
        num_time_masks: int = 0,
        max_time_width: int = 20,
    ) -> None:
        """Widths are in mel bins and in frames; a mask may have no width at all."""
        super().__init__()
        if min(num_freq_masks, max_freq_width, num_time_masks, max_time_width) < 0:
            raise ValueError(
                "specaugment: numbers and widths of masks must not be negative, got "
                f"{num_freq_masks} x {max_freq_width} bins, {num_time_masks} x {max_time_width} "
                "frames; use 0 for none"
            )
        self.num_freq_masks, self.max_freq_width = num_freq_masks, max_freq_width
        self.num_time_masks, self.max_time_width = num_time_masks, max_time_width

    @property
    def num_masks(self) -> int:
        """Draws that a row needs: the least M."""
        return self.num_freq_masks + self.num_time_masks

    def forward(self, feats_BTF: Tensor, mask_BM2: Tensor) -> Tensor:
        """(B, T, F) with the masked cells at zero; the input itself if there are no masks."""
        assert mask_BM2.shape[1] >= self.num_masks, "two uniforms for every mask"
        if self.num_masks == 0:
            return feats_BTF
        _, num_frames, num_bins = feats_BTF.shape
        freq_BM2 = mask_BM2[:, : self.num_freq_masks]
        time_BM2 = mask_BM2[:, self.num_freq_masks : self.num_masks]
        freq_BF = masked_cells(freq_BM2, size=num_bins, max_width=self.max_freq_width)
        time_BT = masked_cells(time_BM2, size=num_frames, max_width=self.max_time_width)
        return feats_BTF.masked_fill(freq_BF[:, None, :] | time_BT[:, :, None], 0.0)
