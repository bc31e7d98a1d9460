"""The same positions hold the same crops whoever reads them: ranks, workers, a resume, shards.

Of each of the first 200 positions: the bytes that were read, the label, every draw, and the wave
after augmentation. Letters: B rows, S samples.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from speakerlab.core.batch import Batch
from speakerlab.data import pack
from speakerlab.data.banks import Bank
from speakerlab.data.dataset import Draws, NoiseKind, TrainCrops
from speakerlab.data.loader import train_loader
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.sampler import EpochOrder, MicroBatches
from speakerlab.data.shards import Layout
from speakerlab.frontend.augment import Augment

RATE, CROP = 16000, 8000
GLOBAL_BATCH, MICRO_BATCH, STEPS = 40, 10, 5
SPEEDS = (1.0, 0.9, 1.1)


class Seen(NamedTuple):
    """What stood at a position."""

    read: bytes
    label: int
    draws: tuple[object, ...]
    wave_S: np.ndarray


@pytest.fixture(scope="module")
def noises() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [(rng.standard_normal(n) * 2000).astype(np.int16) for n in (5000, 30000, 12345)]


@pytest.fixture(scope="module")
def rooms() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.standard_normal(3000) * np.exp(-np.arange(3000) / n) for n in (300, 700)]


@pytest.fixture
def folder(make_data_dir, monkeypatch) -> Path:
    monkeypatch.setattr(pack, "MIN_SHARD_BYTES", 100_000)
    return make_data_dir(speakers=range(6), seconds=[0.3, 1.0, 2.2, 3.1])


def make_crops(
    folder: Path, noises: list[np.ndarray], rooms: list[np.ndarray], *, channel: float = 0.2
) -> TrainCrops:
    kinds = [
        NoiseKind(noises=[0, 1]),
        NoiseKind(noises=[1, 2], snr_db=(13.0, 20.0), num_summed=(3, 7)),
    ]
    draws = Draws(
        crop_samples=CROP,
        speeds=SPEEDS,
        room_prob=0.5,
        num_rooms=len(rooms),
        noise_prob=0.6,
        noise_lengths=[len(noise) for noise in noises],
        noise_kinds=kinds,
        telephone_prob=channel,
        codec_prob=channel,
        num_masks=2,
    )
    manifest = read_manifest([folder], sample_rate=RATE)
    label_KN = np.arange(3 * 6).reshape(3, 6)
    return TrainCrops(manifest, draws, label_KN=label_KN, seed=3)


def look(batch: Batch, augment: Augment) -> Iterator[tuple[int, Seen]]:
    """(position, what is there) of each row."""
    wave_BS = augment(batch).numpy()
    for i, position in enumerate(batch.position_B.tolist()):
        (speed,) = (k for k, rows in enumerate(batch.speed_rows) if i in rows.tolist())
        drawn: list[object] = [speed, batch.row_B[i].item(), batch.mask_BM2[i].tolist()]
        drawn += [room for row, room in pairs(batch.room_rows, batch.room_R) if row == i]
        for n, (row, snr_db) in enumerate(pairs(batch.noise_rows, batch.snr_db_N)):
            if row == i:
                own = (batch.noise_of_V == n).nonzero().flatten()
                drawn += [snr_db, batch.noise_V[own].tolist(), batch.noise_start_V[own].tolist()]
        drawn += [i in batch.telephone_rows.tolist()]
        drawn += [codec for row, codec in pairs(batch.codec_rows, batch.codec_C) if row == i]
        read = batch.wave_BS[i, : round(CROP * SPEEDS[speed])].numpy().tobytes()
        yield position, Seen(read, int(batch.label_B[i]), tuple(map(str, drawn)), wave_BS[i])


def pairs(a: torch.Tensor, b: torch.Tensor) -> list[tuple]:
    return list(zip(a.tolist(), b.tolist()))


def read_all(
    crops: TrainCrops, augment: Augment, *, ranks: int, workers: int, start_step: int = 0
) -> dict[int, Seen]:
    """Positions of the first epoch's first steps, as all ranks together see them."""
    order = EpochOrder(
        crops.manifest.num_samples_N,
        crop_samples=CROP,
        global_batch=GLOBAL_BATCH,
        seed=3,
        epoch_samples=CROP * GLOBAL_BATCH * (STEPS + 2),
    )
    seen: dict[int, Seen] = {}
    for rank in range(ranks):
        positions = MicroBatches(
            order,
            start_step=start_step,
            stop_step=STEPS,
            micro_batch=MICRO_BATCH,
            rank=rank,
            world_size=ranks,
        )
        loader = train_loader(crops, positions, num_workers=workers, pin_memory=False)
        for batch in loader:
            for position, found in look(batch, augment):
                assert position not in seen, "no position is read twice"
                seen[position] = found
    return seen


def assert_same(seen: dict[int, Seen], wanted: dict[int, Seen]) -> None:
    for position, found in seen.items():
        expected = wanted[position]
        assert found[:3] == expected[:3], position
        assert np.abs(found.wave_S - expected.wave_S).max() < 1e-6, position


def test_ranks_workers_resumes_and_shards_see_the_same(folder, noises, rooms):
    augment = Augment(
        num_samples=CROP, speeds=SPEEDS, rooms=rooms, noises=noises, telephone=True, codec=True
    )
    loose = make_crops(folder, noises, rooms)
    wanted = read_all(loose, augment, ranks=1, workers=0)
    assert sorted(wanted) == list(range(GLOBAL_BATCH * STEPS)) == list(range(200))
    assert len({found.draws for found in wanted.values()}) == 200
    assert len({found.wave_S.tobytes() for found in wanted.values()}) == 200
    packs: list[TrainCrops] = []
    for codec in ("pcm", "flac"):
        copy = shutil.copytree(folder, folder.with_name(codec))
        pack_data_dir(copy, layout=Layout.of_waves(codec, sample_rate=RATE))
        packs.append(make_crops(copy, noises, rooms))
        assert packs[-1].manifest.parts[0].waves is not None
    packed, as_flac = packs
    cases = [(loose, 1, 4), (packed, 2, 2), (loose, 4, 1), (as_flac, 1, 0)]
    for crops, ranks, workers in cases:
        seen = read_all(crops, augment, ranks=ranks, workers=workers)
        assert seen.keys() == wanted.keys()
        assert_same(seen, wanted)
    for crops, ranks, workers, start_step in ((loose, 2, 1, 2), (as_flac, 1, 2, 3)):
        seen = read_all(crops, augment, ranks=ranks, workers=workers, start_step=start_step)
        assert sorted(seen) == list(range(GLOBAL_BATCH * start_step, GLOBAL_BATCH * STEPS))
        assert_same(seen, wanted)


def test_noise_cut_by_the_workers_sounds_as_that_cut_on_the_device(folder, noises, rooms):
    on_device = Augment(num_samples=CROP, speeds=SPEEDS, rooms=rooms, noises=noises)
    brought = Augment(num_samples=CROP, speeds=SPEEDS, rooms=rooms)
    crops = make_crops(folder, noises, rooms, channel=0.0)  # a codec would make steps of it
    wanted = read_all(crops, on_device, ranks=1, workers=0)
    lengths = [len(noise) for noise in noises]
    names = ("a", "b", "c")
    crops.noise_bank = Bank(names, names, np.cumsum(lengths), np.concatenate(noises))
    found = read_all(crops, brought, ranks=1, workers=2)
    for position, expected in wanted.items():
        assert found[position].draws == expected.draws
        assert np.abs(found[position].wave_S - expected.wave_S).max() < 1e-4
