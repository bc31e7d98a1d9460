"""Parts that a user may have outside of the repository; tests copy this file to a folder."""

import numpy as np
import torch
from torch import Tensor, nn

from speakerlab.core.batch import Draw, Draws
from speakerlab.diarization.ahc import Ahc
from speakerlab.frontend.augment.base import Augmentation
from speakerlab.losses.margin import AMSoftmax
from speakerlab.models.pooling import refuse_unusable


class Model(nn.Module):
    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 16,
        channels: int = 8,
    ) -> None:
        super().__init__()
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.min_frames = 1
        self.conv = nn.Conv1d(
            feat_dim,
            channels,
            3,
            padding=1,
            bias=False,
        )
        self.norm = nn.BatchNorm1d(channels)
        self.out = nn.Linear(channels, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        conv_BCT = self.conv(feats_BTF.transpose(1, 2))
        # The output of the convolution is read twice: it cannot absorb the normalisation.
        normed_BCT = self.norm(conv_BCT).relu()
        mixed_BCT = normed_BCT + 0.1 * conv_BCT
        return self.out(mixed_BCT.mean(2))


class DependsOnItsBatch(Model):
    def forward(self, feats_BTF: Tensor) -> Tensor:
        emb_BD = super().forward(feats_BTF)
        return emb_BD - emb_BD.mean(0)


class Head(AMSoftmax):
    def harden(self, similarity: Tensor, margin: float | Tensor) -> Tensor:
        return super().harden(similarity, 2 * margin)


class Clipping(Augmentation):
    """Hard clipping at a random share of the peak."""

    def __init__(self, *, num_samples: int, prob: float = 0.7) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.prob = prob

    def draw(self, rng: np.random.Generator) -> Draw | None:
        if rng.random() >= self.prob:
            return None
        level = rng.uniform(0.3, 0.9)
        return Draw({"level": level})

    def apply(self, x_R: Tensor, draws: Draws) -> Tensor:
        assert x_R.shape[1] == self.num_samples
        peak_R1 = x_R.abs().amax(1, keepdim=True)
        level_R1 = peak_R1 * draws.values["level"][:, None]
        return x_R.clamp(-level_R1, level_R1).float()


class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters, *, lr: float, momentum: float = 0.9) -> None:
        defaults = {"lr": lr, "momentum": momentum}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    zeros = torch.zeros_like(parameter)
                    sum_ = state.setdefault("sum", zeros)
                    sum_.mul_(group["momentum"])
                    sum_.add_(parameter.grad)
                    parameter.sub_(group["lr"] * sum_)


def halving(
    step: int,
    *,
    peak: float,
    steps_per_epoch: int,
    epochs: float = 2.0,
) -> float:
    return peak * 0.5 ** (step / steps_per_epoch / epochs)


class Clustering:
    def __init__(self, *, threshold: float = 0.3) -> None:
        self.inner = Ahc(threshold=threshold)

    def __call__(self, unit_ND: np.ndarray, least: int, most: int) -> np.ndarray:
        return self.inner(unit_ND, least, most)
