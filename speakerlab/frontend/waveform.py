"""The samples themselves, for networks that take a waveform instead of mel features.

In: wave_BS, float32 in [-1, 1]. Out: wave_BT1: each sample is a frame with one value.
Letters: B rows of the batch, S = T samples.
"""

import math

from torch import Tensor, nn


class Waveform(nn.Module):
    """Front end that hands the samples on; it has the interface of `Fbank`."""

    feat_dim = 1
    frame_shift = 1
    min_samples = 1
    max_seconds = math.inf

    def __init__(self, *, sample_rate: int = 16000) -> None:
        super().__init__()
        if sample_rate < 1:
            raise ValueError(
                f"frontend.sample_rate: must be at least 1 Hz, got {sample_rate};"
                " correct it"
            )
        self.sample_rate = sample_rate

    def forward(self, wave_BS: Tensor) -> Tensor:
        return wave_BS.unsqueeze(2)

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames of a wave."""
        return num_samples

    def samples_used(self, num_samples: int) -> int:
        """Return how many of these samples the frames contain."""
        return num_samples
