"""ERes2NetV2: an ERes2Net with wider stages, and only the last two of them fused.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
Chen, Zheng, Wang, Cheng, Chen, Zhang, Li: "ERes2NetV2: Boosting Short-Duration Speaker
Verification Performance with Computational Efficiency", Interspeech 2024, arXiv 2406.02167. Names
and shapes of the parameters are those of the published checkpoints.

Letters: B batch, T frames, F mel bins (both divided by up to eight on the way), C channels,
D embedding.
"""

from torch import Tensor

from speakerlab.models.eres2net import AttentiveFusion, halve
from speakerlab.models.res2net import Res2Backbone


class ERes2NetV2(Res2Backbone):
    """ERes2NetV2 (defaults: the published w26s2ep2; w24s4ep4 has `base_width` 24, `scale` and
    `expansion` 4)."""

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 192,
        m_channels: int = 64,
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        base_width: int = 26,
        scale: int = 2,
        expansion: int = 2,
        pooling: str = "tstp",
        pool_eps: float = 1e-8,
        two_emb_layer: bool = False,
    ) -> None:
        super().__init__(
            feat_dim=feat_dim,
            embed_dim=embed_dim,
            m_channels=m_channels,
            blocks=blocks,
            base_width=base_width,
            scale=scale,
            expansion=expansion,
            fuse=AttentiveFusion,
        )
        self.layer3_ds = halve(self.wide[2], self.wide[3])
        self.fuse34 = AttentiveFusion(self.wide[3])
        self._add_head(pooling=pooling, pool_eps=pool_eps, two_emb_layer=two_emb_layer)

    def maps(self, x_BCFT: Tensor) -> Tensor:
        stage3 = self.layer3(self.layer2(self.layer1(x_BCFT)))
        return self.fuse34(self.layer4(stage3), self.layer3_ds(stage3))
