"""X-vector: five time-delay layers, statistics pooling, one or two embedding layers.

Snyder, Garcia-Romero, Sell, Povey, Khudanpur: "X-Vectors: Robust DNN Embeddings for Speaker
Recognition", ICASSP 2018, doi 10.1109/ICASSP.2018.8461375.

Letters: B batch, T frames, F mel bins, C channels, D embedding.
"""

from torch import Tensor, nn

from speakerlab.models.pooling import (
    POOLINGS,
    PooledModel,
    PoolingName,
    named_sequential,
    refuse_unusable,
)


class XVector(PooledModel):
    """X-vector, with convolutions that are not padded. The defaults are those of 3D-Speaker.

    WeSpeaker's models have `two_emb_layer` and a `pool_eps` of 1e-7.
    """

    # Unpadded, the kernels use up 4 + 4 + 6 frames of context, which leaves two to pool.
    min_frames = 16

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
        # Three layers with ever more context, then two that read each frame alone.
        self.frame_1 = time_delay(feat_dim, hidden_channels, kernel=5)
        self.frame_2 = time_delay(
            hidden_channels,
            hidden_channels,
            kernel=3,
            dilation=2,
        )
        self.frame_3 = time_delay(
            hidden_channels,
            hidden_channels,
            kernel=3,
            dilation=3,
        )
        self.frame_4 = time_delay(hidden_channels, hidden_channels)
        # Wider than the others, because its channels are pooled.
        self.frame_5 = time_delay(hidden_channels, stats_channels)
        pool = POOLINGS[pooling](stats_channels, eps=pool_eps)
        self.add_embedding_layers(pool)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        refuse_unusable(self, feats_BTF)
        # Convolutions over time read (B, C, T); the mel bins are their first channels.
        x_BCT = feats_BTF.transpose(1, 2)
        x_BCT = self.frame_1(x_BCT)
        x_BCT = self.frame_2(x_BCT)
        x_BCT = self.frame_3(x_BCT)
        x_BCT = self.frame_4(x_BCT)
        x_BCT = self.frame_5(x_BCT)
        return self.embed(x_BCT)


def time_delay(
    in_channels: int,
    out_channels: int,
    *,
    kernel: int = 1,
    dilation: int = 1,
) -> nn.Sequential:
    """Return a convolution over time without padding, ReLU, and BatchNorm without parameters."""
    conv = nn.Conv1d(
        in_channels,
        out_channels,
        kernel,
        dilation=dilation,
    )
    return named_sequential(
        conv_1d=conv,
        relu=nn.ReLU(inplace=True),
        # The published BatchNorm has no scale and shift.
        bn=nn.BatchNorm1d(out_channels, affine=False),
    )
