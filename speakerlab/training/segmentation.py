"""Training of a network that finds who speaks when in a window (models/segmenter.py).

Letters: B windows, S samples, T frames, K local speakers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from speakerlab.core.batch import Batch
from speakerlab.training.precision import Precision
from speakerlab.training.task import Augment, Task, TaskOutput


class SegmentationTask(Task):
    """A segmentation network and its loss, which does not depend on the order of speakers.

    segmenter: takes x_B and a function that masks features, or None, and returns log_prob_BTC; it
    has the place that the embedder has in other tasks. loss: see losses/powerset.py.
    """

    def __init__(
        self, *, augment: Augment, segmenter: Any, loss: Any, precision: Precision
    ) -> None:
        super().__init__(augment=augment, embedder=segmenter, precision=precision)
        self.loss = loss

    def forward(
        self,
        x_B: Tensor,
        label_B: Tensor,
        margin: float,
        *,
        batch: Batch | None = None,
        frozen: bool = False,
    ) -> TaskOutput:
        """Return the loss of augmented waves (B, S).

        batch: with who speaks when; None: a pass whose loss does not matter. The accuracy is the
        share of frames with the right set of speakers.
        """
        del label_B, margin, frozen  # of other tasks
        mask_features = self.masking_of(batch)
        with self.autocast, record_function("step/forward/segmenter"):
            log_prob_BTC: Tensor = self.embedder(x_B, mask_features)
        num_windows, num_frames, _ = log_prob_BTC.shape
        if batch is None:
            shape = (num_windows, self.loss.max_speakers, num_frames)
            speech_BKT = torch.zeros(shape, dtype=torch.int8, device=x_B.device)
        else:
            assert batch.speech_BKT is not None
            speech_BKT = batch.speech_BKT
        with record_function("step/forward/loss"):
            loss, accuracy = self.loss(log_prob_BTC, speech_BKT)
        # The sums of a step count rows, so the mean becomes a sum over the rows of the batch.
        return TaskOutput(loss, accuracy * num_windows)
