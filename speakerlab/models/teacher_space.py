"""The last layer of a student whose embeddings lie in the space of its teacher.

Letters: B rows, K common directions, D dimensions of the teacher, E of the student's backbone.
"""

import torch
from torch import Tensor, nn

from speakerlab.core.directions import NUM_COMMON, direction_without


class TeacherSpace(nn.Module):
    """Last layer of a student: maps its embeddings to directions in the space of its teacher.

    embed_dim: of the backbone. target_dim: of the teacher.
    """

    common_KD: Tensor

    def __init__(self, *, embed_dim: int, target_dim: int) -> None:
        super().__init__()
        self.target_dim = target_dim
        # With equal dimensions, the last layer of the backbone can learn this map itself.
        self.linear: nn.Module = nn.Identity()
        if embed_dim != target_dim:
            self.linear = nn.Linear(embed_dim, target_dim, bias=False)
        # The directions that all embeddings of the teacher have in common.
        self.register_buffer("common_KD", torch.zeros(NUM_COMMON, target_dim))

    def forward(self, emb_BE: Tensor) -> Tensor:
        """Return emb_BD, float32, of length 1."""
        projected_BD = self.linear(emb_BE.float())
        return direction_without(projected_BD, self.common_KD)
