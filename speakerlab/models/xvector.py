"""X-vector: five time-delay layers, statistics pooling, one or two embedding layers.

In: feats_BTF, log mel features, fp32. Out: emb_BD.
Snyder, Garcia-Romero, Sell, Povey, Khudanpur: "X-Vectors: Robust DNN Embeddings for Speaker
Recognition", ICASSP 2018, doi 10.1109/ICASSP.2018.8461375. Names and shapes of the parameters are
those of the checkpoints that 3D-Speaker and WeSpeaker publish.

Letters: B batch, T frames, F mel bins, C channels, D embedding.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.models.pooling import make_pooling, refuse_unusable


class XVector(nn.Module):
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
        super().__init__()
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.frame_1 = TimeDelay(feat_dim, hidden_channels, kernel=5)
        self.frame_2 = TimeDelay(hidden_channels, hidden_channels, kernel=3, dilation=2)
        self.frame_3 = TimeDelay(hidden_channels, hidden_channels, kernel=3, dilation=3)
        self.frame_4 = TimeDelay(hidden_channels, hidden_channels)
        self.frame_5 = TimeDelay(hidden_channels, stats_channels)
        self.pool = make_pooling(pooling, stats_channels, eps=pool_eps)
        self.min_frames = 14 + self.pool.min_frames  # the kernels' context: 4 + 4 + 6
        self.seg_1 = nn.Linear(self.pool.out_dim, embed_dim)
        if two_emb_layer:
            self.seg_bn_1 = nn.BatchNorm1d(embed_dim, affine=False)
            self.seg_2 = nn.Linear(embed_dim, embed_dim)
        self.two_emb_layer = two_emb_layer

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Embeddings (B, D) of features (B, T, F), T at least `min_frames`."""
        refuse_unusable(
            feats_BTF, name="XVector", feat_dim=self.feat_dim, min_frames=self.min_frames
        )
        x_BCT = self.frame_3(self.frame_2(self.frame_1(feats_BTF.transpose(1, 2))))
        x_BCT = self.frame_5(self.frame_4(x_BCT))
        emb_BD = self.seg_1(self.pool(x_BCT))
        if self.two_emb_layer:
            emb_BD = self.seg_2(self.seg_bn_1(F.relu(emb_BD)))
        return emb_BD


class TimeDelay(nn.Module):
    """Convolution over time without padding, ReLU, and BatchNorm without weights of its own."""

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel: int = 1, dilation: int = 1
    ) -> None:
        super().__init__()
        self.conv_1d = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation)
        self.bn = nn.BatchNorm1d(out_channels, affine=False)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return self.bn(F.relu(self.conv_1d(x_BCT), inplace=True))
