"""SDPN: a student assigns short, noisy views to the prototypes that a teacher finds for clean ones.

Chen et al., Self-Distillation Prototypes Network: Learning Robust Speaker Representations without
Supervision, ICASSP 2025, arXiv 2308.02774. Targets are balanced as in Caron et al., Unsupervised
Learning of Visual Features by Contrasting Cluster Assignments (SwAV), NeurIPS 2020, arXiv
2006.09882. KoLeo: Sablayrolles et al., Spreading Vectors for Similarity Search, ICLR 2019, arXiv
1806.03198. me-max: Assran et al., Masked Siamese Networks, ECCV 2022, arXiv 2204.07141.
Letters: see objective.py.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island, widened
from speakerlab.losses.objective import Compared, Objective, gather_utterances, mlp, of_views
from speakerlab.losses.shards import Shards

EPSILON = 1e-8


class SDPN(Objective):
    """Cross-entropy to the teacher's balanced assignments, with two terms against collapse.

    me_max_weight: of the entropy of the mean assignment; koleo_weight: of the distance between
    nearest embeddings, summed over views.
    """

    sees_long = False
    needs_whole_batch = True

    def __init__(
        self,
        *,
        embed_dim: int,
        shards: Shards | None = None,
        hidden_dim: int = 2048,
        output_dim: int = 256,
        num_prototypes: int = 1024,
        temperature: float = 0.1,
        sharpening: float = 0.25,
        sinkhorn_iterations: int = 3,
        me_max_weight: float = 1.0,
        koleo_weight: float = 0.1,
    ) -> None:
        super().__init__()
        self.shards, self.num_prototypes = shards, num_prototypes
        self.projector = mlp([embed_dim, hidden_dim, hidden_dim, output_dim], batch_norm=True)
        bound = output_dim**-0.5
        self.prototype_KD = nn.Parameter(
            torch.empty(num_prototypes, output_dim).uniform_(-bound, bound)
        )
        self.temperature, self.sharpening = temperature, sharpening
        self.iterations = sinkhorn_iterations
        self.me_max_weight, self.koleo_weight = me_max_weight, koleo_weight

    @staticmethod
    def check_views(num_long: int, num_short: int) -> None:
        if num_long != 1 or num_short < 1:
            raise ValueError(
                f"views: sdpn compares short views with 1 long one, not {num_short} with "
                f"{num_long}; set views.long=1 views.short=4"
            )

    def forward(
        self, emb_VBD: Tensor, emb_LBD: Tensor | None, teacher: nn.Module | None
    ) -> Compared:
        assert emb_LBD is not None and teacher is not None
        with fp32_island(emb_VBD):
            emb_VBD = widened(emb_VBD)
            out_VGD = gather_utterances(of_views(self.projector, emb_VBD), self.shards)
            log_VGK = self.assign(out_VGD)
            with torch.no_grad():
                out_1GD = gather_utterances(of_views(teacher, widened(emb_LBD)), self.shards)
                target_GK = (self.assign(out_1GD[0]) / self.sharpening).softmax(1)
                target_GK = balance(target_GK, iterations=self.iterations)
            loss = -(target_GK * log_VGK).sum(2).mean()
            loss = loss + self.me_max_weight * concentration(log_VGK.exp().mean((0, 1)))
            if self.koleo_weight:
                every_VGD = gather_utterances(emb_VBD, self.shards)
                loss = loss + self.koleo_weight * torch.stack(list(map(koleo, every_VGD))).sum()
            chosen_G = target_GK.argmax(1)
            accuracy = (log_VGK.argmax(2) == chosen_G).to(loss.dtype).mean()
            return Compared(loss, accuracy, chosen_G)

    def assign(self, out_XD: Tensor) -> Tensor:
        """Return the logarithm of the softmax over the cosines with all prototypes."""
        cosine_XK = F.normalize(out_XD, dim=-1) @ F.normalize(self.prototype_KD, dim=1).T
        return (cosine_XK / self.temperature).log_softmax(-1)


def balance(target_GK: Tensor, *, iterations: int) -> Tensor:
    """Return assignments whose rows sum to 1 and whose columns, almost, to G / K.

    Sinkhorn-Knopp: columns and rows are scaled in turn.
    """
    for _ in range(iterations):
        target_GK = target_GK / target_GK.sum(0)
        target_GK = target_GK / target_GK.sum(1, keepdim=True)
    return target_GK


def concentration(share_K: Tensor) -> Tensor:
    """Return how far the entropy of shares is below that of equal ones, ln K (me-max)."""
    return torch.xlogy(share_K, share_K).sum() + math.log(len(share_K))


def koleo(emb_GD: Tensor) -> Tensor:
    """Return minus the mean logarithm of the distance between an embedding and its nearest.

    Embeddings are scaled to unit length.
    """
    unit_GD = F.normalize(emb_GD, dim=1, eps=EPSILON)
    with torch.no_grad():
        cosine_GG = (unit_GD @ unit_GD.T).fill_diagonal_(-1)
        nearest_G = cosine_GG.argmax(1)
    distance_G = F.pairwise_distance(unit_GD, unit_GD[nearest_G], eps=EPSILON)
    return -(distance_G + EPSILON).log().mean()
