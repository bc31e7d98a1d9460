"""Overlapping frames of a crop, for augmentations that change its spectrum from frame to frame.

Letters: R rows that are changed, S samples, T frames, N samples of a frame, G samples from one
frame to the next, M blocks of G samples.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.frontend.augment.base import INT16_SCALE

# Rows at a time: frames of a row, and their spectra, take ten times its memory. More rows exceed a
# core's cache, and too many a GPU that has little memory.
CPU_ROWS = 1
GPU_ROWS = 64
OVERLAP = 4  # number of frames that contain a sample: N = 4 G
# Of squared Hann windows that are a quarter of their length apart, at every sample.
SUM_OF_SQUARED_WINDOWS = 1.5
# Limit of the gain that restores the level. Where a change has removed nearly everything, more
# would only amplify rounding errors.
MAX_GAIN = 4.0
TINY = 1e-20  # instead of a power or a peak of 0


class Frames(nn.Module):
    """Cuts waves into windowed frames, and adds frames up to waves.

    Both apply a Hann window, so that changes which differ from frame to frame are blended.
    """

    window: Tensor

    def __init__(self, *, seconds: float, sample_rate: int) -> None:
        super().__init__()
        self.shift = max(1, round(seconds * sample_rate / OVERLAP))
        self.length = OVERLAP * self.shift
        self.num_bins = self.length // 2 + 1
        window_N = torch.hann_window(self.length)
        self.register_buffer("window", window_N, persistent=False)

    def count(self, num_samples: int) -> int:
        """Return the number of frames such that each sample of a wave is in four of them."""
        num_blocks = -(-num_samples // self.shift)  # rounded up
        return num_blocks + OVERLAP - 1

    def cut(self, wave_RS: Tensor) -> Tensor:
        """Return the frames (R, T, N); frame t begins at the sample (t - 3) G.

        For example, with G = 2, 5 samples have 6 frames, which begin at -6, -4, -2, 0, 2 and 4:
        sample 0 is in the first four of them.
        """
        num_samples = wave_RS.shape[1]
        num_frames = self.count(num_samples)
        before = self.length - self.shift
        after = num_frames * self.shift - num_samples
        padded_RS = F.pad(wave_RS, (before, after))
        frames_RTN = padded_RS.unfold(1, self.length, self.shift)
        return frames_RTN * self.window

    def join(self, frames_RTN: Tensor, *, num_samples: int) -> Tensor:
        """Return the waves (R, S) whose frames `cut` returned, after a change."""
        windowed_RTN = frames_RTN * self.window
        padded_RS = overlap_add(windowed_RTN)
        before = self.length - self.shift
        end = before + num_samples
        return padded_RS[:, before:end]


def rows_at_once(x_R: Tensor) -> int:
    """Return the number of rows whose spectra are computed together."""
    on_cpu = x_R.device.type == "cpu"
    return CPU_ROWS if on_cpu else GPU_ROWS


def overlap_add(windowed_RTN: Tensor) -> Tensor:
    """Return the sum (R, M G) of frames that begin G samples after each other, at their level.

    The frames were multiplied by a Hann window twice.
    """
    num_rows, num_frames, length = windowed_RTN.shape
    shift = length // OVERLAP
    num_blocks = num_frames + OVERLAP - 1
    # Whole quarters of frames, in a fixed order: the same sums on any device. Quarter q of frame t
    # is in block t + q.
    blocks_RMG = windowed_RTN.new_zeros(num_rows, num_blocks, shift)
    quarters = windowed_RTN.split(shift, dim=2)
    for first_block, quarter_RTG in enumerate(quarters):
        end_block = first_block + num_frames
        blocks_RMG[:, first_block:end_block] += quarter_RTG
    return blocks_RMG.flatten(1).div_(SUM_OF_SQUARED_WINDOWS)


def at_level_of(original_RS: Tensor, changed_RS: Tensor) -> Tensor:
    """Return the changed waves at the power of the original ones; silence stays silent.

    Where the peak would exceed full scale, or the original peak if that is higher, the gain is
    reduced, so that nothing is clipped.
    """
    # The gain that restores the power.
    power_R1 = original_RS.square().mean(1, keepdim=True)
    changed_power_R1 = changed_RS.square().mean(1, keepdim=True)
    power_ratio_R1 = power_R1 / changed_power_R1.clamp_min(TINY)
    level_gain_R1 = power_ratio_R1.sqrt().clamp_max(MAX_GAIN)

    # The gain up to which nothing is clipped.
    full_scale = 1 - 1 / INT16_SCALE
    peak_R1 = original_RS.abs().amax(1, keepdim=True)
    changed_peak_R1 = changed_RS.abs().amax(1, keepdim=True)
    highest_peak_R1 = peak_R1.clamp_min(full_scale)
    peak_gain_R1 = highest_peak_R1 / changed_peak_R1.clamp_min(TINY)

    gain_R1 = torch.minimum(level_gain_R1, peak_gain_R1)
    return changed_RS * gain_R1


def refuse_range(
    name: str,
    ends: tuple[float, float],
    *,
    lowest: float,
    highest: float,
) -> None:
    """Raise ValueError unless `ends` are ascending and within `lowest` to `highest`."""
    low, high = ends
    if not lowest <= low <= high <= highest:
        raise ValueError(
            f"augment: {name} [{low:g}, {high:g}] must be [low, high] within"
            f" {lowest:g} to {highest:g}; correct it"
        )
