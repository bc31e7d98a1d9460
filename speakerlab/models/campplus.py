"""CAM++: a densely connected TDNN with context-aware masking (D-TDNN-CAM).

Wang, Zheng, Chen, Cheng, Chen: "CAM++: A Fast and Efficient Network for Speaker Verification Using
Context-Aware Masking", Interspeech 2023, arXiv 2303.00332. Figure 1 of the paper shows the network;
from input to output, its parts are these classes, with the shapes of the published model:

    log mel features                              (B, T, 80)
    FCM                    8x fewer mel bins      (B, 32, 10, T), stacked to (B, 320, T)
    first TDNN layer       strides over time      (B, 128, T / 2)
    DenseBlock, transition 12 layers, then halved (B, 128 + 12 * 32 = 512, T / 2) -> 256 channels
    DenseBlock, transition 24 layers, then halved (B, 256 + 24 * 32 = 1024, T / 2) -> 512 channels
    DenseBlock, transition 16 layers, then halved (B, 512 + 16 * 32 = 1024, T / 2) -> 512 channels
    statistics pooling     mean and deviation     (B, 1024)
    dense layer            the embedding          (B, 512)

The backbone is a D-TDNN: a layer reads the outputs of all layers before it. So 32 new channels per
layer are enough, and the network stays small and fast. The mask of a layer can suppress channels
that contain noise and not the speaker. Parameter names and shapes are those of the
published checkpoints, where the front-end convolution module (FCM) is called `head`.

Letters: B batch, T frames (halved by the first TDNN layer), N = B x T, F mel bins, C channels,
G channels that a layer adds, H hidden channels of a mask, S segments, D embedding.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.models.cpu import dense
from speakerlab.models.pooling import (
    TSTP,
    feature_map,
    keep_gradient_layout,
    named_sequential,
    refuse_unusable,
)
from speakerlab.models.resnet import BasicBlock

SEGMENT_FRAMES = 100  # at half the frame rate: 2 s with a 10-ms shift


class CAMPPlus(nn.Module):
    """CAM++, the whole of the paper's Figure 1 (defaults: the published 7.2 M parameters).

    growth_rate: channels that each layer of a dense block adds.
    bn_size: width of a layer's bottleneck, in multiples of `growth_rate`.
    blocks: the number of layers of each dense block.
    kernel_sizes, dilations: of the convolutions over time, for each dense block.
    head_channels, head_blocks: channels of the FCM, and residual blocks in each of its stages.
    pool_eps: the pooled deviation is sqrt(var + pool_eps) (0 in 3D-Speaker, 1e-7 in WeSpeaker).
    """

    # Pooling takes an unbiased deviation, which needs two frames; the first TDNN layer makes two of
    # three.
    min_frames = 3

    def __init__(
        self,
        *,
        feat_dim: int = 80,
        embed_dim: int = 512,
        init_channels: int = 128,
        growth_rate: int = 32,
        bn_size: int = 4,
        blocks: tuple[int, ...] = (12, 24, 16),
        kernel_sizes: tuple[int, ...] = (3, 3, 3),
        dilations: tuple[int, ...] = (1, 2, 2),
        head_channels: int = 32,
        head_blocks: tuple[int, ...] = (2, 2),
        pool_eps: float = 0.0,
    ) -> None:
        super().__init__()
        if not len(blocks) == len(kernel_sizes) == len(dilations):
            raise ValueError(
                "CAMPPlus: blocks, kernel_sizes and dilations differ in length:"
                f" {blocks}, {kernel_sizes}, {dilations}; give one of each per block"
            )
        self.feat_dim = feat_dim
        self.embed_dim = embed_dim
        self.head = FCM(head_channels, head_blocks)

        # Every stage of the FCM, and its last convolution, halves the bins and rounds up.
        num_halvings = len(head_blocks) + 1
        fcm_bins = math.ceil(feat_dim / 2**num_halvings)

        channels = init_channels
        layers = OrderedDict[str, nn.Module]()
        # A stride of 2 halves the frames, and so the cost of all layers after this one.
        strided_conv = nn.Conv1d(
            head_channels * fcm_bins,
            channels,
            kernel_size=5,
            stride=2,
            padding=2,
            bias=False,
        )
        layers["tdnn"] = named_sequential(
            linear=strided_conv,
            nonlinear=_norm_relu(channels),
        )

        for number, (depth, kernel_size, dilation) in enumerate(
            zip(blocks, kernel_sizes, dilations), start=1
        ):
            block = DenseBlock()
            for layer_number in range(1, depth + 1):
                block[f"tdnnd{layer_number}"] = DenseLayer(
                    channels,
                    growth_rate=growth_rate,
                    bottleneck=bn_size * growth_rate,
                    kernel_size=kernel_size,
                    dilation=dilation,
                )
                # The next layer also reads the channels that this layer adds.
                channels += growth_rate
            layers[f"block{number}"] = block

            # The transition layer halves the number of channels, which has grown in the block.
            halving_conv = nn.Conv1d(
                channels,
                channels // 2,
                kernel_size=1,
                bias=False,
            )
            layers[f"transit{number}"] = FramewiseLayers(
                nonlinear=_norm_relu(channels),
                linear=halving_conv,
            )
            channels //= 2

        layers["out_nonlinear"] = FramewiseLayers(
            batchnorm=nn.BatchNorm1d(channels),
            relu=nn.ReLU(inplace=True),
        )
        layers["stats"] = TSTP(channels, eps=pool_eps)

        # The published dense layer is a 1x1 convolution, which reads a sequence. So the pooled
        # statistics become a sequence of one frame.
        layers["column"] = nn.Unflatten(dim=1, unflattened_size=(-1, 1))
        dense_conv = nn.Conv1d(2 * channels, embed_dim, kernel_size=1, bias=False)
        dense_norm = nn.BatchNorm1d(embed_dim, affine=False)
        layers["dense"] = named_sequential(
            linear=dense_conv,
            nonlinear=named_sequential(batchnorm=dense_norm),
        )
        self.xvector = nn.Sequential(layers)
        self.apply(_init_weights)

    def forward(self, feats_BTF: Tensor) -> Tensor:
        """Return embeddings (B, D) of features (B, T, F), T at least `min_frames`."""
        refuse_unusable(self, feats_BTF)

        # The FCM reads a picture with one channel, frequency by time.
        feats_B1FT = feature_map(feats_BTF)
        map_BCFT = self.head(feats_B1FT)

        # The TDNN reads a sequence: channels and bins become the C x F channels of a frame.
        # The convolutions leave the map in channels last. `flatten` alone would give the map's
        # gradient torch's usual layout instead, and a mix of both layouts is slow.
        map_BCFT = keep_gradient_layout(map_BCFT)
        x_BCT = map_BCFT.flatten(1, 2)
        emb_BD1 = self.xvector(x_BCT)
        return emb_BD1.squeeze(-1)


class FCM(nn.Sequential):
    """Front-end convolution module, the 2-D part of Figure 1: (B, 1, F, T) -> (B, C, F / 8, T).

    A TDNN layer has separate weights for each mel bin. If a voice has the same pattern a few bins
    higher, this layer does not recognise the pattern. A convolution over frequency and time does,
    because it uses the same weights at all bins. Each stage and `conv2` halve the bins and keep
    the frames.
    """

    def __init__(self, channels: int, blocks: tuple[int, ...]) -> None:
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(1, channels, kernel_size=3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(channels),
            relu1=nn.ReLU(inplace=True),
        )
        for number, depth in enumerate(blocks, start=1):
            stage: list[nn.Module] = []
            for index in range(depth):
                # The first block of a stage halves the bins, but never the frames.
                frequency_stride = 2 if index == 0 else 1
                stride = (frequency_stride, 1)
                block = BasicBlock(channels, channels, stride=stride)
                stage.append(block)
            layers[f"layer{number}"] = nn.Sequential(*stage)
        layers["conv2"] = nn.Conv2d(
            channels,
            channels,
            kernel_size=3,
            stride=(2, 1),
            padding=1,
            bias=False,
        )
        layers["bn2"] = nn.BatchNorm2d(channels)
        layers["relu2"] = nn.ReLU(inplace=True)
        super().__init__(layers)


class ContextAwareMasking(nn.Module):
    """Context-aware masking with multi-granularity pooling: (B, C, T) -> (B, G, T).

    A dilated convolution over time (`linear_local`, G channels) is multiplied by a mask between 0
    and 1: sigmoid(W2 relu(W1 context)). The context of a frame is the mean of the whole utterance
    plus the mean of the frame's segment; the paper pools at these two granularities. The first mean
    describes the speaker and the recording, the second one what changes within two seconds. Both
    are the same for all frames of a segment, so the mask is computed once per segment, (B, G, S).
    """

    # Layers that stay fp32 in `models.folding.narrow`. They read one vector per segment, so 16 bits
    # would save no time.
    fp32_layers = ("linear1", "linear2")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int,
        dilation: int,
    ) -> None:
        super().__init__()
        self.linear_local = nn.Conv1d(
            in_channels,
            out_channels,
            kernel_size,
            padding=kernel_size // 2 * dilation,
            dilation=dilation,
            bias=False,
        )
        hidden_channels = in_channels // 2
        self.linear1 = nn.Conv1d(in_channels, hidden_channels, kernel_size=1)
        self.linear2 = nn.Conv1d(hidden_channels, out_channels, kernel_size=1)

    def forward(self, x_BCT: Tensor, segment_matrices: tuple[Tensor, Tensor]) -> Tensor:
        """Return the masked convolution; `segment_matrices` come from `segments_of`."""
        to_context_TS, to_frames_ST = segment_matrices

        # In at least fp32: in 16 bits, the mean over a long utterance would lose digits, and large
        # values would overflow in fp16.
        with autocast_off(x_BCT):
            context_BCS = widened(x_BCT) @ to_context_TS
            hidden_BHS = self.linear1(context_BCS)
            hidden_BHS = F.relu(hidden_BHS, inplace=True)
            mask_BGS = self.linear2(hidden_BHS).sigmoid()

        # Every frame gets the mask of its segment.
        mask_BGT = mask_BGS.to(x_BCT.dtype) @ to_frames_ST
        return self.linear_local(x_BCT) * mask_BGT


class DenseLayer(nn.Module):
    """D-TDNN layer with a mask, one layer of a block in Figure 1: (B, C, T) -> (B, G, T).

    The input has hundreds of channels, and a convolution over time reads each of them once per tap.
    To save work, a 1x1 convolution first reduces them to `bottleneck` channels. BatchNorm and ReLU
    come before each convolution, because each layer needs its own scale for the channels that all
    layers read.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        growth_rate: int,
        bottleneck: int,
        kernel_size: int,
        dilation: int,
    ) -> None:
        super().__init__()
        self.nonlinear1 = _norm_relu(in_channels)
        self.linear1 = nn.Conv1d(in_channels, bottleneck, kernel_size=1, bias=False)
        self.nonlinear2 = _norm_relu(bottleneck)
        self.cam_layer = ContextAwareMasking(
            bottleneck,
            growth_rate,
            kernel_size=kernel_size,
            dilation=dilation,
        )

    def forward(self, x_BCT: Tensor, segment_matrices: tuple[Tensor, Tensor]) -> Tensor:
        """Return the G = `growth_rate` channels that this layer adds."""
        mixed_BCT = self.linear1(self.nonlinear1(x_BCT))
        hidden_BCT = self.nonlinear2(mixed_BCT)
        return self.cam_layer(hidden_BCT, segment_matrices)


class DenseBlock(nn.ModuleDict):
    """Densely connected block of Figure 1: (B, C, T) -> (B, C + number of layers x G, T).

    It holds `DenseLayer`s by name. Each reads the block's input and the outputs of all layers
    before it, and appends its own channels.
    """

    def forward(self, x_BCT: Tensor) -> Tensor:
        layers = list(self.values())

        # On a CPU, cpu/dense.py computes the same block faster. It returns None where it does not
        # apply, for example on a GPU and in an export.
        y_BCT = dense.run_block(layers, x_BCT, segment_frames=SEGMENT_FRAMES)
        if y_BCT is not None:
            return y_BCT

        # All layers have the same frames, so the segments are computed once for the block.
        segment_matrices = segments_of(x_BCT, SEGMENT_FRAMES)
        for layer in layers:
            new_BGT = layer(x_BCT, segment_matrices)
            x_BCT = torch.cat([x_BCT, new_BGT], dim=1)
        return x_BCT


class FramewiseLayers(nn.Sequential):
    """Layers that treat each frame alone, such as the transition layer of Figure 1.

    (B, C, T) -> (B, C', T). The layers are BatchNorm, ReLU and 1x1 convolutions, which look at
    one frame at a time. After a dense block on a CPU, the memory has the order (C, B, T): all
    frames of a channel are one row of N = B x T values. Torch's layers would first copy them to
    the order (B, C, T). To avoid the copy, this class passes the memory as it is, as if it were one
    utterance of N frames, (1, C, N).
    """

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__(OrderedDict(layers))

    def forward(self, x_BCT: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not dense.is_in_rows(x_BCT):
            return super().forward(x_BCT)

        x_CBT = x_BCT.transpose(0, 1)
        batch_and_frames = x_CBT.shape[1:]
        trains = any(module.training for module in self.modules())
        # For inference in 16 bits, cpu/dense.py pads the rows with zeros. With the zeros, rows lie
        # one behind the other in memory, which is faster; N is then the padded length, and what is
        # computed from the zeros is cut off below. A BatchNorm that trains must not count them.
        x_CN = x_CBT.flatten(1) if trains else dense.whole_rows(x_CBT)

        y_1CN = super().forward(x_CN.unsqueeze(0))
        num_values = batch_and_frames.numel()
        y_CN = y_1CN.squeeze(0)[:, :num_values]
        y_CBT = y_CN.unflatten(1, batch_and_frames)
        return y_CBT.transpose(0, 1)


def segments_of(x_BCT: Tensor, segment_frames: int) -> tuple[Tensor, Tensor]:
    """Return two matrices: from the frames of `x_BCT` to their segments, and back.

    to_context_TS: gives the context of a segment, which is the mean over all frames plus the mean
    over the segment; at least fp32.
    to_frames_ST: gives each frame the value of its segment; in the type of `x_BCT`.

    The last segment with frames may be shorter. An empty segment follows it, so that S is at least
    2: torch.export, with a dynamic length, would treat a size of 1 as a special case.

    `avg_pool1d` with `ceil_mode` would be shorter, but some runtimes of exported models divide a
    shorter segment by its true length and others by the full length.
    """
    device = x_BCT.device
    num_frames = x_BCT.shape[-1]
    num_segments = (num_frames - 1) // segment_frames + 2  # with the empty one
    frame_T = torch.arange(num_frames, device=device)
    segment_T = frame_T // segment_frames
    segment_S = torch.arange(num_segments, device=device)

    # 1 where a frame belongs to a segment, else 0.
    is_member_TS = segment_T.unsqueeze(1) == segment_S
    members_TS = widened(is_member_TS.to(x_BCT.dtype))  # fp32, or float64 if x is

    lengths_S = members_TS.sum(0).clamp_min(1)  # the empty segment must not divide by 0
    segment_mean_TS = members_TS / lengths_S
    utterance_mean = 1 / num_frames  # the weight of each frame in the mean over all
    to_context_TS = segment_mean_TS + utterance_mean
    to_frames_ST = members_TS.T.to(x_BCT.dtype)
    return to_context_TS, to_frames_ST


def _norm_relu(channels: int) -> nn.Sequential:
    return named_sequential(
        batchnorm=nn.BatchNorm1d(channels),
        relu=nn.ReLU(inplace=True),
    )


def _init_weights(module: nn.Module) -> None:
    """Use He initialisation for 1-D convolutions and torch's for 2-D ones, as published."""
    if isinstance(module, nn.Conv1d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
