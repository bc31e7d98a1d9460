"""Partial multi-scale feature aggregation (PMFA) over the layers of Whisper's encoder.

Zhao, Li, Wang, Wang: "Whisper-PMFA: Partial Multi-Scale Feature Aggregation for Speaker
Verification using Whisper Models", Interspeech 2024, arXiv 2408.15585. Some layers of the middle,
side by side and normalised, are pooled; WeSpeaker subtracts their mean over time before. Names as
in WeSpeaker's whisper_PMFA, but for the LayerNorm `norm`, which is in its front end
(`encoder.ln_post2`).

Letters: B batch, T frames, F features of all layers, K statistics, D embedding.
"""

from torch import Tensor, nn

from speakerlab.core.full_precision import widened
from speakerlab.models.pooling import ASTP, named_sequential, refuse_unusable


class PMFA(nn.Module):
    """LayerNorm over all layers, attentive statistics pooling with context, BatchNorm, linear.

    feat_dim: of all layers together, which stand side by side.
    """

    min_frames = 2

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        num_layers: int = 1,
        embed_dim: int = 192,
        mean_norm: bool = True,
    ) -> None:
        super().__init__()
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        # The layers are normalised together, so their number does not matter.
        self.num_layers = num_layers
        self.norm = nn.LayerNorm(feat_dim)
        self.mean_norm = mean_norm
        self.pooling = ASTP(feat_dim, global_context=True)
        self.bn = named_sequential(norm=nn.BatchNorm1d(self.pooling.out_dim))
        self.fc = nn.Linear(self.pooling.out_dim, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        normalised_BTF = widened(self.norm(feats_BTF))
        if self.mean_norm:
            normalised_BTF = normalised_BTF - normalised_BTF.mean(1, keepdim=True)
        stats_BK = self.pooling(normalised_BTF.transpose(1, 2))
        return self.fc(self.bn(stats_BK))
