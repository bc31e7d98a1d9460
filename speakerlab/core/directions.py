"""Directions of embeddings beside those of another model.

All embeddings of a model share a part along their mean, which does not depend on the speaker. A
student predicts this part with an error, which differs from recording to recording and changes
every cosine. So the embeddings of students, and their targets, are without it. Cosines with the
teacher's embeddings are then lower, but rank speakers better.

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
