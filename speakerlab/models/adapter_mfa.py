"""Adapters and multi-layer feature aggregation over the layers of a pretrained model.

Each layer has an adapter of its own; the adapted layers are pooled side by side. For w2v-BERT 2.0:
"Enhancing Speaker Verification with w2v-BERT 2.0 and Knowledge Distillation guided Structured
Pruning", arXiv 2510.04213. Names as in WeSpeaker's W2VBert_Adapter_MFA.

Letters: B batch, T frames, F features of all layers, L layers, C channels, D embedding.
"""

import torch
from torch import Tensor, nn

from speakerlab.models.layered import layer_dim, split_layers
from speakerlab.models.pooling import (
    Pooling,
    attentive_mean_std,
    refuse_unusable,
)


class AttentionASP(Pooling):
    """Attentive statistics pooling; its attention has ReLU and BatchNorm, as WeSpeaker's ASP."""

    def __init__(self, in_dim: int, *, hidden_dim: int) -> None:
        super().__init__(in_dim, eps=1e-5)
        # The published attention has its softmax as fifth part; here the pooling takes it.
        self.attention = nn.Sequential(
            nn.Conv1d(in_dim, hidden_dim, kernel_size=1),
            nn.ReLU(inplace=True),
            nn.BatchNorm1d(hidden_dim),
            nn.Conv1d(hidden_dim, in_dim, kernel_size=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x_BCT = x.flatten(1, -2)
        # Without autocast, a convolution accepts only the type of its weights.
        first_weight = self.attention.get_parameter("0.weight")
        cast_BCT = x_BCT.to(first_weight.dtype)
        scores_BCT = self.attention(cast_BCT)
        mean_and_std = attentive_mean_std(x_BCT, scores_BCT, eps=self.eps)
        return torch.cat(mean_and_std, dim=1)


class AdapterMFA(nn.Module):
    """Adapters of all layers, attentive statistics pooling, one linear layer.

    feat_dim: of all layers together, which stand side by side.
    """

    min_frames = 2

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        num_layers: int = 1,
        embed_dim: int = 256,
        adapter_dim: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.num_layers = num_layers
        adapters: list[nn.Module] = []
        for _ in range(num_layers):
            adapter = nn.Sequential(
                nn.Linear(layer_dim(feat_dim, num_layers), adapter_dim),
                nn.LayerNorm(adapter_dim),
                nn.ReLU(inplace=True),
                nn.Linear(adapter_dim, adapter_dim),
            )
            adapters.append(adapter)
        # The names are the published ones.
        self.adapter_layers = nn.ModuleList(adapters)
        self.pooling = AttentionASP(num_layers * adapter_dim, hidden_dim=adapter_dim)
        self.drop = nn.Dropout(dropout)
        self.bottleneck = nn.Linear(self.pooling.out_dim, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        adapted: list[Tensor] = []
        layers = split_layers(feats_BTF, self.num_layers)
        for layer_BTC, adapter in zip(layers, self.adapter_layers):
            adapted.append(adapter(layer_BTC))
        adapted_BTC = torch.cat(adapted, dim=2)
        stats_BK = self.pooling(adapted_BTC.transpose(1, 2))
        return self.bottleneck(self.drop(stats_BK))
