"""Ranks and their collectives: the only file that imports torch.distributed.

A single process needs no launcher and no process group: every collective then returns its argument.
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

from speakerlab.core import ctrl_c
from speakerlab.training.devices import count_gpus, is_bound_to_gpu

T = TypeVar("T")
REDUCE = "step/reduce"  # in a profile: waiting for a collective
MAX_REASON = 200  # characters of a library's text in an error


@dataclass(frozen=True)
class Ranks:
    """Place of this process among the ranks, and collectives. Only global rank 0 writes files.

    In a group of some ranks (see `neighbours`), only `sum`, `max` and `gather` can be called.
    """

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
        # BatchNorm's statistics differ between ranks, and stay so: DDP would otherwise overwrite
        # them with rank 0's before each forward pass.
        is_on_gpu = self.device.type == "cuda"
        device_ids = [self.device] if is_on_gpu else None
        return DistributedDataParallel(
            module,
            device_ids=device_ids,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
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
        # The collective writes into a tensor for each rank, and requires contiguous memory.
        values = values.contiguous()
        values_of_ranks: list[Tensor] = []
        for _ in range(self.world_size):
            values_of_ranks.append(torch.empty_like(values))
        with record_function(REDUCE):
            dist.all_gather(values_of_ranks, values, group=self.group)
        return torch.cat(values_of_ranks)

    def gather_objects(self, value: T) -> list[T]:
        """Return each rank's value in the order of ranks; it must be picklable."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def neighbours(self, size: int) -> "Ranks":
        """Return this rank in its group of `size` consecutive ranks; all ranks must call it."""
        assert self.world_size % size == 0, (self.world_size, size)
        # torch requires every rank to make all groups, also the groups of other ranks.
        groups: list[Any] = []
        for start in range(0, self.world_size, size):
            members = range(start, start + size)
            groups.append(dist.new_group(members))
        group_number, rank_in_group = divmod(self.rank, size)
        return replace(
            self,
            rank=rank_in_group,
            world_size=size,
            group=groups[group_number],
        )

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with rank 0's."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def barrier(self, tag: str) -> None:
        """Wait for all ranks; ranks at different tags raise instead of passing each other."""
        tags = self.gather_objects(tag)
        if len(set(tags)) > 1:
            raise RuntimeError(
                f"barrier: ranks wait at different places: {tags}; report this bug"
            )

    def on_first(self, work: Callable[[], T]) -> T:
        """Return the result of rank 0's `work` on every rank; its failure raises on every rank."""
        if self.world_size == 1:
            return work()
        outcome: list[Any] = [None, None]  # result, message of a failure
        if self.is_first:
            try:
                outcome[0] = work()
            except Exception as error:
                # The other ranks wait for the outcome.
                outcome[1] = str(error)
                dist.broadcast_object_list(outcome, src=0)
                raise
        dist.broadcast_object_list(outcome, src=0)
        result, failure = outcome
        if failure is not None:
            raise ValueError(f"rank 0 failed: {failure}")
        return result


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because another rank is gone or does not answer."""
    # gloo raises a plain RuntimeError, which only its text distinguishes from other errors.
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def start_ranks(*, timeout_minutes: float, device: str = "auto") -> Ranks:
    """Join the process group in torchrun's environment, or be a single process.

    device: auto, cpu or cuda. It is chosen before the group is made: otherwise every rank's first
    barrier runs on GPU 0. CPU tensors travel by gloo, CUDA tensors by nccl.
    """
    # torchrun's names. `speakerlab train` also sets them where another program started the ranks.
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    rank_device = torch.device("cpu")
    if count_gpus(device, num_ranks=local_size):
        rank_device = _take_gpu(local_rank)
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_size=local_size,
        device=rank_device,
    )
    if world_size > 1:
        _join(ranks, timeout_minutes=timeout_minutes)
    return ranks


def _take_gpu(local_rank: int) -> torch.device:
    """Return the GPU of this rank, after making it the default GPU of this process."""
    # Slurm may show each rank only its own GPU, which then has number 0 everywhere.
    gpu_number = 0 if is_bound_to_gpu() else local_rank
    gpu = torch.device("cuda", gpu_number)
    try:
        torch.cuda.set_device(gpu)
    except RuntimeError as error:
        # The rest of CUDA's text is advice for programmers.
        first_line, _, _ = str(error).partition("\n")
        raise ValueError(f"{gpu}: {first_line}; run speakerlab doctor") from None
    return gpu


def _join(ranks: Ranks, *, timeout_minutes: float) -> None:
    """Join the process group of all ranks."""
    backends = "gloo"
    device_id = None
    debug_variable = "TORCH_DISTRIBUTED_DEBUG"
    if ranks.device.type == "cuda":
        backends = "cpu:gloo,cuda:nccl"
        # With a device, NCCL connects here, not in the first collective.
        device_id = ranks.device
        debug_variable = "NCCL_DEBUG"

    # Joining blocks in C++ until all ranks are there, and would not notice Ctrl-C. There is nothing
    # to save yet, so until then Ctrl-C ends the process at once.
    handler = ctrl_c.die_of_ctrl_c()
    try:
        dist.init_process_group(
            backends,
            timeout=timedelta(minutes=timeout_minutes),
            device_id=device_id,
        )
    except RuntimeError as error:
        raise ValueError(
            f"rank {ranks.rank} of {ranks.world_size}: cannot join the others:"
            f" {_reason(error)}; see their output, run speakerlab doctor, or set"
            f" {debug_variable}=INFO"
        ) from None
    finally:
        signal.signal(signal.SIGINT, handler)


def _reason(error: RuntimeError) -> str:
    """Return the line that names the cause in an error of NCCL or gloo."""
    text = str(error).strip()
    # NCCL's cause is behind lines with the place in the source and a general hint.
    _, _, last_error = text.partition("Last error:")
    cause = last_error.strip()
    if not cause:
        cause = text
    # An error without any text: at least its class.
    if not cause:
        cause = repr(error)
    first_line = cause.splitlines()[0]
    shortened = first_line[:MAX_REASON]
    return shortened.rstrip(" .;")


def shared_store(ranks: Ranks) -> Any:
    """Open a connection to the store that all ranks share; None for a single rank."""
    if ranks.world_size == 1:
        return None
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    torch_dist: Any = dist  # the type stubs of torch lack both stores
    # A second connection: a thread that waits on it must not block the collectives.
    store = torch_dist.TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
    )
    # The prefix keeps our keys apart from those of torch.
    return torch_dist.PrefixStore("speakerlab", store)
