"""The order of an epoch; ranks, accumulation and a resume change nothing of it."""

import tracemalloc
from itertools import chain

import numpy as np
import pytest
from refusals import refuses

from speakerlab.data import sampler
from speakerlab.data.loader import micro_batches
from speakerlab.data.sampler import EpochOrder

CROP = 100


def make_order(num_samples_N=None, **changes) -> EpochOrder:
    """40 utterances of 50 to 440 samples, 98 crops of 100 in all, G = 8: 12 steps, 2 dropped."""
    if num_samples_N is None:
        num_samples_N = 50 + 10 * np.arange(40)
    settings = {"crop_samples": CROP, "global_batch": 8, "seed": 3, **changes}
    return EpochOrder(np.asarray(num_samples_N), **settings)


def slots_of(order, start, stop, *, micro_batch=8, **cut):
    cut = {"start_step": start, "stop_step": stop, "micro_batch": micro_batch, **cut}
    return list(micro_batches(order, **cut))


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_ranks_and_accumulation_share_the_positions_of_a_step(world_size, accumulation):
    order = make_order()
    assert (order.num_crops, order.steps_per_epoch, order.num_dropped) == (98, 12, 2)
    wanted = slots_of(order, 0, 15)
    micro_batch = 8 // (world_size * accumulation)
    ranks = [
        slots_of(order, 0, 15, micro_batch=micro_batch, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for step in range(15):
        epoch, step_in_epoch = divmod(step, 12)
        # micro-batch m is at accumulation m div world size on rank m mod world size
        micro_batches = [
            ranks[m % world_size][step * accumulation + m // world_size]
            for m in range(world_size * accumulation)
        ]
        slots = list(chain.from_iterable(micro_batches))
        assert [slot[:2] for slot in slots] == [(epoch, step_in_epoch * 8 + i) for i in range(8)]
        assert slots == wanted[step]
        assert all(row == order.rows(epoch)[position] for _, position, row in slots)


def test_the_order_is_a_function_of_its_key():
    rows = make_order().rows(4)
    assert np.array_equal(rows, make_order().rows(4))
    for other in (make_order().rows(5), make_order(seed=4).rows(4), make_order(attempt=1).rows(4)):
        assert not np.array_equal(rows, other[: len(rows)])


def test_an_utterance_gets_its_share_of_slots_rounded_down_or_up():
    num_samples_N = np.array([30, 99, 100, 101, 250, 1234, 70, 5])
    share_N = num_samples_N / CROP
    order = make_order(num_samples_N, global_batch=4)
    total_N = np.zeros(8)
    for epoch in range(400):
        slots_N = np.bincount(order.rows(epoch), minlength=8)
        assert np.all((slots_N == np.floor(share_N)) | (slots_N == np.ceil(share_N)))
        assert slots_N.sum() in (18, 19)  # 18.89 crops
        total_N += slots_N
    # a share of p has deviation sqrt(p (1 - p) / 400) <= 0.025
    assert np.abs(total_N / 400 - share_N).max() < 0.08


def test_every_step_of_every_epoch_has_its_rows():
    order = make_order(np.full(37, 90), global_batch=11)  # 33.3 crops: 33 or 34 slots
    lengths = {len(order.rows(epoch)) for epoch in range(50)}
    assert lengths == {33, 34}
    assert order.steps_per_epoch == 3
    assert all(len(batch) == 11 for batch in slots_of(order, 0, 150, micro_batch=11))


@pytest.mark.parametrize(("factor", "crops"), [(0.5, 49), (1.0, 98), (3.0, 294)])
def test_an_epoch_may_be_of_other_hours_than_the_corpus(factor, crops):
    order = make_order(epoch_samples=factor * 9800)
    assert order.num_crops == crops
    share_N = (50 + 10 * np.arange(40)) / CROP * factor
    slots_N = np.bincount(order.rows(0), minlength=40)
    assert np.all(np.abs(slots_N - share_N) < 1)


@pytest.mark.parametrize(("one_crop_per", "slots"), [(150, [1, 1, 1, 1, 2, 5]), (np.inf, [1] * 6)])
def test_an_utterance_may_get_a_crop_per_so_many_samples(one_crop_per, slots):
    lengths = {"num_samples_N": [20, 149, 150, 299, 300, 899], "one_crop_per": one_crop_per}
    order = make_order(**lengths, global_batch=3)
    assert order.num_crops == sum(slots)
    for epoch in range(20):
        assert np.bincount(order.rows(epoch), minlength=6).tolist() == slots
    half = make_order(**lengths, global_batch=3, epoch_samples=sum(slots) * CROP / 2)
    assert np.all(np.abs(np.bincount(half.rows(0), minlength=6) - np.array(slots) / 2) < 1)


def test_too_short_an_epoch_is_refused():
    with refuses("training.epoch_hours", 99, 98):
        make_order(global_batch=99, epoch_samples=9800)
    assert make_order(global_batch=98, epoch_samples=9800).steps_per_epoch == 1
    with refuses("training.epoch_hours", 3000000000):
        make_order(epoch_samples=3e9 * CROP)


def test_a_corpus_shorter_than_a_batch_is_repeated_up_to_one():
    """Ten files with the default batch of 256: 17 to 34 slots a file, all in one step."""
    num_samples_N = np.array([50, 60, 70, 80, 90, 100, 60, 70, 80, 90])
    order = make_order(num_samples_N, global_batch=256)
    assert (order.num_crops, order.steps_per_epoch, order.num_dropped) == (256, 1, 0)
    assert order.repeats == pytest.approx(256 / 7.5)
    slots_N = np.bincount(order.rows(0)[:256], minlength=10)
    assert np.all(np.abs(slots_N - num_samples_N / 750 * 256) <= 1)


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_a_repeated_corpus_of_any_lengths_gives_one_batch(balance):
    rng = np.random.default_rng(0)
    for global_batch in range(1, 300):
        num_samples_N = rng.integers(1, 100, size=rng.integers(1, 9))
        if num_samples_N.sum() > global_batch * CROP:
            continue
        speaker_N = rng.integers(0, 3, size=len(num_samples_N))
        more = {"speaker_N": speaker_N, "speaker_balance": balance}
        order = make_order(num_samples_N, global_batch=global_batch, **more)
        assert (order.num_crops, order.steps_per_epoch) == (global_batch, 1)
        assert len(order.rows(1)) in (global_batch, global_batch + 1)


SPEAKERS = np.array([0, 2, 2, 1, 2, 0, 2, 2])  # speaker 1 has one utterance, 2 has five
LENGTHS = np.array([300, 400, 100, 250, 700, 100, 900, 500])  # 400, 250 and 2600 in all


def balanced(balance: float) -> EpochOrder:
    more = {"speaker_N": SPEAKERS, "speaker_balance": balance}
    return make_order(LENGTHS, global_batch=4, epoch_samples=310.0 * CROP, **more)


def test_balanced_speakers_come_equally_often_to_a_slot():
    for epoch in range(20):
        rows = balanced(1.0).rows(epoch)
        assert len(rows) in (310, 311)
        counts = np.bincount(SPEAKERS[rows])
        assert set(counts) <= {103, 104}  # 310 / 3
        slots_N = np.bincount(rows, minlength=8)
        totals = np.array([400, 250, 2600])[SPEAKERS]
        assert np.all(np.abs(slots_N - LENGTHS / totals * 310 / 3) < 1)


def test_half_balanced_speakers_come_as_the_root_of_their_length():
    shares = np.sqrt([400, 250, 2600])
    shares *= 310 / shares.sum()
    counts = np.mean([np.bincount(SPEAKERS[balanced(0.5).rows(e)]) for e in range(200)], axis=0)
    assert np.abs(counts - shares).max() < 0.15
    for epoch in range(20):
        assert np.all(np.abs(np.bincount(SPEAKERS[balanced(0.5).rows(epoch)]) - shares) < 1)


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_a_million_utterances_take_little_memory(balance):
    rng = np.random.default_rng(0)
    num_samples_N = rng.integers(30, 300, size=1_000_000)
    more = {"speaker_N": rng.integers(0, 200_000, size=1_000_000), "speaker_balance": balance}
    order = make_order(num_samples_N, global_batch=256, **more)
    tracemalloc.start()
    try:
        rows = order.rows(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.dtype == np.int32 and len(rows) == pytest.approx(1.65e6, rel=0.01)
    assert peak < 24e6  # 7 MB for the order, 4 for the slots, as much for a copy, and windows


def test_rows_are_shuffled_within_windows_of_permuted_blocks(monkeypatch):
    monkeypatch.setattr(sampler, "BLOCK_ROWS", 5)
    monkeypatch.setattr(sampler, "WINDOW_BLOCKS", 2)
    order = make_order(np.full(23, CROP))  # 5 blocks, the last of 3 rows; one slot each
    windows = []
    for epoch in range(20):
        rows = order.rows(epoch)
        assert sorted(rows) == list(range(23))
        blocks = rows // 5
        window, start = [], 0
        while start < 23:  # a window holds all rows of its two blocks, the last window of one
            pair = set(blocks[start : start + 8].tolist())
            size = sum(3 if block == 4 else 5 for block in pair)
            members = rows[start : start + size]
            assert len(pair) == (2 if start + size < 23 else 1)
            assert set((members // 5).tolist()) == pair
            assert size < 8 or members.tolist() != sorted(members.tolist())
            window.append(frozenset(pair))
            start += size
        assert len(window) == 3
        windows.append(tuple(window))
    assert len(set(windows)) > 5
