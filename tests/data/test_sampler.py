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
    settings = {"crop_samples": CROP, "global_batch": 8, "seed": 3}
    settings |= changes
    return EpochOrder(np.asarray(num_samples_N), **settings)


def slots_of(order, start, stop, *, micro_batch=8, **cut):
    batches = micro_batches(
        order,
        start_step=start,
        stop_step=stop,
        micro_batch=micro_batch,
        **cut,
    )
    return list(batches)


@pytest.mark.parametrize(
    ("world_size", "accumulation"),
    [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)],
)
def test_ranks_and_accumulation_share_the_positions_of_a_step(world_size, accumulation):
    order = make_order()
    assert order.num_crops == 98
    assert order.steps_per_epoch == 12
    assert order.num_dropped == 2
    expected = slots_of(order, 0, 15)
    micro_batch = 8 // (world_size * accumulation)
    ranks = []
    for rank in range(world_size):
        slots_of_rank = slots_of(
            order,
            0,
            15,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
        )
        ranks.append(slots_of_rank)
    for step in range(15):
        epoch, step_in_epoch = divmod(step, 12)
        # micro-batch m is at accumulation m div world size on rank m mod world size
        micro_batches = []
        for m in range(world_size * accumulation):
            row, rank = divmod(m, world_size)
            row += step * accumulation
            micro_batches.append(ranks[rank][row])
        slots = list(chain.from_iterable(micro_batches))
        first_position = step_in_epoch * 8
        positions = range(first_position, first_position + 8)
        expected_keys = [(epoch, position) for position in positions]
        assert [slot[:2] for slot in slots] == expected_keys
        assert slots == expected[step]
        rows = order.rows(epoch)
        for _, position, row in slots:
            assert row == rows[position]


def test_the_order_is_a_function_of_its_key():
    rows = make_order().rows(4)
    again = make_order().rows(4)
    assert np.array_equal(rows, again)

    others = (
        make_order().rows(5),
        make_order(seed=4).rows(4),
        make_order(attempt=1).rows(4),
    )
    for other in others:
        other = other[: len(rows)]
        assert not np.array_equal(rows, other)


def test_an_utterance_gets_its_share_of_slots_rounded_down_or_up():
    num_samples_N = np.array([30, 99, 100, 101, 250, 1234, 70, 5])
    share_N = num_samples_N / CROP
    order = make_order(num_samples_N, global_batch=4)
    total_N = np.zeros(8)
    for epoch in range(400):
        slots_N = np.bincount(order.rows(epoch), minlength=8)
        is_down_N = slots_N == np.floor(share_N)
        is_up_N = slots_N == np.ceil(share_N)
        assert np.all(is_down_N | is_up_N)
        assert slots_N.sum() in (18, 19)  # 18.89 crops
        total_N += slots_N
    # a share of p has deviation sqrt(p (1 - p) / 400) <= 0.025
    mean_N = total_N / 400
    assert np.abs(mean_N - share_N).max() < 0.08


def test_every_step_of_every_epoch_has_its_rows():
    # 33.3 crops: 33 or 34 slots
    num_samples_N = np.full(37, 90)
    order = make_order(num_samples_N, global_batch=11)
    lengths = {len(order.rows(epoch)) for epoch in range(50)}
    assert lengths == {33, 34}
    assert order.steps_per_epoch == 3
    for batch in slots_of(order, 0, 150, micro_batch=11):
        assert len(batch) == 11


@pytest.mark.parametrize(
    ("factor", "crops"),
    [(0.5, 49), (1.0, 98), (3.0, 294)],
)
def test_an_epoch_may_be_of_other_hours_than_the_corpus(factor, crops):
    order = make_order(epoch_samples=factor * 9800)
    assert order.num_crops == crops
    num_samples_N = 50 + 10 * np.arange(40)
    share_N = num_samples_N / CROP * factor
    slots_N = np.bincount(order.rows(0), minlength=40)
    assert np.all(np.abs(slots_N - share_N) < 1)


@pytest.mark.parametrize(
    ("one_crop_per", "slots"),
    [
        (150, [1, 1, 1, 1, 2, 5]),
        (np.inf, [1] * 6),
    ],
)
def test_an_utterance_may_get_a_crop_per_so_many_samples(one_crop_per, slots):
    lengths = {
        "num_samples_N": [20, 149, 150, 299, 300, 899],
        "one_crop_per": one_crop_per,
    }
    order = make_order(**lengths, global_batch=3)
    assert order.num_crops == sum(slots)
    for epoch in range(20):
        slots_N = np.bincount(order.rows(epoch), minlength=6)
        assert slots_N.tolist() == slots

    half_epoch = sum(slots) * CROP / 2
    half = make_order(
        **lengths,
        global_batch=3,
        epoch_samples=half_epoch,
    )
    slots_N = np.bincount(half.rows(0), minlength=6)
    expected_N = np.array(slots) / 2
    assert np.all(np.abs(slots_N - expected_N) < 1)


def test_too_short_an_epoch_is_refused():
    with refuses("training.epoch_hours", 99, 98):
        make_order(global_batch=99, epoch_samples=9800)
    order = make_order(global_batch=98, epoch_samples=9800)
    assert order.steps_per_epoch == 1
    with refuses("training.epoch_hours", 3000000000):
        make_order(epoch_samples=3e9 * CROP)


def test_a_corpus_shorter_than_a_batch_is_repeated_up_to_one():
    """Ten files with the default batch of 256: 17 to 34 slots a file, all in one step."""
    num_samples_N = np.array([50, 60, 70, 80, 90, 100, 60, 70, 80, 90])
    order = make_order(num_samples_N, global_batch=256)
    assert order.num_crops == 256
    assert order.steps_per_epoch == 1
    assert order.num_dropped == 0
    assert order.repeats == pytest.approx(256 / 7.5)

    # the slots of a file are in proportion to its length
    rows = order.rows(0)[:256]
    slots_N = np.bincount(rows, minlength=10)
    expected_N = num_samples_N / 750 * 256
    assert np.all(np.abs(slots_N - expected_N) <= 1)


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_a_repeated_corpus_of_any_lengths_gives_one_batch(balance):
    rng = np.random.default_rng(0)
    for global_batch in range(1, 300):
        num_files = rng.integers(1, 9)
        num_samples_N = rng.integers(1, 100, size=num_files)
        if num_samples_N.sum() > global_batch * CROP:
            continue
        speaker_N = rng.integers(0, 3, size=len(num_samples_N))
        order = make_order(
            num_samples_N,
            global_batch=global_batch,
            speaker_N=speaker_N,
            speaker_balance=balance,
        )
        assert order.num_crops == global_batch
        assert order.steps_per_epoch == 1
        num_rows = len(order.rows(1))
        assert num_rows in (global_batch, global_batch + 1)


# speaker 0 has 400 samples, 1 has 250 in one utterance, 2 has 2600 in five
SPEAKERS = np.array([0, 2, 2, 1, 2, 0, 2, 2])
LENGTHS = np.array([300, 400, 100, 250, 700, 100, 900, 500])
SPEAKER_LENGTHS = np.array([400, 250, 2600])


def balanced(balance: float) -> EpochOrder:
    return make_order(
        LENGTHS,
        global_batch=4,
        epoch_samples=310.0 * CROP,
        speaker_N=SPEAKERS,
        speaker_balance=balance,
    )


def test_balanced_speakers_come_equally_often_to_a_slot():
    for epoch in range(20):
        rows = balanced(1.0).rows(epoch)
        assert len(rows) in (310, 311)
        counts = np.bincount(SPEAKERS[rows])
        # 310 / 3 slots for each speaker
        assert set(counts) <= {103, 104}
        slots_N = np.bincount(rows, minlength=8)
        share_N = LENGTHS / SPEAKER_LENGTHS[SPEAKERS]
        expected_N = share_N * 310 / 3
        assert np.all(np.abs(slots_N - expected_N) < 1)


def test_half_balanced_speakers_come_as_the_root_of_their_length():
    shares = np.sqrt(SPEAKER_LENGTHS)
    shares *= 310 / shares.sum()
    counts = []
    for epoch in range(200):
        rows = balanced(0.5).rows(epoch)
        counts.append(np.bincount(SPEAKERS[rows]))
    mean_counts = np.mean(counts, axis=0)
    assert np.abs(mean_counts - shares).max() < 0.15
    for counts_of_epoch in counts[:20]:
        assert np.all(np.abs(counts_of_epoch - shares) < 1)


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_a_million_utterances_take_little_memory(balance):
    rng = np.random.default_rng(0)
    num_samples_N = rng.integers(30, 300, size=1_000_000)
    speaker_N = rng.integers(0, 200_000, size=1_000_000)
    order = make_order(
        num_samples_N,
        global_batch=256,
        speaker_N=speaker_N,
        speaker_balance=balance,
    )
    tracemalloc.start()
    try:
        rows = order.rows(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.dtype == np.int32
    assert len(rows) == pytest.approx(1.65e6, rel=0.01)
    # 7 MB for the order, 4 for the slots, as much for a copy, and windows
    assert peak < 24e6


def test_rows_are_shuffled_within_windows_of_permuted_blocks(monkeypatch):
    monkeypatch.setattr(sampler, "BLOCK_ROWS", 5)
    monkeypatch.setattr(sampler, "WINDOW_BLOCKS", 2)
    # 5 blocks, the last of 3 rows; one slot each
    order = make_order(np.full(23, CROP))
    windows = []
    for epoch in range(20):
        rows = order.rows(epoch)
        assert sorted(rows) == list(range(23))
        blocks = rows // 5
        window = []
        start = 0
        # a window holds all rows of its two blocks, the last window of one
        while start < 23:
            pair = set(blocks[start : start + 8].tolist())
            size = 5 * len(pair)
            if 4 in pair:
                size -= 2
            members = rows[start : start + size]
            is_last = start + size >= 23
            assert len(pair) == (1 if is_last else 2)
            blocks_of_members = set((members // 5).tolist())
            assert blocks_of_members == pair
            if size >= 8:
                assert members.tolist() != sorted(members.tolist())
            window.append(frozenset(pair))
            start += size
        assert len(window) == 3
        windows.append(tuple(window))
    assert len(set(windows)) > 5
