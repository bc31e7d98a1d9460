"""A rank that gathers what a single rank has recorded, to test several ranks in one process."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Replayed:
    """One of two ranks; what it gathers was recorded from a single rank, call by call."""

    rank: int
    whole: list[Tensor]
    world_size: int = 2

    def gather(self, values: Tensor) -> Tensor:
        whole = self.whole.pop(0)
        ranks_part = whole.chunk(2)[self.rank]
        torch.testing.assert_close(ranks_part, values)
        return whole
