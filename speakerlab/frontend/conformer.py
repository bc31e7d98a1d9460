"""A layer of w2v-BERT 2.0, computed with the weights of transformers' layer in fewer operations.

The same values as transformers' code to rounding. Under autocast, each input is cast once instead
of once for each layer that reads it; the 1x1 convolutions are products of matrices, without
transposing; and a query is multiplied by each of the 73 distances (64 frames before to 8 after),
instead of by the distance of each pair of frames.

Letters: B rows, T frames, C channels, H heads, E channels of a head, P distances.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from speakerlab.core.full_precision import widened


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

    # The score of a query with each distance, then with the distance of each pair of frames.
    embedding_PE = attention.distance_embedding.weight
    embedding_EP = embedding_PE.t().to(query_BHTE.dtype)
    # In fp32: the backward pass adds up the gradients of far frames, which share a distance.
    by_distance_BHTP = widened(query_BHTE @ embedding_EP)
    index_TT = distance_index(
        attention,
        num_frames=x_BTC.shape[1],
        device=x_BTC.device,
    )
    batch_size, num_heads, _, _ = by_distance_BHTP.shape
    index_BHTT = index_TT.expand(batch_size, num_heads, -1, -1)
    position_BHTT = by_distance_BHTP.gather(3, index_BHTT)

    key_BHET = key_BHTE.transpose(2, 3)
    scores_BHTT = query_BHTE @ key_BHET
    scores_BHTT = scores_BHTT + position_BHTT.to(scores_BHTT.dtype)
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


def distance_index(attention: Any, *, num_frames: int, device: torch.device) -> Tensor:
    """Return the index (T, T) of the distance from each frame to each other one, limited."""
    frames_T = torch.arange(num_frames, device=device)
    distance_TT = frames_T[None, :] - frames_T[:, None]
    left = attention.left_max_position_embeddings
    right = attention.right_max_position_embeddings
    return distance_TT.clamp(-left, right) + left


def convolve(module: Any, x_BTC: Tensor) -> Tensor:
    """Return the causal depthwise convolution of a conformer, between two 1x1 convolutions."""
    first_weight = module.pointwise_conv1.weight.squeeze(2)
    last_weight = module.pointwise_conv2.weight.squeeze(2)
    gated_BTC = F.glu(F.linear(x_BTC, first_weight))

    # Padded on the left only: a frame sees those before it.
    gated_BCT = gated_BTC.transpose(1, 2)
    num_before = module.depthwise_conv.kernel_size[0] - 1
    padded_BCT = F.pad(gated_BCT, (num_before, 0))
    convolved_BCT = module.depthwise_conv(padded_BCT)

    convolved_BTC = convolved_BCT.transpose(1, 2)
    normalised_BTC = narrowed(module.depthwise_layer_norm(convolved_BTC))
    activated_BTC = module.activation(normalised_BTC)
    return module.dropout(F.linear(activated_BTC, last_weight))
