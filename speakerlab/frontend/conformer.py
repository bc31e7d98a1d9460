"""A layer of w2v-BERT 2.0, computed with the weights of transformers' layer in fewer operations.

The same values as transformers' code to rounding. Under autocast, each input is cast once instead
of once for each layer that reads it; the 1x1 convolutions are products of matrices, without
transposing; and a query is multiplied by each distance that two of T frames have, instead of by
the distance of each pair of frames.

Letters: B rows, T frames, C channels, H heads, E channels of a head, K taps of a convolution,
R distances from one of T frames to another, 2 T.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def conformer_layer(layer: Any, state_BTC: Tensor) -> Tensor:
    """Return the next state: half a feed-forward, attention, convolution, half a feed-forward."""
    normalised_BTC = narrowed(layer.ffn1_layer_norm(state_BTC))
    state_BTC = torch.add(state_BTC, layer.ffn1(normalised_BTC), alpha=0.5)

    normalised_BTC = narrowed(layer.self_attn_layer_norm(state_BTC))
    attended_BTC = attend(layer.self_attn, normalised_BTC)
    state_BTC = state_BTC + layer.self_attn_dropout(attended_BTC)

    normalised_BTC = narrowed(layer.conv_module.layer_norm(state_BTC))
    state_BTC = state_BTC + convolve(layer.conv_module, normalised_BTC)

    normalised_BTC = narrowed(layer.ffn2_layer_norm(state_BTC))
    state_BTC = torch.add(state_BTC, layer.ffn2(normalised_BTC), alpha=0.5)
    return layer.final_layer_norm(state_BTC)


def narrowed(x: Tensor) -> Tensor:
    """Return `x` in the format of autocast; unchanged without autocast."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return x
    return x.to(torch.get_autocast_dtype(device_type))


def attend(attention: Any, x_BTC: Tensor) -> Tensor:
    """Return self-attention with a learned embedding of each distance between two frames."""
    query_BHTE = heads_of(attention, attention.linear_q(x_BTC))
    key_BHTE = heads_of(attention, attention.linear_k(x_BTC))
    value_BHTE = heads_of(attention, attention.linear_v(x_BTC))
    query_BHTE = query_BHTE * attention.scaling

    key_BHET = key_BHTE.transpose(2, 3)
    position_BHTT = position_scores(attention, query_BHTE)
    scores_BHTT = query_BHTE @ key_BHET + position_BHTT
    weights_BHTT = scores_BHTT.softmax(-1).to(value_BHTE.dtype)
    heads_BHTE = attention.dropout(weights_BHTT) @ value_BHTE
    joined_BTC = heads_BHTE.transpose(1, 2).flatten(2)
    return attention.linear_out(joined_BTC)


def heads_of(attention: Any, x_BTC: Tensor) -> Tensor:
    """Return the channels divided among the heads, (B, T, C) -> (B, H, T, E)."""
    batch_size, num_frames, _ = x_BTC.shape
    x_BTHE = x_BTC.view(
        batch_size,
        num_frames,
        attention.num_heads,
        attention.head_size,
    )
    return x_BTHE.transpose(1, 2)


def position_scores(attention: Any, query_BHTE: Tensor) -> Tensor:
    """Return the products (B, H, T, T) of each query and the embedding of each frame's distance.

    Frames that are more than 64 before or 8 after, as published, have the embedding of the limit.
    """
    num_frames = query_BHTE.shape[2]
    # From 1 - T to T - 1, and T, which no two frames have, for `select_distances`.
    distance_R = torch.arange(1 - num_frames, num_frames + 1, device=query_BHTE.device)
    left = attention.left_max_position_embeddings
    right = attention.right_max_position_embeddings
    index_R = distance_R.clamp(-left, right) + left
    embedding_RE = attention.distance_embedding.weight[index_R]
    embedding_ER = embedding_RE.t().to(query_BHTE.dtype)
    scores_BHTR = query_BHTE @ embedding_ER
    return select_distances(scores_BHTR)


def select_distances(scores_BHTR: Tensor) -> Tensor:
    """Return the scores (B, H, T, T) of each frame with each other one.

    That of frames i and j has the index j - i + T - 1 in row i: from one row to the next it falls
    by one. So in the same values, without the first T - 1 and the last, taken as rows of R - 1
    instead of R, frame j has the index j in every row. With T = 3, the distances of each row are
    -2 ... 3, and [ ] encloses the scores that are wanted:

        -2 -1 [0  1  2] 3                    [0  1  2] 3 -2
        -2 [-1  0  1] 2 3    becomes rows    [-1  0  1] 2 3
        [-2 -1  0] 1  2 3                    [-2 -1  0] 1 2
    """
    _, _, num_frames, num_distances = scores_BHTR.shape
    scores = scores_BHTR.flatten(2)
    scores = scores[..., num_frames - 1 : -1]
    rows = scores.unflatten(2, (num_frames, num_distances - 1))
    return rows[..., :num_frames]


def convolve(module: Any, x_BTC: Tensor) -> Tensor:
    """Return the causal depthwise convolution of a conformer, between two 1x1 convolutions."""
    first_weight = module.pointwise_conv1.weight.squeeze(2)
    last_weight = module.pointwise_conv2.weight.squeeze(2)
    gated_BTC = F.glu(F.linear(x_BTC, first_weight))

    # Padded on the left only: a frame sees those before it.
    kernel_C11K = module.depthwise_conv.weight.unsqueeze(2)
    num_before = kernel_C11K.shape[-1] - 1
    padded_BTC = F.pad(gated_BTC, (0, 0, num_before, 0))
    # As a map of one row in channels last, which a CPU convolves twice as fast, with its gradient.
    padded_BC1T = padded_BTC.transpose(1, 2).unsqueeze(2)
    if padded_BC1T.device.type != "cpu":
        padded_BC1T = padded_BC1T.contiguous()
    convolved_BC1T = F.conv2d(
        padded_BC1T,
        kernel_C11K,
        groups=kernel_C11K.shape[0],
    )

    convolved_BTC = convolved_BC1T.squeeze(2).transpose(1, 2)
    normalised_BTC = narrowed(module.depthwise_layer_norm(convolved_BTC))
    activated_BTC = module.activation(normalised_BTC)
    return module.dropout(F.linear(activated_BTC, last_weight))
