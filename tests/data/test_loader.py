"""Batches: what is padded and listed, and that workers and ranks change nothing."""

import os

import numpy as np
import pytest
import torch

from speakerlab.core.batch import Batch, Crop, Draw
from speakerlab.core.process import available_cpus
from speakerlab.data.loader import MicroBatches, TrainCrops, collate, train_loader
from speakerlab.data.manifest import read_manifest
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.workers import auto_workers


def make_crop(length: int, **draws: Draw) -> Crop:
    return Crop(
        wave_S=np.full(length, length, dtype=np.int16),
        feats_TF=None,
        first=0,
        label=length,
        position=100 + length,
        row=200 + length,
        draws=draws,
    )


def test_rows_are_padded_and_listed():
    batch = collate(
        [
            make_crop(4, b=Draw({"level": 0.5, "place_2": np.array([1, 2])}), a=Draw({}, 2)),
            make_crop(6),
            make_crop(5, b=Draw({"level": 1.5, "place_2": np.array([3, 4])}), a=Draw({}, 1)),
            make_crop(5, b=Draw({"level": 2.5, "place_2": np.array([5])}, 7), a=Draw({}, 2)),
        ]
    )
    assert batch.wave_BS.tolist() == [[4] * 4 + [0, 0], [6] * 6, [5] * 5 + [0], [5] * 5 + [0]]
    assert batch.wave_BS.dtype == torch.int16
    assert batch.label_B.tolist() == [4, 6, 5, 5]
    assert batch.position_B.tolist() == [104, 106, 105, 105]
    assert batch.row_B.tolist() == [204, 206, 205, 205]
    assert [(d.group, d.rows.tolist()) for d in batch.draws["a"]] == [(1, [2]), (2, [0, 3])]
    first, second = batch.draws["b"]
    assert (first.group, first.rows.tolist()) == (0, [0, 2])
    assert first.values["place_2"].tolist() == [[1, 2], [3, 4]]
    assert first.values["level"].tolist() == [0.5, 1.5]
    assert first.values["level"].dtype == torch.float32
    assert (second.group, second.values["place_2"].tolist()) == (7, [[5]])
    doubled = batch.map(lambda tensor: tensor * 2)
    assert doubled.draws["b"][0].values["level"].tolist() == [1.0, 3.0]
    _, other = first.split(1)
    assert (other.rows.tolist(), other.values["place_2"].tolist()) == ([2], [[3, 4]])
    assert collate([make_crop(3)]).draws == {}


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    batch.map(lambda tensor: tensors.append(tensor) or tensor)
    return tensors


def same(a: Batch, b: Batch) -> bool:
    left, right = tensors_of(a), tensors_of(b)
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.fixture
def load(make_data_dir):
    """load(num_workers=0, rank=0, ...) -> the batches of steps 1 to 4, two epochs of two steps."""
    folder = make_data_dir(speakers=range(4), seconds=[0.5, 1.0, 2.0])
    manifest = read_manifest([folder], sample_rate=16000)

    def load_batches(*, num_workers=0, start=1, **cut) -> list[Batch]:
        draws = {
            "speed": lambda rng: Draw({}, int(rng.integers(3))),
            "mask": lambda rng: Draw({"mask": rng.random(4)}) if rng.random() < 0.5 else None,
        }
        crops = TrainCrops(
            manifest,
            draws,
            crop_samples=12000,
            speeds=(1.0, 0.9, 1.1),
            label_KN=np.arange(12).reshape(3, 4),
            seed=1,
        )
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
    masks = [batch.draws["mask"][0].values["mask"] for batch in (alone[0], alone[2])]
    assert not torch.equal(masks[0][:1], masks[1][:1])  # the same positions, epoch 1


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
        for speed in batch.draws["speed"]:
            samples_read = (12000, 10800, 13200)[speed.group]
            length.update(dict.fromkeys(speed.rows.tolist(), samples_read))
        for i, position in enumerate(batch.position_B.tolist()):
            wave_S = batch.wave_BS[i, : length[i]]
            assert not batch.wave_BS[i, length[i] :].any()
            masks = [m.values["mask"][m.rows == i] for m in batch.draws.get("mask", ())]
            mask = [values.tolist() for values in masks if len(values)]
            samples.append((position, int(batch.row_B[i]), wave_S.tolist(), mask))
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
    assert found == wanted


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
