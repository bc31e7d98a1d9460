"""Ranks and their collectives: the only file that imports torch.distributed.

A single process needs no launcher and no process group: every call then does the obvious.
"""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from speakerlab.core import process
from speakerlab.training.devices import count_gpus

T = TypeVar("T")
REDUCE = "step/reduce"  # name of waiting for a collective in a profile


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Only global rank 0 writes files."""

    rank: int
    world_size: int
    local_size: int  # ranks on this host
    device: torch.device
    group: Any = None  # torch's process group; None: of all ranks

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return `module` with gradients averaged over ranks; each rank keeps its own buffers."""
        if self.world_size == 1:
            return module
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            module, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks; `values` is not changed."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum of each value over ranks; `values` is not changed."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        result = values.clone()
        if self.world_size > 1:
            with record_function(REDUCE):
                dist.all_reduce(result, op=op, group=self.group)
        return result

    def gather(self, values: Tensor) -> Tensor:
        """Return the ranks' values, all of one shape, joined along the first axis in order."""
        if self.world_size == 1:
            return values
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        with record_function(REDUCE):
            dist.all_gather(parts, values, group=self.group)
        return torch.cat(parts)

    def every(self, value: T) -> list[T]:
        """Return each rank's value in the order of ranks; it must be picklable."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def neighbours(self, size: int) -> "Ranks":
        """Return this rank among `size` consecutive ones; all ranks must call it alike."""
        assert self.world_size % size == 0, (self.world_size, size)
        starts = range(0, self.world_size, size)
        groups = [dist.new_group(range(start, start + size)) for start in starts]
        number, rank = divmod(self.rank, size)
        return replace(self, rank=rank, world_size=size, group=groups[number])

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with rank 0's."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def barrier(self, tag: str) -> None:
        """Wait for all ranks; ranks at different tags raise instead of passing each other."""
        tags = self.every(tag)
        if len(set(tags)) > 1:
            raise RuntimeError(f"barrier: ranks wait at different places: {tags}; report this bug")

    def on_first(self, work: Callable[[], T]) -> T:
        """Return the result of rank 0's `work` on every rank; its failure raises on every rank."""
        if self.world_size == 1:
            return work()
        outcome: list[Any] = [None, None]  # result, message of a failure
        if self.is_first:
            try:
                outcome[0] = work()
            except Exception as error:
                dist.broadcast_object_list([None, f"{error}"], src=0)
                raise
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise ValueError(f"rank 0 failed: {outcome[1]}")
        return outcome[0]


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because another rank is gone or does not answer."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def start_ranks(*, timeout_minutes: float, device: str = "auto") -> Ranks:
    """Join the process group in torchrun's environment, or be a single process.

    device: auto, cpu or cuda. It is chosen before the group is made: otherwise every rank's first
    barrier runs on GPU 0. CPU tensors travel by gloo, CUDA tensors by nccl.
    """
    rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    sizes = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    world_size, local_size = sizes
    use_cuda = count_gpus(device, num_ranks=local_size) > 0
    chosen = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        try:
            torch.cuda.set_device(chosen)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise ValueError(f"{chosen}: {first}; run speakerlab doctor") from None
    if world_size > 1:
        handler = process.die_of_ctrl_c()  # there is nothing to save yet
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
            timeout=timedelta(minutes=timeout_minutes),
            device_id=chosen if use_cuda else None,
        )
        signal.signal(signal.SIGINT, handler)
    return Ranks(rank, world_size, local_size, chosen)


def shared_store(ranks: Ranks) -> Any:
    """Open a connection to the store that all ranks share; None for a single rank."""
    if ranks.world_size == 1:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    torch_dist: Any = dist  # these two are missing in its type stubs
    store = torch_dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    return torch_dist.PrefixStore("speakerlab", store)
