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

from speakerlab.core.batch import Batch
from speakerlab.data import pack
from speakerlab.data.loader import TrainCrops, micro_batches, train_loader
from speakerlab.data.manifest import read_manifest
from speakerlab.data.pack import pack_data_dir
from speakerlab.data.sampler import EpochOrder
from speakerlab.data.shards import Layout
from speakerlab.frontend.augment import Augment
from speakerlab.frontend.augment.codec import Codec
from speakerlab.frontend.augment.noise import Noise
from speakerlab.frontend.augment.reencode import Reencode
from speakerlab.frontend.augment.room import Room
from speakerlab.frontend.augment.specaugment import SpecAugment
from speakerlab.frontend.augment.speed import Speed
from speakerlab.frontend.augment.telephone import Telephone

RATE = 16000
CROP = 8000
GLOBAL_BATCH = 40
MICRO_BATCH = 10
STEPS = 5
SPEEDS = (1.0, 0.9, 1.1)
CODECS = ("gsm", "mp3:24k", "opus:6k")


class Seen(NamedTuple):
    """What stood at a position."""

    read: bytes
    label: int
    draws: tuple[object, ...]
    wave_S: np.ndarray


@pytest.fixture(scope="module")
def noises() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [
        (rng.standard_normal(n) * 2000).astype(np.int16) for n in (5000, 30000, 12345)
    ]


@pytest.fixture(scope="module")
def rooms() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [
        rng.standard_normal(3000) * np.exp(-np.arange(3000) / n) for n in (300, 700)
    ]


@pytest.fixture
def folder(make_data_dir, monkeypatch) -> Path:
    monkeypatch.setattr(pack, "MIN_SHARD_BYTES", 100_000)
    return make_data_dir(speakers=range(6), seconds=[0.3, 1.0, 2.2, 3.1])


def make_augment(noises: list[np.ndarray], rooms: list[np.ndarray]) -> Augment:
    augmentations = {
        "reencode": Reencode(reencode_prob=0.2, codecs=CODECS),
        "speed": Speed(speeds=SPEEDS, num_samples=CROP),
        "room": Room(room_prob=0.5, rooms=rooms, num_samples=CROP),
        "noise": Noise(
            noise_prob=0.6,
            noises=noises,
            noise_kinds=["noise", "speech", "speech"],
            num_samples=CROP,
        ),
        "telephone": Telephone(telephone_prob=0.2, num_samples=CROP),
        "codec": Codec(codec_prob=0.2),
        "spec": SpecAugment(
            num_frames=48, num_mel_bins=80, num_freq_masks=1, num_time_masks=1
        ),
    }
    return Augment(augmentations, num_samples=CROP)


def make_crops(folder: Path, augment: Augment) -> TrainCrops:
    return TrainCrops(
        read_manifest([folder], sample_rate=RATE),
        augment.draws,
        crop_samples=CROP,
        speeds=SPEEDS,
        codecs=CODECS,
        label_KN=np.arange(3 * 6).reshape(3, 6),
        seed=3,
    )


def look(batch: Batch, augment: Augment) -> Iterator[tuple[int, Seen]]:
    """(position, what is there) of each row."""
    wave_BS = augment(batch).numpy()
    drawn: list[list[object]] = [[row] for row in batch.row_B.tolist()]
    speeds = [0] * len(drawn)
    for name, groups in sorted(batch.draws.items()):
        for group in groups:
            for i, row in enumerate(group.rows.tolist()):
                speeds[row] = group.group if name == "speed" else speeds[row]
                values = {
                    key: v[i].tolist()
                    for key, v in group.values.items()
                    if key != "wave"
                }
                drawn[row] += [name, group.group, values]
    for i, position in enumerate(batch.position_B.tolist()):
        read = batch.wave_BS[i, : round(CROP * SPEEDS[speeds[i]])].numpy().tobytes()
        yield (
            position,
            Seen(read, int(batch.label_B[i]), tuple(map(str, drawn[i])), wave_BS[i]),
        )


def read_all(
    crops: TrainCrops,
    augment: Augment,
    *,
    ranks: int,
    workers: int,
    start_step: int = 0,
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
        positions = micro_batches(
            order,
            start_step=start_step,
            stop_step=STEPS,
            micro_batch=MICRO_BATCH,
            rank=rank,
            world_size=ranks,
        )
        loader = train_loader(crops, positions, num_workers=workers, pin_memory=False)
        for batch in loader:
            for position, crop in look(batch, augment):
                assert position not in seen, "no position is read twice"
                seen[position] = crop
    return seen


def assert_same(seen: dict[int, Seen], wanted: dict[int, Seen]) -> None:
    for position, crop in seen.items():
        expected = wanted[position]
        assert crop[:3] == expected[:3], position
        assert np.abs(crop.wave_S - expected.wave_S).max() < 1e-6, position


def test_ranks_workers_resumes_and_shards_see_the_same(folder, noises, rooms):
    augment = make_augment(noises, rooms)
    loose = make_crops(folder, augment)
    wanted = read_all(loose, augment, ranks=1, workers=0)
    assert sorted(wanted) == list(range(GLOBAL_BATCH * STEPS)) == list(range(200))
    assert len({crop.draws for crop in wanted.values()}) == 200
    assert len({crop.wave_S.tobytes() for crop in wanted.values()}) == 200
    packs: list[TrainCrops] = []
    for codec in ("pcm", "flac"):
        copy = shutil.copytree(folder, folder.with_name(codec))
        pack_data_dir(copy, layout=Layout.of_waves(codec, sample_rate=RATE))
        packs.append(make_crops(copy, augment))
        assert packs[-1].manifest.parts[0].waves is not None
    packed, as_flac = packs
    cases = [(loose, 1, 4), (packed, 2, 2), (loose, 4, 1), (as_flac, 1, 0)]
    for crops, ranks, workers in cases:
        seen = read_all(crops, augment, ranks=ranks, workers=workers)
        assert seen.keys() == wanted.keys()
        assert_same(seen, wanted)
    for crops, ranks, workers, start_step in ((loose, 2, 1, 2), (as_flac, 1, 2, 3)):
        seen = read_all(
            crops, augment, ranks=ranks, workers=workers, start_step=start_step
        )
        assert sorted(seen) == list(
            range(GLOBAL_BATCH * start_step, GLOBAL_BATCH * STEPS)
        )
        assert_same(seen, wanted)
