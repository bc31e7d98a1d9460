"""Reencode: a crop is encoded and decoded by a lossy codec, such as MP3, Opus or GSM."""

from collections.abc import Sequence

import numpy as np

from speakerlab.core.batch import Draw
from speakerlab.frontend.augment.base import Augmentation


class Reencode(Augmentation):
    """Lossy coding. Every codec is equally likely; the draw `codec` is an index into `codecs`.

    The codecs only run on a CPU, so the data worker applies them to the crop that it reads
    (`data.loader.TrainCrops`). Room and noise follow on the device, as if a compressed recording
    were played in the room. A phone compresses both with the speech; for that order, use
    `telephone` and `codec`.
    """

    in_worker = True

    def __init__(self, *, reencode_prob: float, codecs: Sequence[str]) -> None:
        super().__init__()
        self.prob = reencode_prob
        self.num_codecs = len(codecs)

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if rng.random() >= self.prob:
            return None
        codec = int(rng.integers(self.num_codecs))
        return Draw({"codec": codec})
