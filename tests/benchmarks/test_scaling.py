"""The simulation of ranks against sums done by hand."""

import math

import pytest
import torch
import torch.distributed as dist

from benchmarks.scaling_simulation import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Gradient,
    Head,
    Link,
    Rank,
    fill_buckets,
    slowest_pace,
    speed_up,
    step_seconds,
    typical_slowest_pace,
)

MIB = 1 << 20
# Forward 1 s, backward 2 s, update 0.5 s; one bucket of 100 bytes, ready when all is.
PLAIN = Rank(1.0, 2.0, 0.5, (Gradient(2.0, 100),))
SLOW = Link("slow", bytes_per_second=50.0, round_seconds=0.25)


def test_two_ranks_and_one_bucket_by_hand():
    # Two rounds of 0.25 s and half of 100 bytes at 50 bytes a second: 2 x (0.25 + 1) = 2.5 s.
    assert SLOW.all_reduce_seconds(100, 2) == 2.5
    assert step_seconds(PLAIN, 2, SLOW) == 1.0 + 2.0 + 2.5 + 0.5
    assert speed_up(PLAIN, 2, SLOW) == pytest.approx(2 * 3.5 / 6.0)


def test_one_rank_waits_for_no_link():
    dead = Link("dead", bytes_per_second=1e-9, round_seconds=math.inf)
    split = Rank(1.0, 2.0, 0.5, (Gradient(2.0, 100),), summed_bytes=(8,), gathered_bytes=(8,))
    assert step_seconds(split, 1, dead) == 3.5


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_without_links_to_wait_for_the_slowest_rank_is_the_bound(num_ranks):
    infinite = Link("infinite", bytes_per_second=math.inf, round_seconds=0.0)
    assert step_seconds(PLAIN, num_ranks, infinite) == 3.5
    uneven = Rank(1.0, 2.0, 0.5, (Gradient(2.0, 100),), paces=(0.9, 1.1))
    slowest = 1.1 - 0.2 * 0.5**num_ranks  # the slow pace, but where all ranks draw the other
    assert step_seconds(uneven, num_ranks, infinite) == pytest.approx(3.5 * slowest)


def test_a_bucket_travels_while_the_backward_pass_goes_on():
    # The first, ready after 0.5 s, takes 1 s and is hidden; the last begins at 2 s and is not.
    link = Link("link", bytes_per_second=float(MIB), round_seconds=0.0)
    both = Rank(1.0, 2.0, 0.0, (Gradient(0.5, MIB), Gradient(2.0, MIB // 2)))
    assert step_seconds(both, 2, link) == 1.0 + 2.0 + 0.5
    # Where the first still travels when the second is ready, that one waits: 0.5 + 4 + 0.5.
    late = Rank(1.0, 2.0, 0.0, (Gradient(0.5, 4 * MIB), Gradient(2.0, MIB // 2)))
    assert step_seconds(late, 2, link) == 1.0 + 0.5 + 4.0 + 0.5


def test_a_link_that_needs_the_cores_delays_what_they_compute():
    # 1 s of the first bucket takes the core for half of it: backward ends at 2.5 s, not at 2.
    link = Link("link", bytes_per_second=float(MIB), round_seconds=0.0, core_share=0.5)
    both = Rank(1.0, 2.0, 0.0, (Gradient(0.5, MIB), Gradient(2.0, MIB // 2)))
    assert step_seconds(both, 2, link) == 1.0 + 2.5 + 0.5


def test_what_the_head_waits_for_is_not_hidden():
    # A sum of 100 bytes: 2.5 s as above. A gather of 25 from the other one: 0.25 + 0.5.
    split = Rank(1.0, 2.0, 0.5, (), summed_bytes=(100,), gathered_bytes=(25,))
    assert step_seconds(split, 2, SLOW) == 3.5 + 2.5 + 0.75


def test_buckets_close_with_what_fills_them():
    sizes = [MIB // 2, MIB // 2, 20 * MIB, 4 * MIB, 2 * MIB, 3 * MIB]
    gradients = [Gradient(float(i), size) for i, size in enumerate(sizes)]
    assert fill_buckets(list(reversed(gradients))) == [
        Gradient(1.0, MIB),
        Gradient(4.0, 26 * MIB),
        Gradient(5.0, 3 * MIB),
    ]


def test_the_slowest_of_two_by_hand():
    # Of the pairs from {1, 2, 4}: max is 1 in 1/9, 2 in 3/9, 4 in 5/9 of the cases.
    assert slowest_pace([4.0, 1.0, 2.0], 2) == pytest.approx((1 + 3 * 2 + 5 * 4) / 9)
    assert slowest_pace([4.0, 1.0, 2.0], 1) == pytest.approx(7 / 3)
    assert typical_slowest_pace([4.0, 1.0, 2.0], 2) == 4.0
    assert typical_slowest_pace([4.0, 1.0, 2.0], 1) == 2.0


def test_buckets_are_those_of_torch():
    sizes = [300, 200_000, 70_000, 9_000_000, 2, 512 * 1000, 6_000_000, 6_000_000, 5]
    tensors = [torch.empty(size) for size in sizes]
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    buckets, _ = dist._compute_bucket_assignment_by_size(  # pyright: ignore[reportPrivateImportUsage]
        tensors, limits
    )
    gradients = [Gradient(float(i), 4 * size) for i, size in enumerate(sizes)]
    own = [bucket.num_bytes for bucket in fill_buckets(gradients)]
    assert own == [sum(4 * sizes[i] for i in bucket) for bucket in buckets]


def test_accumulation_reduces_once_and_repeats_what_the_head_waits_for():
    assert step_seconds(PLAIN, 2, SLOW, accumulation=3) == 2 * 3.0 + 3.5 + 2.5
    split = Rank(1.0, 2.0, 0.5, (Gradient(2.0, 100),), summed_bytes=(100,))
    assert step_seconds(split, 2, SLOW, accumulation=3) == 2 * 3.0 + 3.5 + 2.5 + 3 * 2.5
    assert step_seconds(PLAIN, 1, SLOW, accumulation=3) == 2 * 3.0 + 3.5


def test_a_head_of_25_classes_by_hand():
    head = Head(25, 2, 0.1, 0.2, 0.3)  # 200 bytes of gradient
    whole = PLAIN.with_head(head, num_ranks=2, rows=3, is_split=False)
    assert whole.step_seconds == pytest.approx(3.5 + 0.6)
    assert whole.gradients == (Gradient(0.2, 200), Gradient(2.2, 100))
    split = PLAIN.with_head(head, num_ranks=2, rows=3, is_split=True)
    assert split.gradients == (Gradient(2.2, 100),)
    # 6 rows in all: a float of each twice, then two; 6 embeddings of 8 bytes; the norm.
    assert split.summed_bytes == (24, 24, 48, 48, 4)
    assert split.gathered_bytes == (24, 24)  # 3 embeddings of 8 bytes, 3 labels of 8
    assert PLAIN.with_head(head, num_ranks=1, rows=3, is_split=True).summed_bytes == ()


def test_a_rank_of_half_the_speed():
    slow = PLAIN.scaled(2.0)
    assert step_seconds(slow, 2, SLOW) == 7.0 + 2.5
