"""From a micro-batch to its loss. Letters: B rows, S samples, T frames, F mel bins, D."""

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from speakerlab.core.batch import Batch
from speakerlab.training.precision import Precision


class TaskOutput(NamedTuple):
    loss: Tensor  # scalar, fp32, mean over the rows
    num_correct: Tensor  # scalar


class SpeakerTask(nn.Module):
    """Speaker classification; `forward` is what DDP wraps.

    augment: Batch -> wave_BS, without parameters, so it runs ahead of `forward`; its `features`
    masks features. embedder: wave_BS and such a function -> emb_BD. head: see `losses/__init__.py`;
    `is_split`: other ranks hold other rows of it.
    """

    def __init__(
        self,
        *,
        augment: Any,
        embedder: nn.Module,
        head: Any,
        precision: Precision,
    ) -> None:
        super().__init__()
        self.augment, self.embedder, self.head = augment, embedder, head
        self.set_precision(precision)
        # Banks of noise and rooms are the same on every rank and too large to be broadcast.
        self._ddp_params_and_buffers_to_ignore = [
            f"augment.{name}" for name, _ in augment.named_buffers()
        ]
        # Rows that only this rank holds: their gradients are complete without the other ranks.
        self.split: dict[str, nn.Parameter] = {}
        if head.is_split:
            self.split = {f"head.{name}": p for name, p in head.named_parameters()}
        self._ddp_params_and_buffers_to_ignore += list(self.split)

    def set_precision(self, precision: Precision) -> None:
        """Set the number format of the backbone."""
        self.precision, self.autocast = precision, precision.autocast()

    def forward(
        self,
        wave_BS: Tensor,
        label_B: Tensor,
        margin: float,
        *,
        batch: Batch | None = None,
        frozen: bool = False,
    ) -> TaskOutput:
        """Return the loss of augmented waves (B, S), or of stored features (B, T, F).

        batch: with the draws of SpecAugment; None: no masks. frozen: only the head learns.
        """
        masks = None if batch is None else partial(self.augment.features, batch=batch)
        with self.autocast, record_function("step/forward/embedder"):
            with torch.no_grad() if frozen else nullcontext():
                emb_BD: Tensor = self.embedder(wave_BS, masks)
            if frozen:  # gradients of zero, because DDP waits for one of every parameter
                firsts = [p[(0,) * p.dim()] for p in self.embedder.parameters()]
                emb_BD = emb_BD + 0 * torch.stack(firsts).sum()
        with record_function("step/forward/head"):
            loss, decided = self.head(emb_BD, label_B, margin)
            return TaskOutput(loss, self.head.count_correct(decided, label_B))
