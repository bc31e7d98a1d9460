"""X-vector: five time-delay layers, statistics pooling, one or two embedding layers.

Snyder, Garcia-Romero, Sell, Povey, Khudanpur: "X-Vectors: Robust DNN Embeddings for Speaker
Recognition", ICASSP 2018, doi 10.1109/ICASSP.2018.8461375.

Letters: B batch, T frames, F mel bins, C channels, D embedding.
"""

from torch import Tensor, nn

from speakerlab.models.pooling import POOLINGS, PooledModel, PoolingName, named, refuse_unusable


class XVector(PooledModel):
    """X-vector (defaults: as 3D-Speaker publishes it; WeSpeaker's have `two_emb_layer` and a
    `pool_eps` of 1e-7). The convolutions are not padded."""

    min_frames = 16  # the kernels' context, 4 + 4 + 6, and two

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 512,
        hidden_channels: int = 512,
        stats_channels: int = 1500,
        pooling: PoolingName = "tstp",
        pool_eps: float = 1e-8,
        two_emb_layer: bool = False,
    ) -> None:
        super().__init__(feat_dim, embed_dim, two_emb_layer=two_emb_layer)
        self.frame_1 = time_delay(feat_dim, hidden_channels, kernel=5)
        self.frame_2 = time_delay(hidden_channels, hidden_channels, kernel=3, dilation=2)
        self.frame_3 = time_delay(hidden_channels, hidden_channels, kernel=3, dilation=3)
        self.frame_4 = time_delay(hidden_channels, hidden_channels)
        self.frame_5 = time_delay(hidden_channels, stats_channels)
        self.add_embedding_layers(POOLINGS[pooling](stats_channels, eps=pool_eps))

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        x_BCT = self.frame_3(self.frame_2(self.frame_1(feats_BTF.transpose(1, 2))))
        return self.embed(self.frame_5(self.frame_4(x_BCT)))


def time_delay(
    in_channels: int, out_channels: int, *, kernel: int = 1, dilation: int = 1
) -> nn.Sequential:
    """Return a convolution over time without padding, ReLU, and BatchNorm without parameters."""
    conv = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation)
    norm = nn.BatchNorm1d(out_channels, affine=False)
    return named(conv_1d=conv, relu=nn.ReLU(inplace=True), bn=norm)
