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
from speakerlab.frontend.augment.base import split_draws

CROP = 12000  # 0.75 s
SPEEDS = (1.0, 0.9, 1.1)


def draw_speed(rng: np.random.Generator) -> Draw | None:
    speed = int(rng.integers(3))
    if speed == 0:
        return None
    return Draw({}, speed)


def draw_values(rng: np.random.Generator) -> Draw | None:
    if rng.random() >= 0.9:
        return None
    values = rng.random(5)
    return Draw({"u": values})


DRAWS = {"speed": draw_speed, "values": draw_values}


@pytest.fixture
def make_crops(make_data_dir):
    """make_crops(seed=1, speeds=(1.0,), ...) -> TrainCrops over 2 speakers of 0.25, 1 and 2 s."""
    folder = make_data_dir(speakers=[0, 1], seconds=[0.25, 1.0, 2.0])
    manifest = read_manifest([folder], sample_rate=16000)

    def make(
        *,
        draws=DRAWS,
        seed=5,
        crop_samples=CROP,
        speeds=SPEEDS,
        **changes,
    ) -> TrainCrops:
        num_speeds = len(speeds)
        label_KN = np.arange(2 * num_speeds).reshape(num_speeds, 2)
        return TrainCrops(
            manifest,
            draws,
            crop_samples=crop_samples,
            label_KN=label_KN,
            seed=seed,
            speeds=speeds,
            **changes,
        )

    return make


def draws_of(crop: Crop, name: str = "values") -> list:
    draw = crop.draws.get(name)
    if draw is None:
        return []
    values = [str(value) for value in draw.values.values()]
    return [draw.group, *values]


def speed_of(crop: Crop) -> int:
    if "speed" not in crop.draws:
        return 0
    return crop.draws["speed"].group


def assert_same(a: Crop, b: Crop) -> None:
    assert np.array_equal(a.wave_S, b.wave_S)
    assert draws_of(a) == draws_of(b)
    assert a.first == b.first


def row_of(crops: TrainCrops, utterance: str) -> int:
    ids = list(crops.manifest.ids)
    return ids.index(utterance)


@pytest.mark.parametrize(
    ("slot", "changes"),
    [
        ((0, 8, 4), {}),
        ((1, 7, 4), {}),
        ((0, 7, 4), {"attempt": 1}),
        ((0, 7, 4), {"seed": 6}),
    ],
    ids=["position", "epoch", "attempt", "seed"],
)
def test_each_part_of_the_key_changes_the_draws(make_crops, slot, changes):
    before = make_crops()[0, 7, 4]
    after = make_crops(**changes)[slot]
    assert draws_of(before) != draws_of(after)
    assert before.first != after.first


def test_the_draws_depend_on_the_position_not_on_the_row(make_crops):
    crops = make_crops()
    first = crops[0, 7, 1]
    other = crops[0, 7, 4]
    assert draws_of(first) == draws_of(other)


def test_a_crop_is_a_slice_of_its_file(make_crops):
    crops = make_crops()
    row = row_of(crops, "spk1-2")
    wave_S = audio.read(crops.manifest.paths[row])
    windows_N64 = np.lib.stride_tricks.sliding_window_view(wave_S, 64)
    # 12000 samples after the speed has changed, by 1, 0.9 or 1.1
    lengths = [12000, 10800, 13200]
    starts = set()
    for position in range(30):
        crop = crops[0, position, row]
        speed = speed_of(crop)
        length = lengths[speed]
        assert crop.wave_S.dtype == np.int16
        assert len(crop.wave_S) == length
        # the first 64 samples of the crop occur once in the file
        is_start_N = (windows_N64 == crop.wave_S[:64]).all(1)
        (start,) = np.flatnonzero(is_start_N)
        expected_S = wave_S[start : start + length]
        assert np.array_equal(crop.wave_S, expected_S)
        assert crop.label == 2 * speed + 1
        assert crop.position == position
        assert crop.row == row
        starts.add(int(start))
    assert len(starts) == 30
    assert min(starts) < 4000
    # of 32000 - 13200 at most, 32000 - 10800
    assert max(starts) > 16000


def test_speed_is_rounded_to_whole_samples(make_crops):
    def draw_one_of_two(rng: np.random.Generator) -> Draw:
        speed = int(rng.integers(2))
        return Draw({}, speed)

    crops = make_crops(
        crop_samples=1003,
        speeds=(1.0, 0.95),
        draws={"speed": draw_one_of_two},
    )
    lengths = set()
    for position in range(20):
        crop = crops[0, position, 0]
        lengths.add(len(crop.wave_S))
    # 0.95 x 1003 is 952.85
    assert lengths == {1003, 953}
    assert crops.read_samples[1] == 953


def test_a_short_utterance_is_repeated_from_its_beginning(make_crops):
    crops = make_crops(speeds=(1.0,), draws={})
    row = row_of(crops, "spk0-0")
    wave_S = audio.read(crops.manifest.paths[row])
    assert len(wave_S) == 4000
    expected_S = np.tile(wave_S, 3)
    for position in range(3):
        crop = crops[0, position, row]
        assert np.array_equal(crop.wave_S, expected_S)
        assert crop.label == 0


def test_a_crop_is_reencoded_as_it_is_read(make_crops):
    def draw_codec(rng: np.random.Generator) -> Draw | None:
        if rng.random() >= 0.7:
            return None
        codec = int(rng.integers(2))
        return Draw({"codec": codec})

    codecs = ("mp3:16k", "gsm")
    speeds_seen = set()
    codecs_seen = set()
    plain = make_crops()
    with_codec = DRAWS | {"reencode": draw_codec}
    coded = make_crops(draws=with_codec, codecs=codecs)
    for position in range(12):
        before = plain[0, position, 4]
        after = coded[0, position, 4]
        assert draws_of(before) == draws_of(after)
        assert before.first == after.first
        expected_S = before.wave_S
        codec = None
        draw = after.draws.get("reencode")
        if draw is not None:
            codec = draw.values["codec"]
            expected_S = reencode(
                expected_S,
                codecs[codec],
                sample_rate=16000,
            )
        assert np.array_equal(after.wave_S, expected_S)
        speeds_seen.add(speed_of(after))
        codecs_seen.add(codec)
    assert speeds_seen == {0, 1, 2}
    assert codecs_seen == {None, 0, 1}


def test_each_draw_has_a_generator_of_its_own(make_crops):
    """One more augmentation, or one less, changes nothing for the others."""
    plain = make_crops()
    additional = {"first": draw_values, "none": lambda rng: None}
    with_others = make_crops(draws=additional | DRAWS)
    values_only = make_crops(draws={"values": draw_values})
    for position in range(50):
        crop = plain[0, position, 4]
        other = with_others[0, position, 4]
        assert_same(crop, other)
        assert speed_of(crop) == speed_of(other)
        alone = values_only[0, position, 4]
        assert draws_of(crop) == draws_of(alone)

        # the same function of another name draws other numbers
        values = draws_of(other)
        assert draws_of(other, "first") != values or not values


def test_the_generators_are_even_and_independent(make_crops):
    def draw_two(rng):
        values = rng.random(2)
        return Draw({"u": values})

    crops = make_crops(draws={"a": draw_two, "b": draw_two})
    rows = []
    for epoch in (0, 1):
        for position in range(500):
            draws = crops.draw((epoch, position, 0)).draws
            first_values = draws["a"].values["u"]
            second_values = draws["b"].values["u"]
            rows.append([*first_values, *second_values])
    u_N4 = np.array(rows)

    # no correlation of the four numbers, or of neighbouring crops
    correlation_44 = np.corrcoef(u_N4.T)
    difference_44 = correlation_44 - np.eye(4)
    assert abs(difference_44).max() < 0.12
    before_N = u_N4[:-1, 0]
    after_N = u_N4[1:, 0]
    neighbours_22 = np.corrcoef(before_N, after_N)
    assert abs(neighbours_22[0, 1]) < 0.1

    # the mean and the deviation of an even distribution
    mean_error_4 = np.abs(u_N4.mean(0) - 0.5)
    assert mean_error_4.max() < 0.03
    deviation_error_4 = np.abs(u_N4.std(0) - 12**-0.5)
    assert deviation_error_4.max() < 0.02


def make_crop(length: int, **draws: Draw) -> Crop:
    wave_S = np.full(length, length, dtype=np.int16)
    return Crop(
        wave_S=wave_S,
        feats_TF=None,
        first=0,
        label=length,
        position=100 + length,
        row=200 + length,
        draws=draws,
    )


def test_rows_are_padded_and_listed():
    first_values = {"level": 0.5, "place_2": np.array([1, 2])}
    second_values = {"level": 1.5, "place_2": np.array([3, 4])}
    third_values = {"level": 2.5, "place_2": np.array([5])}
    crops = [
        make_crop(4, b=Draw(first_values), a=Draw({}, 2)),
        make_crop(6),
        make_crop(5, b=Draw(second_values), a=Draw({}, 1)),
        make_crop(5, b=Draw(third_values, 7), a=Draw({}, 2)),
    ]
    batch = collate(crops)
    assert batch.wave_BS.tolist() == [
        [4] * 4 + [0, 0],
        [6] * 6,
        [5] * 5 + [0],
        [5] * 5 + [0],
    ]
    assert batch.wave_BS.dtype == torch.int16
    assert batch.label_B.tolist() == [4, 6, 5, 5]
    assert batch.position_B.tolist() == [104, 106, 105, 105]
    assert batch.row_B.tolist() == [204, 206, 205, 205]

    # draws without values are listed by their group
    group_1, group_2 = batch.draws["a"]
    assert group_1.group == 1
    assert group_1.rows.tolist() == [2]
    assert group_2.group == 2
    assert group_2.rows.tolist() == [0, 3]

    # values of a group are stacked
    first, second = batch.draws["b"]
    assert first.group == 0
    assert first.rows.tolist() == [0, 2]
    place_B2 = first.values["place_2"]
    assert place_B2.tolist() == [[1, 2], [3, 4]]
    level_B = first.values["level"]
    assert level_B.tolist() == [0.5, 1.5]
    assert level_B.dtype == torch.float32
    assert second.group == 7
    assert second.values["place_2"].tolist() == [[5]]

    doubled = batch.map(lambda tensor: tensor * 2)
    doubled_first = doubled.draws["b"][0]
    assert doubled_first.values["level"].tolist() == [1.0, 3.0]

    _, other = split_draws(first, 1)
    assert other.rows.tolist() == [2]
    assert other.values["place_2"].tolist() == [[3, 4]]


def test_crops_without_draws_give_a_batch_without_draws():
    batch = collate([make_crop(3)])
    assert batch.draws == {}
