"""Features of several layers of a pretrained model, which stand side by side in `feats_BTF`."""

from collections.abc import Sequence

from torch import Tensor


def layer_dim(feat_dim: int, num_layers: int) -> int:
    """Return the number of features of one layer, given that of all layers together.

    Raises ValueError if it is not a whole number.
    """
    if feat_dim % num_layers:
        raise ValueError(
            f"feat_dim: {feat_dim} features are not those of {num_layers} layers; give"
            " a multiple"
        )
    return feat_dim // num_layers


def split_layers(feats_BTF: Tensor, num_layers: int) -> Sequence[Tensor]:
    """Return the features (B, T, C) of each layer, as views of `feats_BTF`."""
    return feats_BTF.chunk(num_layers, dim=2)
