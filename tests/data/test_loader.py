"""Batches: what is padded and listed, and that workers and ranks change nothing."""

import os
from dataclasses import fields

import numpy as np
import pytest
import torch

from speakerlab.core.batch import Batch, Crop
from speakerlab.core.process import available_cpus
from speakerlab.data.dataset import Draws, NoiseKind, TrainCrops
from speakerlab.data.loader import auto_workers, collate, train_loader
from speakerlab.data.manifest import read_manifest
from speakerlab.data.sampler import EpochOrder, MicroBatches


def make_crop(length: int, **changes) -> Crop:
    values = {
        "wave_S": np.full(length, length, dtype=np.int16),
        "feats_TF": None,
        "label": length,
        "speed": 0,
        "room": -1,
        "first": 0,
        "noises": (),
        "noise_starts": (),
        "noise_S": None,
        "snr_db": 9.0,
        "telephone": False,
        "codec": -1,
        "mask_M2": np.full((1, 2), length / 16, dtype=np.float32),
        "position": 100 + length,
        "row": 200 + length,
    }
    return Crop(**{**values, **changes})


def test_rows_are_padded_and_listed():
    batch = collate(
        [
            make_crop(4, speed=1, noises=(5,), noise_starts=(77,), snr_db=10.5, codec=1),
            make_crop(6, room=2, telephone=True),
            make_crop(5, room=0, noises=(1, 4), noise_starts=(8, 9), snr_db=-3.0),
        ],
        num_speeds=3,
    )
    assert batch.wave_BS.tolist() == [[4] * 4 + [0, 0], [6] * 6, [5] * 5 + [0]]
    assert batch.wave_BS.dtype == torch.int16
    assert batch.label_B.tolist() == [4, 6, 5]
    assert [rows.tolist() for rows in batch.speed_rows] == [[1, 2], [0], []]
    assert (batch.room_rows.tolist(), batch.room_R.tolist()) == ([1, 2], [2, 0])
    assert (batch.noise_rows.tolist(), batch.snr_db_N.tolist()) == ([0, 2], [10.5, -3.0])
    assert batch.noise_V.tolist() == [5, 1, 4]
    assert batch.noise_start_V.tolist() == [77, 8, 9]
    assert batch.noise_of_V.tolist() == [0, 1, 1]
    assert batch.noise_NS.shape == (0, 0)
    assert batch.telephone_rows.tolist() == [1]
    assert (batch.codec_rows.tolist(), batch.codec_C.tolist()) == ([0], [1])
    assert batch.mask_BM2.tolist() == [[[0.25, 0.25]], [[0.375, 0.375]], [[0.3125, 0.3125]]]
    assert batch.position_B.tolist() == [104, 106, 105]
    assert batch.row_B.tolist() == [204, 206, 205]
    integers = (batch.label_B, *batch.speed_rows, batch.room_rows, batch.noise_start_V, batch.row_B)
    assert {tensor.dtype for tensor in integers} == {torch.int64}
    assert {batch.snr_db_N.dtype, batch.mask_BM2.dtype} == {torch.float32}


def test_nothing_drawn_gives_empty_lists():
    batch = collate([make_crop(3)], num_speeds=1)
    for tensor in (batch.room_rows, batch.room_R, batch.noise_rows, batch.noise_V, batch.snr_db_N):
        assert tensor.shape == (0,)
    assert batch.noise_NS.shape == (0, 0) and batch.noise_NS.dtype == torch.int16
    assert collate([make_crop(3, mask_M2=np.empty((0, 2)))], num_speeds=1).mask_BM2.shape == (
        1,
        0,
        2,
    )


def test_noise_that_workers_cut_is_stacked_as_it_is():
    noise = np.arange(5, dtype=np.int16)
    crops = [
        make_crop(7, noises=(1,), noise_starts=(0,), noise_S=noise),
        make_crop(5),
        make_crop(6, noises=(0, 2), noise_starts=(3, 4), noise_S=noise[::-1]),
    ]
    batch = collate(crops, num_speeds=1)
    assert batch.noise_NS.tolist() == [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]
    assert (batch.noise_NS.dtype, batch.noise_rows.tolist()) == (torch.int16, [0, 2])


def same(a: Batch, b: Batch) -> bool:
    for field in fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        pairs = zip(left, right) if isinstance(left, tuple) else [(left, right)]
        if not all(torch.equal(x, y) for x, y in pairs):
            return False
    return True


@pytest.fixture
def load(make_data_dir):
    """load(num_workers=0, rank=0, ...) -> the batches of steps 1 to 4, two epochs of two steps."""
    folder = make_data_dir(speakers=range(4), seconds=[0.5, 1.0, 2.0])
    manifest = read_manifest([folder], sample_rate=16000)

    def load_batches(*, num_workers=0, start=1, **cut) -> list[Batch]:
        draws = Draws(
            crop_samples=12000,
            speeds=(1.0, 0.9, 1.1),
            room_prob=0.5,
            num_rooms=2,
            noise_prob=0.5,
            noise_lengths=[5000],
            noise_kinds=[NoiseKind(noises=[0])],
            num_masks=2,
        )
        label_KN = np.arange(12).reshape(3, 4)
        crops = TrainCrops(manifest, draws, label_KN=label_KN, seed=1)
        order = EpochOrder(manifest.num_samples_N, crop_samples=12000, global_batch=8, seed=1)
        assert order.steps_per_epoch == 2  # 18.7 crops
        slots = MicroBatches(
            order, start_step=start, stop_step=5, **{"micro_batch": 8, "world_size": 1, **cut}
        )
        return list(train_loader(crops, slots, num_workers=num_workers, pin_memory=False))

    return load_batches


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(load, num_workers):
    alone, parallel = load(), load(num_workers=num_workers)
    assert len(alone) == len(parallel) == 4
    assert all(same(a, b) for a, b in zip(alone, parallel))
    assert alone[0].position_B.tolist() == list(range(8, 16))
    assert not torch.equal(alone[0].mask_BM2, alone[2].mask_BM2)  # the same positions, epoch 1


def test_the_position_of_the_torch_generator_changes_nothing(load):
    torch.manual_seed(1)
    first = load()
    torch.manual_seed(2)
    assert all(same(a, b) for a, b in zip(first, load()))


def rows_by_position(batches: list[Batch]) -> list[tuple]:
    """Every sample of the batches, in the order of its step and position."""
    samples = []
    for batch in batches:
        length = {}
        for rows, speed_samples in zip(batch.speed_rows, (12000, 10800, 13200)):
            length.update(dict.fromkeys(rows.tolist(), speed_samples))
        for i, position in enumerate(batch.position_B.tolist()):
            wave_S = batch.wave_BS[i, : length[i]]
            assert not batch.wave_BS[i, length[i] :].any()
            samples.append((position, int(batch.row_B[i]), wave_S.tolist(), batch.mask_BM2[i]))
    return samples


@pytest.mark.parametrize(("world_size", "micro_batch"), [(2, 4), (1, 2), (2, 2)])
def test_ranks_and_accumulation_change_nothing(load, world_size, micro_batch):
    wanted = rows_by_position(load(start=0))
    ranks = [
        load(start=0, rank=rank, world_size=world_size, micro_batch=micro_batch)
        for rank in range(world_size)
    ]
    batches = [batch for group in zip(*ranks) for batch in group]
    found = rows_by_position(batches)
    assert len(found) == len(wanted) == 40
    for a, b in zip(found, wanted):
        assert a[:3] == b[:3]
        assert torch.equal(a[3], b[3])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPUs cannot be taken away here")
def test_cpus_are_those_this_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cpus() == 1
        assert auto_workers(1) == auto_workers(2) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert available_cpus() == len(before)
    assert 1 <= auto_workers(1) <= max(1, len(before) - 1)
