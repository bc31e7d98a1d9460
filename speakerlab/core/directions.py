"""Directions of embeddings beside those of another model.

All embeddings of a model have a part in common, along their mean, which tells no speaker from
another. A student predicts this part with an error of its own for each recording, and the error is
in every cosine. So the part is left out: of a student's embeddings and of its targets. Cosines with
the teacher's embeddings are then lower, but rank speakers better.

Letters: B rows, D dimensions.
"""

from torch import Tensor
from torch.nn import functional as F


def direction_without(emb_BD: Tensor, common_D: Tensor) -> Tensor:
    """Return emb_BD of length 1, at right angles to `common_D`.

    common_D: of length 1, or 0: then nothing is left out.
    """
    common_B = emb_BD @ common_D
    rest_BD = emb_BD - common_B[:, None] * common_D
    return F.normalize(rest_BD, dim=1)
