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
    shape = (*x_BTC.shape[:2], attention.num_heads, attention.head_size)
    query_BHTE = attention.linear_q(x_BTC).view(shape).transpose(1, 2)
    key_BHTE = attention.linear_k(x_BTC).view(shape).transpose(1, 2)
    value_BHTE = attention.linear_v(x_BTC).view(shape).transpose(1, 2)
    query_BHTE = query_BHTE * attention.scaling

    # The score of a query with each distance, then that of the distance of each pair of frames.
    distance_PE = attention.distance_embedding.weight
    by_distance_BHTP = query_BHTE @ distance_PE.t().to(query_BHTE.dtype)
    # In fp32: the backward pass adds up the gradients of far frames, which share a distance.
    by_distance_BHTP = widened(by_distance_BHTP)
    index_TT = distance_index(attention, num_frames=x_BTC.shape[1], device=x_BTC.device)
    index_BHTT = index_TT.expand(*by_distance_BHTP.shape[:2], -1, -1)
    position_BHTT = by_distance_BHTP.gather(3, index_BHTT)

    product_BHTT = query_BHTE @ key_BHTE.transpose(2, 3)
    scores_BHTT = product_BHTT + position_BHTT.to(product_BHTT.dtype)
    weights_BHTT = attention.dropout(scores_BHTT.softmax(-1).to(value_BHTE.dtype))
    heads_BTHE = (weights_BHTT @ value_BHTE).transpose(1, 2)
    return attention.linear_out(heads_BTHE.flatten(2))


def distance_index(attention: Any, *, num_frames: int, device: torch.device) -> Tensor:
    """Return the index (T, T) of the distance from each frame to each other one, limited."""
    frames_T = torch.arange(num_frames, device=device)
    distance_TT = frames_T[None, :] - frames_T[:, None]
    left = attention.left_max_position_embeddings
    right = attention.right_max_position_embeddings
    return distance_TT.clamp(-left, right) + left


def convolve(module: Any, x_BTC: Tensor) -> Tensor:
    """Return the causal depthwise convolution of a conformer, between two 1x1 convolutions."""
    gated_BTC = F.glu(F.linear(x_BTC, module.pointwise_conv1.weight.squeeze(2)))
    num_before = module.depthwise_conv.kernel_size[0] - 1
    padded_BCT = F.pad(gated_BTC.transpose(1, 2), (num_before, 0))
    convolved_BTC = module.depthwise_conv(padded_BCT).transpose(1, 2)
    normalised_BTC = narrowed(module.depthwise_layer_norm(convolved_BTC))
    activated_BTC = module.activation(normalised_BTC)
    mixed_BTC = F.linear(activated_BTC, module.pointwise_conv2.weight.squeeze(2))
    return module.dropout(mixed_BTC)
