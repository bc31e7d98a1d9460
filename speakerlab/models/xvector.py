"""X-vector: five time-delay layers, statistics pooling, one or two embedding layers.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
Snyder, Garcia-Romero, Sell, Povey, Khudanpur: "X-Vectors: Robust DNN Embeddings for Speaker
Recognition", ICASSP 2018, doi 10.1109/ICASSP.2018.8461375. Names and shapes of the parameters are
those of the checkpoints that 3D-Speaker and WeSpeaker publish.

Letters: B batch, T frames, F mel bins, C channels, D embedding.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.pooling import PooledModel, refuse_unusable


class XVector(PooledModel):
    """X-vector (defaults: as 3D-Speaker publishes it).

    `two_emb_layer` adds ReLU, BatchNorm and a second linear layer, whose output is then the
    embedding; WeSpeaker's have it, and a `pool_eps` of 1e-7. The convolutions are not padded.
    """

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 512,
        hidden_channels: int = 512,
        stats_channels: int = 1500,
        pooling: str = "tstp",
        pool_eps: float = 1e-8,
        two_emb_layer: bool = False,
    ) -> None:
        super().__init__(feat_dim, embed_dim)
        self.frame_1 = TimeDelay(feat_dim, hidden_channels, kernel=5)
        self.frame_2 = TimeDelay(hidden_channels, hidden_channels, kernel=3, dilation=2)
        self.frame_3 = TimeDelay(hidden_channels, hidden_channels, kernel=3, dilation=3)
        self.frame_4 = TimeDelay(hidden_channels, hidden_channels)
        self.frame_5 = TimeDelay(hidden_channels, stats_channels)
        self.add_embedding_layers(
            stats_channels, pooling=pooling, pool_eps=pool_eps, two=two_emb_layer
        )
        self.min_frames = 14 + self.pool.min_frames  # the kernels' context: 4 + 4 + 6

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Return embeddings (B, D) of features (B, T, F) with at least `min_frames` frames."""
        refuse_unusable(self, feats_BTF)
        x_BCT = self.frame_3(self.frame_2(self.frame_1(feats_BTF.transpose(1, 2))))
        return self.embed(self.frame_5(self.frame_4(x_BCT)))


class TimeDelay(nn.Module):
    """Convolution over time without padding, ReLU, and BatchNorm without scale and shift."""

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel: int = 1, dilation: int = 1
    ) -> None:
        super().__init__()
        self.conv_1d = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation)
        self.bn = nn.BatchNorm1d(out_channels, affine=False)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return self.bn(F.relu(self.conv_1d(x_BCT), inplace=True))
