"""Crops and draws as functions of their slot; how they are stacked.

`tests/contracts/test_order.py` checks that workers, ranks and a resume change nothing.
"""

import numpy as np
import pytest
import torch

from speakerlab.core.batch import Crop, Draw
from speakerlab.data import audio
from speakerlab.data.codecs import reencode
from speakerlab.data.loader import TrainCrops, collate
from speakerlab.data.manifest import read_manifest

CROP = 12000  # 0.75 s
SPEEDS = (1.0, 0.9, 1.1)


def draw_speed(rng: np.random.Generator) -> Draw | None:
    speed = int(rng.integers(3))
    return Draw({}, speed) if speed else None


def draw_values(rng: np.random.Generator) -> Draw | None:
    return Draw({"u": rng.random(5)}) if rng.random() < 0.9 else None


DRAWS = {"speed": draw_speed, "values": draw_values}


@pytest.fixture
def make_crops(make_data_dir):
    """make_crops(seed=1, speeds=(1.0,), ...) -> TrainCrops over 2 speakers of 0.25, 1 and 2 s."""
    manifest = read_manifest(
        [make_data_dir(speakers=[0, 1], seconds=[0.25, 1.0, 2.0])], sample_rate=16000
    )

    def make(*, draws=DRAWS, seed=5, crop_samples=CROP, speeds=SPEEDS, **changes) -> TrainCrops:
        label_KN = np.arange(2 * len(speeds)).reshape(len(speeds), 2)
        settings = {"label_KN": label_KN, "seed": seed, "speeds": speeds, **changes}
        return TrainCrops(manifest, draws, crop_samples=crop_samples, **settings)

    return make


def draws_of(crop: Crop, name: str = "values") -> list:
    draw = crop.draws.get(name)
    return [] if draw is None else [draw.group, *map(str, draw.values.values())]


def speed_of(crop: Crop) -> int:
    return crop.draws["speed"].group if "speed" in crop.draws else 0


def same(a: Crop, b: Crop) -> bool:
    return np.array_equal(a.wave_S, b.wave_S) and draws_of(a) == draws_of(b) and a.first == b.first


def row_of(crops: TrainCrops, utterance: str) -> int:
    return list(crops.manifest.ids).index(utterance)


@pytest.mark.parametrize(
    ("slot", "changes"),
    [((0, 8, 4), {}), ((1, 7, 4), {}), ((0, 7, 4), {"attempt": 1}), ((0, 7, 4), {"seed": 6})],
    ids=["position", "epoch", "attempt", "seed"],
)
def test_each_part_of_the_key_changes_the_draws(make_crops, slot, changes):
    before, after = make_crops()[0, 7, 4], make_crops(**changes)[slot]
    assert draws_of(before) != draws_of(after) and before.first != after.first


def test_the_draws_depend_on_the_position_not_on_the_row(make_crops):
    crops = make_crops()
    assert draws_of(crops[0, 7, 1]) == draws_of(crops[0, 7, 4])


def test_a_crop_is_a_slice_of_its_file(make_crops):
    crops = make_crops()
    row = row_of(crops, "spk1-2")
    wave_S = audio.read(crops.manifest.paths[row])
    starts = set()
    for position in range(30):
        crop = crops[0, position, row]
        length = {0: 12000, 1: 10800, 2: 13200}[speed_of(crop)]
        assert crop.wave_S.dtype == np.int16
        assert len(crop.wave_S) == length
        (start,) = np.flatnonzero(
            (np.lib.stride_tricks.sliding_window_view(wave_S, 64) == crop.wave_S[:64]).all(1)
        )
        assert np.array_equal(crop.wave_S, wave_S[start : start + length])
        assert crop.label == 2 * speed_of(crop) + 1
        assert (crop.position, crop.row) == (position, row)
        starts.add(int(start))
    assert len(starts) == 30
    assert min(starts) < 4000
    assert max(starts) > 16000  # of 32000 - 13200 at most, 32000 - 10800


def test_speed_is_rounded_to_whole_samples(make_crops):
    crops = make_crops(
        crop_samples=1003,
        speeds=(1.0, 0.95),
        draws={"speed": lambda rng: Draw({}, int(rng.integers(2)))},
    )
    lengths = {len(crops[0, position, 0].wave_S) for position in range(20)}
    assert lengths == {1003, 953}  # 952.85
    assert crops.read_samples[1] == 953


def test_a_short_utterance_is_repeated_from_its_beginning(make_crops):
    crops = make_crops(speeds=(1.0,), draws={})
    row = row_of(crops, "spk0-0")
    wave_S = audio.read(crops.manifest.paths[row])
    assert len(wave_S) == 4000
    for position in range(3):
        crop = crops[0, position, row]
        assert np.array_equal(crop.wave_S, np.tile(wave_S, 3)) and crop.label == 0


def test_a_crop_is_reencoded_as_it_is_read(make_crops):
    def draw_codec(rng: np.random.Generator) -> Draw | None:
        return Draw({"codec": int(rng.integers(2))}) if rng.random() < 0.7 else None

    codecs, seen = ("mp3:16k", "gsm"), set()
    plain, coded = make_crops(), make_crops(draws=DRAWS | {"reencode": draw_codec}, codecs=codecs)
    for position in range(12):
        before, after = plain[0, position, 4], coded[0, position, 4]
        assert draws_of(before) == draws_of(after) and before.first == after.first
        draw, wanted_S = after.draws.get("reencode"), before.wave_S
        if draw is not None:
            wanted_S = reencode(wanted_S, codecs[draw.values["codec"]], sample_rate=16000)
        assert np.array_equal(after.wave_S, wanted_S)
        seen.add((speed_of(after), None if draw is None else draw.values["codec"]))
    assert {speed for speed, _ in seen} == {0, 1, 2} and {codec for _, codec in seen} == {
        None,
        0,
        1,
    }


def test_each_draw_has_a_generator_of_its_own(make_crops):
    """One more augmentation, or one less, changes nothing for the others."""
    plain = make_crops()
    more = make_crops(draws={"first": draw_values, "none": lambda rng: None, **DRAWS})
    less = make_crops(draws={"values": draw_values})
    for position in range(50):
        a, b, c = (crops[0, position, 4] for crops in (plain, more, less))
        assert same(a, b) and speed_of(a) == speed_of(b)
        assert draws_of(a) == draws_of(c)
        assert draws_of(b, "first") != draws_of(b) or not draws_of(b)


def test_the_generators_are_even_and_independent(make_crops):
    crops = make_crops(draws={name: lambda rng: Draw({"u": rng.random(2)}) for name in "ab"})
    drawn = [crops.draw((epoch, position, 0)) for epoch in (0, 1) for position in range(500)]
    u_N4 = np.array([[*c.draws["a"].values["u"], *c.draws["b"].values["u"]] for c in drawn])
    assert abs(np.corrcoef(u_N4.T) - np.eye(4)).max() < 0.12
    assert abs(np.corrcoef(u_N4[:-1, 0], u_N4[1:, 0])[0, 1]) < 0.1
    assert np.abs(u_N4.mean(0) - 0.5).max() < 0.03 and np.abs(u_N4.std(0) - 12**-0.5).max() < 0.02


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
