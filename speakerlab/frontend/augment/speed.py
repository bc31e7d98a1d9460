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
    """All speeds are equally likely; the group of a draw is the index of its speed."""

    def __init__(self, *, speeds: Sequence[float], num_samples: int) -> None:
        """Take `speeds`, the first 1, and `num_samples`, a crop's length after the change."""
        super().__init__()
        self.num_speeds = len(speeds)
        self.num_read = [round(num_samples * speed) for speed in speeds]
        self.num_samples = num_samples
        self.resamplers = nn.ModuleList(resampler(speed) for speed in speeds)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        speed = int(rng.integers(self.num_speeds))
        return Draw({}, speed) if speed else None

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        """Return waves of a crop's length."""
        played = self.resamplers[draws.group](x_R[:, : self.num_read[draws.group]])
        # Rounding may give a sample too many or, at half speed or less, one too few.
        if missing := max(self.num_samples - played.shape[1], 0):
            played = nn.functional.pad(played, (0, missing))
        return played[:, : self.num_samples]
