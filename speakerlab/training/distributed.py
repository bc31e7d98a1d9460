"""The only file that imports torch.distributed: who this process is, and what ranks say to another.

One process needs no launcher and no process group: every call here then does the obvious.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Global rank 0 is the only one that writes."""

    rank: int
    local_rank: int
    world_size: int
    local_size: int  # ranks on this host
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` with gradients averaged over the ranks; its buffers stay each rank's own."""
        if self.world_size == 1:
            return module
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            module, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks; `values` itself is left alone."""
        total = values.clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def min(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The smallest tuple over ranks, compared as tuples are."""
        if self.world_size == 1:
            return values
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, values)
        return min(every)

    def barrier(self, tag: str) -> None:
        """Wait for all ranks; ranks at different tags raise instead of passing each other."""
        if self.world_size == 1:
            return
        tags: list[Any] = [None] * self.world_size
        dist.all_gather_object(tags, tag)
        if len(set(tags)) > 1:
            raise RuntimeError(f"barrier: ranks wait at different places, got {tags}; report this")

    def on_first(self, work: Callable[[], T]) -> T:
        """The result of rank 0's `work` on every rank; its failure raises on every rank."""
        if self.world_size == 1:
            return work()
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                outcome[0] = work()
            except Exception as error:  # told to all ranks, then raised
                failure = error
                outcome[1] = f"{error}"
        dist.broadcast_object_list(outcome, src=0)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise ValueError(f"rank 0 failed: {outcome[1]}")
        return outcome[0]


def start_ranks(*, timeout_minutes: float) -> Ranks:
    """Join the process group that torchrun's environment describes, or be a single process.

    The device is chosen before the group is made: otherwise every rank's first barrier runs on
    GPU 0. CPU tensors travel by gloo, CUDA tensors by nccl.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"rank {local_rank}: needs a GPU of its own, got {torch.cuda.device_count()} GPUs; "
                "lower --nproc"
            )
        torch.cuda.set_device(device)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
            timeout=timedelta(minutes=timeout_minutes),
            device_id=device if use_cuda else None,
        )
    return Ranks(
        rank=int(os.environ.get("RANK", 0)),
        local_rank=local_rank,
        world_size=world_size,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        device=device,
    )
