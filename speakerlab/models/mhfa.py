"""Multi-head factorized attentive pooling (MHFA) over the layers of a pretrained model.

Peng, Plchot, Stafylakis, Mosner, Burget, Cernocky: "An attention-based backend allowing efficient
fine-tuning of transformer models for speaker verification", SLT 2022, arXiv 2210.01273. One
weighted sum of the layers gives the keys, from which the attention weights of the frames follow;
another gives the values that are averaged with these weights. Names as in the authors' code.

Letters: B batch, T frames, F features of all layers, C channels, H heads, D embedding.
"""

import torch
from torch import Tensor, nn

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.models.layered import layer_dim, split_layers
from speakerlab.models.pooling import refuse_unusable


class MHFA(nn.Module):
    """Keys and values from two sums of the layers; each head weighs the frames by the keys.

    feat_dim: of all layers together, which stand side by side.
    """

    min_frames = 1

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        num_layers: int = 1,
        embed_dim: int = 256,
        num_heads: int = 32,
        compression_dim: int = 128,
    ) -> None:
        super().__init__()
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.num_layers = num_layers
        channels = layer_dim(feat_dim, num_layers)
        # The names are the published ones.
        self.weights_k = nn.Parameter(torch.ones(num_layers))
        self.weights_v = nn.Parameter(torch.ones(num_layers))
        self.cmp_linear_k = nn.Linear(channels, compression_dim)
        self.cmp_linear_v = nn.Linear(channels, compression_dim)
        self.att_head = nn.Linear(compression_dim, num_heads)
        self.pooling_fc = nn.Linear(num_heads * compression_dim, embed_dim)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        key_BTC = self.cmp_linear_k(self._sum_layers(feats_BTF, self.weights_k))
        value_BTC = self.cmp_linear_v(self._sum_layers(feats_BTF, self.weights_v))
        scores_BTH = self.att_head(key_BTC)
        with autocast_off(feats_BTF):
            weight_BTH = widened(scores_BTH).softmax(1)
            heads_BHC = weight_BTH.transpose(1, 2) @ widened(value_BTC)
        return self.pooling_fc(heads_BHC.flatten(1))

    def _sum_layers(self, feats_BTF: Tensor, weights_L: Tensor) -> Tensor:
        """Return the sum (B, T, C) of the layers, weighted by softmax(weights_L)."""
        share_L = weights_L.softmax(0)
        layers = split_layers(feats_BTF, self.num_layers)
        # In fp32: the layers of some models have channels far from 0.
        sum_BTC = share_L[0] * widened(layers[0])
        for share, layer_BTC in zip(share_L[1:], layers[1:]):
            sum_BTC = sum_BTC + share * widened(layer_BTC)
        return sum_BTC
