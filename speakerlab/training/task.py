"""From a batch to its features, and from these to the loss. Letters: B rows, S, T, F, D, C.

In: `Batch` on the device (int16 wave_BS, labels, draws). Out: mean loss and number of right rows.
What learns is in `forward`, which DDP wraps; what does not is in `features`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speakerlab.core.batch import Batch
from speakerlab.core.regions import region
from speakerlab.training.precision import Precision


class TaskOutput(NamedTuple):
    loss: Tensor  # scalar, fp32, mean over the rows
    num_correct: Tensor  # scalar


class SpeakerTask(nn.Module):
    """Speaker classification: augment -> fbank -> SpecAugment -> backbone -> margin head.

    embedder: has submodules `fbank` (wave_BS -> feats_BTF) and `backbone` (feats_BTF -> emb_BD);
    augment: batch -> wave_BS, with methods `features` and `take_silent`. head: (emb_BD, label_B,
    margin) -> loss and what its `count_correct` takes; `is_split`: other ranks have other rows.
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
        self.precision = precision
        # Banks of noise and rooms are the same on every rank and too large to be broadcast.
        self._ddp_params_and_buffers_to_ignore = [
            f"augment.{name}" for name, _ in augment.named_buffers()
        ]
        # Rows that only this rank has: their gradients are whole without the others'.
        self.split: dict[str, nn.Parameter] = {}
        if head.is_split:
            self.split = {f"head.{name}": p for name, p in head.named_parameters()}
        self._ddp_params_and_buffers_to_ignore += list(self.split)
        self.compiled: tuple[Callable[[Tensor], Tensor], ...] = ()  # no submodule: it is none

    def compile_backbone(self) -> None:
        """Let torch compile the backbone for training; validation has many lengths and does not."""
        self.compiled = (torch.compile(self.embedder.get_submodule("backbone")),)

    @torch.no_grad()
    def features(self, batch: Batch) -> Tensor:
        """feats_BTF of the batch: augment -> fbank (or stored features) -> SpecAugment."""
        fbank: Any = self.embedder.get_submodule("fbank")
        if len(batch.feats_BTF):
            feats_BTF = fbank.normalise(batch.feats_BTF)
        else:
            wave_BS = self.augment(batch)
            with region("step/front end/fbank"):
                feats_BTF = fbank(wave_BS)
        return self.augment.features(feats_BTF, batch)

    def forward(
        self, feats_BTF: Tensor, label_B: Tensor, margin: float, *, frozen: bool = False
    ) -> TaskOutput:
        """Backbone and head. `frozen`: only the head learns; the backbone's gradients are zeros."""
        with self.precision.autocast(), region("step/forward/backbone"):
            backbone = self.embedder.get_submodule("backbone")
            run = self.compiled[0] if self.compiled else backbone
            emb_BD = without_learning(backbone, feats_BTF) if frozen else run(feats_BTF)
        with region("step/forward/head"):
            loss, decided = self.head(emb_BD, label_B, margin)
            return TaskOutput(loss, self.head.count_correct(decided, label_B))

    def take_silent(self) -> Tensor:
        """How many crops got no noise since the last call, they or the noise being silent."""
        return self.augment.take_silent()


def without_learning(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) without a backward pass through it; its parameters get gradients of zero.

    They must get some: DDP waits for the gradient of every parameter.
    """
    with torch.no_grad():
        y = module(x)
    return y + 0 * torch.stack([p[(0,) * p.dim()] for p in module.parameters()]).sum()


def dummy_batch(*, num_rows: int, num_samples: int, device: torch.device) -> Batch:
    """Noise in the form of a batch, for passes whose result is thrown away or only measured."""
    generator = torch.Generator().manual_seed(0)
    return Batch(
        wave_BS=torch.randint(
            -3000, 3000, (num_rows, num_samples), dtype=torch.int16, generator=generator
        ),
        feats_BTF=torch.empty(0, 0, 0),
        label_B=torch.zeros(num_rows, dtype=torch.int64),
        position_B=torch.arange(num_rows),
        row_B=torch.arange(num_rows),
        draws={},
    ).to(device)
