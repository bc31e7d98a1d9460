"""Rank process for the connection check of `speakerlab doctor`: sums numbers over ranks."""

import torch

from speakerlab.core import process
from speakerlab.training.distributed import start_ranks


def main() -> None:
    """Sum numbers over all ranks, on the devices that training would use."""
    process.die_with_launcher()
    torch.set_num_threads(1)
    ranks = start_ranks(timeout_minutes=0.5)

    # Rank r adds r + 1. 16 MiB also test the transports of large messages.
    value = float(ranks.rank + 1)
    numbers = torch.full((1 << 22,), value, device=ranks.device)
    total = ranks.sum(numbers)[-1]
    expected = ranks.world_size * (ranks.world_size + 1) / 2
    assert total.item() == expected, total
    process.leave(0)  # without waiting for the other ranks


if __name__ == "__main__":
    main()
