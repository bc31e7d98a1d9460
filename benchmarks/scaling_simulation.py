"""A training step on n ranks, from what one rank's step takes and what the links between them give.

In: times of a rank alone, the moment at which each gradient is ready, bytes, links. Out: seconds of
a step. Nothing is measured here. The model, which is DistributedDataParallel's way of working (Li
et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704):

- gradients fill buckets in the order in which they become ready, the first of 1 MiB, the others of
  25 MiB; a bucket is closed by the gradient that fills it;
- a bucket travels once it is full on every rank and the bucket before has arrived: one at a time;
- a ring all-reduce has 2 (n - 1) rounds, each of the n-th part of the bytes (Patarasuk and Yuan,
  Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009);
- what travels while the backward pass goes on costs nothing, but where the link needs the cores
  that compute (`Link.core_share`), which then stand still for so long;
- a step lasts as long as that of the slowest of n ranks, each drawing its pace from `Rank.paces`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Link:
    """What two neighbours of the ring have between them, each way."""

    name: str
    bytes_per_second: float
    round_seconds: float  # of a round however small
    core_share: float = 0.0  # of a rank's cores while something travels

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """By a ring; 0 for one rank."""
        rounds = 2 * (num_ranks - 1)
        return rounds * (self.round_seconds + num_bytes / num_ranks / self.bytes_per_second)

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Until every rank has the `num_bytes` of every other one, by a ring."""
        return (num_ranks - 1) * (self.round_seconds + num_bytes / self.bytes_per_second)


@dataclass(frozen=True)
class Gradient:
    """One gradient, or a bucket of them: ready so long after the backward pass began."""

    ready_seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Rank:
    """A step of one rank that has nothing to wait for.

    The forward pass counts from the start of the step, the front end included; the update is all
    that comes after the last gradient. paces: measured steps over their mean. summed_bytes and
    gathered_bytes: of collectives in the forward and backward pass of the head, for which
    everything waits.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    gradients: tuple[Gradient, ...]
    paces: tuple[float, ...] = (1.0,)
    summed_bytes: tuple[int, ...] = ()
    gathered_bytes: tuple[int, ...] = ()

    def with_head(self, head: "Head", *, num_ranks: int, rows: int, is_split: bool) -> "Rank":
        """The same rank with a head of more classes, whose gradient is the first to be ready.

        Split over ranks, its gradient stays where it is. Instead every rank needs the embeddings
        and labels (8 bytes) of all, four sums over ranks of a number for each of their rows, the
        gradients of all embeddings, and one number for the norm of the gradient.
        """
        later = head.backward_seconds
        gradients = [Gradient(g.ready_seconds + later, g.num_bytes) for g in self.gradients]
        if not is_split:
            gradients.insert(0, Gradient(later, 4 * head.num_classes * head.embed_dim))
        every, embedded = 4 * rows * num_ranks, 4 * rows * head.embed_dim
        exchanged = is_split and num_ranks > 1
        return replace(
            self,
            forward_seconds=self.forward_seconds + head.forward_seconds,
            backward_seconds=self.backward_seconds + head.backward_seconds,
            update_seconds=self.update_seconds + head.update_seconds,
            gradients=tuple(gradients),
            summed_bytes=(every, every, 2 * every, num_ranks * embedded, 4) if exchanged else (),
            gathered_bytes=(embedded, 8 * rows) if exchanged else (),
        )

    def scaled(self, factor: float) -> "Rank":
        """All of it so many times as long."""
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor,
            backward_seconds=self.backward_seconds * factor,
            update_seconds=self.update_seconds * factor,
            gradients=tuple(
                Gradient(g.ready_seconds * factor, g.num_bytes) for g in self.gradients
            ),
        )

    @property
    def step_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.update_seconds


@dataclass(frozen=True)
class Head:
    """What a rank spends on its rows of a head; num_classes and embed_dim are of the whole head."""

    num_classes: int
    embed_dim: int
    forward_seconds: float
    backward_seconds: float
    update_seconds: float


def fill_buckets(
    gradients: Sequence[Gradient], *, first: int = FIRST_BUCKET_BYTES, others: int = BUCKET_BYTES
) -> list[Gradient]:
    """The buckets in the order in which they travel; each is ready with its last gradient."""
    buckets: list[Gradient] = []
    filled = 0
    for gradient in sorted(gradients, key=lambda gradient: gradient.ready_seconds):
        filled += gradient.num_bytes
        if filled >= (others if buckets else first):
            buckets.append(Gradient(gradient.ready_seconds, filled))
            filled = 0
    if filled:
        buckets.append(Gradient(max(g.ready_seconds for g in gradients), filled))
    return buckets


def slowest_pace(paces: Sequence[float], num_ranks: int) -> float:
    """The mean of the largest of `num_ranks` draws from these values.

    The k-th smallest of m values is the largest of n draws in ((k / m)^n - ((k - 1) / m)^n) of the
    cases. Never more than the largest value that was measured.
    """
    rising, m = sorted(paces), len(paces)
    return sum(
        pace * (((k + 1) / m) ** num_ranks - (k / m) ** num_ranks) for k, pace in enumerate(rising)
    )


def typical_slowest_pace(paces: Sequence[float], num_ranks: int) -> float:
    """The median of the largest of `num_ranks` draws from these values."""
    return sorted(paces)[math.ceil(len(paces) * 0.5 ** (1 / num_ranks)) - 1]


def step_seconds(rank: Rank, num_ranks: int, link: Link, *, accumulation: int = 1) -> float:
    """How long a step of `num_ranks` such ranks takes.

    With accumulation the forward and backward pass are those of one micro-batch; gradients travel
    in the last of them only, what the head waits for in each.
    """
    pace = slowest_pace(rank.paces, num_ranks)
    passes = rank.forward_seconds + rank.backward_seconds
    before = (accumulation - 1) * passes
    if num_ranks == 1:
        return pace * (before + rank.step_seconds)
    waited = sum(link.all_reduce_seconds(size, num_ranks) for size in rank.summed_bytes)
    waited += sum(link.gather_seconds(size, num_ranks) for size in rank.gathered_bytes)
    waited *= accumulation
    computed, free, lost = pace * rank.backward_seconds, 0.0, 0.0
    for bucket in fill_buckets(rank.gradients):
        ready = pace * bucket.ready_seconds + lost
        travels = link.all_reduce_seconds(bucket.num_bytes, num_ranks)
        began, free = max(ready, free), max(ready, free) + travels
        # What is computed meanwhile goes on by the rest of the cores.
        lost += link.core_share * min(travels, max(computed + lost - began, 0.0))
    backward = max(computed + lost, free)
    return waited + pace * (before + rank.forward_seconds + rank.update_seconds) + backward


def speed_up(rank: Rank, num_ranks: int, link: Link) -> float:
    """Utterances a second of so many ranks over those of one; a rank's share stays the same."""
    return num_ranks * step_seconds(rank, 1, link) / step_seconds(rank, num_ranks, link)
