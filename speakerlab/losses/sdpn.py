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

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.losses.objective import (
    Compared,
    Objective,
    gather_utterances,
    mlp,
    of_views,
)
from speakerlab.losses.shards import Shards

# Keeps the logarithm of a distance finite where two embeddings are equal.
EPSILON = 1e-8


class SDPN(Objective):
    """Cross-entropy to the teacher's balanced assignments, with two terms against collapse.

    me_max_weight: weight of the term that raises the entropy of the mean assignment. koleo_weight:
    weight of the term that raises the distances between nearest embeddings, summed over views.
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
        self.shards = shards
        self.num_prototypes = num_prototypes
        widths = [embed_dim, hidden_dim, hidden_dim, output_dim]
        self.projector = mlp(widths, batch_norm=True)
        # As torch initialises a linear layer that reads `output_dim` values.
        bound = output_dim**-0.5
        prototype_KD = torch.empty(num_prototypes, output_dim)
        prototype_KD.uniform_(-bound, bound)
        self.prototype_KD = nn.Parameter(prototype_KD)
        self.temperature = temperature
        self.sharpening = sharpening
        self.iterations = sinkhorn_iterations
        self.me_max_weight = me_max_weight
        self.koleo_weight = koleo_weight

    @staticmethod
    def check_views(num_long: int, num_short: int) -> None:
        if num_long != 1 or num_short < 1:
            raise ValueError(
                f"views: sdpn compares short views with 1 long one, not {num_short}"
                f" with {num_long}; set views.long=1 views.short=4"
            )

    def forward(
        self,
        emb_VBD: Tensor,
        emb_LBD: Tensor | None,
        teacher_projector: nn.Module | None,
    ) -> Compared:
        assert emb_LBD is not None and teacher_projector is not None
        with autocast_off(emb_VBD):
            emb_VBD = widened(emb_VBD)
            out_VBD = of_views(self.projector, emb_VBD)
            out_VGD = gather_utterances(out_VBD, self.shards)
            log_VGK = self.assign(out_VGD)

            target_GK = self._find_targets(widened(emb_LBD), teacher_projector)

            # Cross-entropy of each short view with the target of its utterance.
            weighted_VGK = target_GK * log_VGK
            loss = -weighted_VGK.sum(2).mean()

            # Against collapse: the first term lets all prototypes be used, the second keeps the
            # embeddings of different utterances apart.
            share_VGK = log_VGK.exp()
            mean_share_K = share_VGK.mean((0, 1))
            loss = loss + self.me_max_weight * concentration(mean_share_K)
            if self.koleo_weight:
                emb_VGD = gather_utterances(emb_VBD, self.shards)
                koleo_of_views = [koleo(emb_GD) for emb_GD in emb_VGD]
                koleo_V = torch.stack(koleo_of_views)
                loss = loss + self.koleo_weight * koleo_V.sum()

            chosen_G = target_GK.argmax(1)
            is_equal_VG = log_VGK.argmax(2) == chosen_G
            accuracy = is_equal_VG.to(loss.dtype).mean()
            return Compared(
                loss=loss,
                accuracy=accuracy,
                target_N=chosen_G,
            )

    @torch.no_grad()
    def _find_targets(self, emb_1BD: Tensor, teacher_projector: nn.Module) -> Tensor:
        """Return the teacher's assignments of the long view, sharpened and balanced, (G, K)."""
        out_1BD = of_views(teacher_projector, emb_1BD)
        out_1GD = gather_utterances(out_1BD, self.shards)
        log_GK = self.assign(out_1GD[0])
        sharp_GK = (log_GK / self.sharpening).softmax(1)
        # Balanced, so that not all utterances are assigned to a few prototypes.
        return balance(sharp_GK, iterations=self.iterations)

    def assign(self, out_XD: Tensor) -> Tensor:
        """Return the logarithm of the softmax over the cosines with all prototypes.

        out_XD: of any number of axes; the result has K in place of D.
        """
        unit_XD = F.normalize(out_XD, dim=-1)
        unit_KD = F.normalize(self.prototype_KD, dim=1)
        cosine_XK = unit_XD @ unit_KD.T
        logits_XK = cosine_XK / self.temperature
        return logits_XK.log_softmax(-1)


def balance(target_GK: Tensor, *, iterations: int) -> Tensor:
    """Return assignments whose rows sum to 1 and whose columns sum to about G / K.

    Sinkhorn-Knopp: columns and rows are scaled in turn.
    """
    for _ in range(iterations):
        sum_K = target_GK.sum(0)
        target_GK = target_GK / sum_K
        sum_G1 = target_GK.sum(1, keepdim=True)
        target_GK = target_GK / sum_G1
    return target_GK


def concentration(share_K: Tensor) -> Tensor:
    """Return how far the entropy of shares is below its maximum, ln K (me-max)."""
    # xlogy(0, 0) is 0, as the limit is; 0 * log(0) would be NaN.
    negative_entropy = torch.xlogy(share_K, share_K).sum()
    return negative_entropy + math.log(len(share_K))


def koleo(emb_GD: Tensor) -> Tensor:
    """Return minus the mean logarithm of the distance of an embedding to its nearest neighbour.

    Embeddings are scaled to unit length.
    """
    unit_GD = F.normalize(emb_GD, dim=1, eps=EPSILON)
    with torch.no_grad():
        cosine_GG = unit_GD @ unit_GD.T
        cosine_GG.fill_diagonal_(-1)  # an embedding is not its own neighbour
        nearest_G = cosine_GG.argmax(1)
    neighbour_GD = unit_GD[nearest_G]
    distance_G = F.pairwise_distance(unit_GD, neighbour_GD, eps=EPSILON)
    log_distance_G = (distance_G + EPSILON).log()
    return -log_distance_G.mean()
