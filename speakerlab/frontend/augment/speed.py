"""Speed: a crop is played faster or slower; the changed pitch counts as another speaker.

Letters: R rows that are changed, W samples of the longest row as read.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from speakerlab.core.batch import Draw, Draws
from speakerlab.frontend.augment.base import Augmentation
from speakerlab.frontend.resampling import resampler


class Speed(Augmentation):
    """Change of speed. All speeds are equally likely; the group of a draw is its speed's index."""

    def __init__(self, *, speeds: Sequence[float], num_samples: int) -> None:
        """Take `speeds`, the first 1, and `num_samples`, a crop's length after the change."""
        super().__init__()
        self.num_speeds = len(speeds)
        # Samples of a recording that a crop needs at each speed.
        self.num_read = [round(num_samples * speed) for speed in speeds]
        self.num_samples = num_samples
        self.resamplers = nn.ModuleList(resampler(speed) for speed in speeds)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        speed = int(rng.integers(self.num_speeds))
        if speed == 0:  # the first speed is 1: no change
            return None
        return Draw({}, speed)

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        """Return waves of a crop's length."""
        num_read = self.num_read[draws.group]
        resample = self.resamplers[draws.group]
        played_R = resample(x_R[:, :num_read])

        # Rounding may give a sample too many or, at half speed or less, one too few.
        missing = self.num_samples - played_R.shape[1]
        if missing > 0:
            played_R = nn.functional.pad(played_R, (0, missing))
        return played_R[:, : self.num_samples]
