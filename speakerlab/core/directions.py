"""Directions of embeddings beside those of another model.

All embeddings of a model share a part along their mean, which does not depend on the speaker. In
embeddings of several corpora, the variance along another direction is much larger than along any
other; it separates the corpora. A student's error along these two directions would change every
cosine with the teacher. So both are subtracted from the embeddings of students and from their
targets, as from word vectors in Mu and Viswanath, "All-but-the-top", ICLR 2018, arXiv 1702.01417.
Cosines with the teacher's embeddings are then lower, but rank speakers better.

Letters: N utterances, B rows, K common directions, D dimensions.
"""

import numpy as np
from torch import Tensor
from torch.nn import functional as F

NUM_COMMON = 2  # the mean, and a direction that stands out
# In one corpus, the largest variance is 1.05 to 1.3 times the next one, and its direction separates
# speakers, as all others do. In three corpora together it is 1.7 times the next.
STANDS_OUT = 1.5
ROUNDING = 1e-12  # a length or a variance below this is 0 but for rounding


def common_directions(emb_ND: np.ndarray) -> np.ndarray:
    """Return common_KD, float32: of length 1 and at right angles to each other.

    The second direction is 0 if none stands out.
    """
    emb_ND = emb_ND.astype(np.float64)
    mean_D = emb_ND.mean(axis=0)
    length = float(np.linalg.norm(mean_D))
    mean_D = mean_D / max(length, ROUNDING)
    along_mean_N = emb_ND @ mean_D
    rest_ND = emb_ND - np.outer(along_mean_N, mean_D)

    # `eigh` returns the variances in ascending order, each with its direction.
    covariance_DD = rest_ND.T @ rest_ND / len(emb_ND)
    variance_D, axes_DD = np.linalg.eigh(covariance_DD)
    next_largest, largest = variance_D[-2:]
    widest_D = axes_DD[:, -1]
    if largest < max(STANDS_OUT * next_largest, ROUNDING):
        widest_D = np.zeros_like(mean_D)
    return np.stack([mean_D, widest_D]).astype(np.float32)


def direction_without(emb_BD: Tensor, common_KD: Tensor) -> Tensor:
    """Return emb_BD of length 1, at right angles to `common_KD`.

    common_KD: of length 1 and at right angles to each other, or 0: then nothing is left out.
    """
    common_BK = emb_BD @ common_KD.T
    rest_BD = emb_BD - common_BK @ common_KD
    return F.normalize(rest_BD, dim=1)
