"""Crops and draws as functions of their slot; classes by name; pieces that are embedded whole."""

from dataclasses import fields, replace

import numpy as np
import pytest

from speakerlab.data import audio
from speakerlab.data.banks import Bank
from speakerlab.data.dataset import (
    Draws,
    NoiseKind,
    TrainCrops,
    class_names,
    labels_by_name,
)
from speakerlab.data.manifest import read_manifest

CROP = 12000  # 0.75 s
SPEEDS = (1.0, 0.9, 1.1)


@pytest.fixture
def make_crops(make_data_dir):
    """make_crops(seed=1, speeds=(1.0,), ...) -> TrainCrops over 2 speakers of 0.25, 1 and 2 s."""
    manifest = read_manifest(
        [make_data_dir(speakers=[0, 1], seconds=[0.25, 1.0, 2.0])], sample_rate=16000
    )

    def make(*, seed=5, attempt=0, noise_bank=None, **changes) -> TrainCrops:
        settings = {
            "crop_samples": CROP,
            "speeds": SPEEDS,
            "room_prob": 0.5,
            "num_rooms": 3,
            "noise_prob": 0.5,
            "noise_lengths": [1000, 50000],
            "noise_kinds": [NoiseKind(noises=[0, 1], snr_db=(5.0, 20.0))],
            "num_masks": 2,
            **changes,
        }
        draws = Draws(**settings)
        label_KN = np.arange(2 * len(draws.speeds)).reshape(len(draws.speeds), 2)
        return TrainCrops(
            manifest, draws, label_KN=label_KN, seed=seed, attempt=attempt, noise_bank=noise_bank
        )

    return make


def same(a, b) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def draws_of(crop) -> tuple:
    """What is drawn for a crop, its place in the file left out."""
    return (
        crop.speed,
        crop.room,
        crop.noises,
        crop.noise_starts,
        crop.snr_db,
        crop.telephone,
        crop.codec,
        *crop.mask_M2.flatten(),
    )


def row_of(crops: TrainCrops, utterance: str) -> int:
    return list(crops.manifest.ids).index(utterance)


def test_a_slot_is_the_same_crop_every_time(make_crops):
    for slot in ((0, 0, 0), (3, 77, 4)):
        assert same(make_crops()[slot], make_crops()[slot])


@pytest.mark.parametrize(
    ("slot", "changes"),
    [((0, 8, 4), {}), ((1, 7, 4), {}), ((0, 7, 4), {"attempt": 1}), ((0, 7, 4), {"seed": 6})],
    ids=["position", "epoch", "attempt", "seed"],
)
def test_each_part_of_the_key_changes_the_draws(make_crops, slot, changes):
    before, after = make_crops()[0, 7, 4], make_crops(**changes)[slot]
    assert before.snr_db != after.snr_db
    assert not np.array_equal(before.mask_M2, after.mask_M2)


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
        length = {0: 12000, 1: 10800, 2: 13200}[crop.speed]
        assert crop.wave_S.dtype == np.int16
        assert len(crop.wave_S) == length
        (start,) = np.flatnonzero(
            (np.lib.stride_tricks.sliding_window_view(wave_S, 64) == crop.wave_S[:64]).all(1)
        )
        assert np.array_equal(crop.wave_S, wave_S[start : start + length])
        assert crop.label == 2 * crop.speed + 1
        assert (crop.position, crop.row) == (position, row)
        starts.add(int(start))
    assert len(starts) == 30
    assert min(starts) < 4000
    assert max(starts) > 16000  # of 32000 - 13200 at most, 32000 - 10800


def test_speed_is_rounded_to_whole_samples(make_crops):
    crops = make_crops(crop_samples=1003, speeds=(1.0, 0.95))
    lengths = {len(crops[0, position, 0].wave_S) for position in range(20)}
    assert lengths == {1003, 953}  # 952.85
    assert crops.draws.read_samples(1) == 953


def test_a_short_utterance_is_repeated_from_its_beginning(make_crops):
    crops = make_crops(speeds=(1.0,))
    row = row_of(crops, "spk0-0")
    wave_S = audio.read(crops.manifest.paths[row])
    assert len(wave_S) == 4000
    for position in range(3):
        assert np.array_equal(crops[0, position, row].wave_S, np.tile(wave_S, 3))


def test_draws_are_as_frequent_and_as_wide_as_asked(make_crops):
    crops = make_crops(crop_samples=100)
    drawn = [crops[0, position, position % 6] for position in range(600)]
    for speed in range(3):
        assert 150 < sum(crop.speed == speed for crop in drawn) < 250
    for room in range(3):
        assert 60 < sum(crop.room == room for crop in drawn) < 140
    assert 240 < sum(crop.room == -1 for crop in drawn) < 360
    noisy = [crop for crop in drawn if crop.noises]
    assert 240 < len(noisy) < 360
    for noise, length in ((0, 1000), (1, 50000)):
        start_N = np.array([crop.noise_starts[0] for crop in noisy if crop.noises == (noise,)])
        assert 100 < len(start_N) < 200
        assert 0 <= start_N.min() < 0.1 * length
        assert 0.9 * length < start_N.max() < length
    snr_db_N = np.array([crop.snr_db for crop in drawn])
    assert 5 <= snr_db_N.min() < 5.2
    assert 19.8 < snr_db_N.max() <= 20
    mask_NM2 = np.stack([crop.mask_M2 for crop in drawn])
    assert mask_NM2.shape == (600, 2, 2)
    assert mask_NM2.dtype == np.float32
    assert 0 <= mask_NM2.min() < 0.01 < 0.99 < mask_NM2.max() < 1
    assert abs(np.corrcoef(mask_NM2.reshape(600, 4).T) - np.eye(4)).max() < 0.15


def test_what_is_switched_off_leaves_the_other_draws_alone(make_crops):
    slots = [(0, position, 4) for position in range(20)]
    rich, plain = make_crops(), make_crops(room_prob=0.0, noise_prob=0.0)
    for slot in slots:
        a, b = rich[slot], plain[slot]
        assert (b.room, b.noises, b.noise_starts) == (-1, (), ())
        assert np.array_equal(a.wave_S, b.wave_S)
        assert np.array_equal(a.mask_M2, b.mask_M2)
        assert a.snr_db == b.snr_db
    none = make_crops(num_rooms=0, noise_kinds=(), num_masks=0)
    assert {(none[slot].room, none[slot].noises) for slot in slots} == {(-1, ())}
    assert none[slots[0]].mask_M2.shape == (0, 2)


KINDS = [
    NoiseKind(noises=[0, 3], snr_db=(0.0, 15.0)),
    NoiseKind(noises=[1], snr_db=(15.0, 16.0), odds=2.0),
    NoiseKind(noises=[2, 4], snr_db=(17.0, 20.0), num_summed=(3, 7)),
]
LENGTHS = [1000, 2000, 30000, 4000, 50000]


def test_each_kind_has_its_odds_its_levels_and_its_voices(make_crops):
    crops = make_crops(noise_prob=1.0, noise_kinds=KINDS, noise_lengths=LENGTHS)
    drawn = [crops.draw((0, position, 0)) for position in range(2000)]
    found = {kind: [] for kind in range(3)}
    for crop in drawn:
        (kind,) = {i for i, k in enumerate(KINDS) if crop.noises[0] in k.noises}
        found[kind].append(crop)
        low, high = KINDS[kind].snr_db
        assert low <= crop.snr_db < high
        assert set(crop.noises) <= set(KINDS[kind].noises)
        starts = zip(crop.noises, crop.noise_starts, strict=True)
        assert all(0 <= start < LENGTHS[noise] for noise, start in starts)
    shares = [len(found[kind]) / 2000 for kind in range(3)]
    assert np.abs(np.array(shares) - [0.25, 0.5, 0.25]).max() < 0.04
    voices = np.bincount([len(crop.noises) for crop in found[2]])
    assert len(voices) == 8 and voices[:3].sum() == 0 and voices[3:].min() > 60  # of 500 / 5
    assert {len(crop.noises) for kind in (0, 1) for crop in found[kind]} == {1}
    later_N = [n / LENGTHS[i] for c in found[2] for i, n in zip(c.noises[1:], c.noise_starts[1:])]
    assert abs(np.mean(later_N) - 0.5) < 0.03 and abs(np.std(later_N) - 12**-0.5) < 0.02
    assert abs(np.mean([c.noises[1] == 2 for c in found[2]]) - 0.5) < 0.1


def test_a_single_kind_leaves_nothing_else_to_be_drawn(make_crops):
    one = [NoiseKind(noises=[0, 1], snr_db=(5.0, 20.0), odds=3.0)]
    plain, weighted = make_crops(), make_crops(noise_kinds=one)
    for position in range(20):
        assert same(plain[0, position, 4], weighted[0, position, 4])


def test_telephones_are_as_frequent_as_asked_and_change_no_other_draw(make_crops):
    crops = make_crops(telephone_prob=0.3, codec_prob=0.5)
    drawn = [crops.draw((0, position, 4)) for position in range(1000)]
    assert 250 < sum(crop.telephone for crop in drawn) < 350
    for codec in (0, 1):
        assert 200 < sum(crop.codec == codec for crop in drawn) < 300
    both = sum(crop.telephone and crop.codec >= 0 for crop in drawn)
    assert 100 < both < 200
    plain = make_crops()
    for position in range(20):
        a, b = plain[0, position, 4], crops[0, position, 4]
        assert (a.telephone, a.codec) == (False, -1)
        assert same(replace(b, telephone=False, codec=-1), a)


def test_babble_does_not_change_with_what_else_is_on(make_crops):
    settings = {"noise_prob": 1.0, "noise_kinds": KINDS, "noise_lengths": LENGTHS}
    babble, more = make_crops(**settings), make_crops(**settings, codec_prob=0.4, num_masks=5)
    for position in range(40):
        a, b = babble.draw((0, position, 0)), more.draw((0, position, 0))
        assert (a.noises, a.noise_starts, a.snr_db) == (b.noises, b.noise_starts, b.snr_db)


def test_a_crop_brings_its_noise_where_the_device_has_none(make_crops):
    rng = np.random.default_rng(1)
    waves = [rng.integers(-9000, 9000, length).astype(np.int16) for length in LENGTHS]
    ends_K = np.cumsum(LENGTHS)
    bank = Bank(tuple("abcde"), ("noise",) * 5, ends_K, np.concatenate(waves))
    settings = {"noise_kinds": KINDS, "noise_lengths": LENGTHS}
    crops, indices = make_crops(**settings, noise_bank=bank), make_crops(**settings)
    kinds = set()
    for position in range(60):
        crop, plain = crops[0, position, 0], indices[0, position, 0]
        assert same(replace(crop, noise_S=None), plain)
        if not crop.noises:
            assert crop.noise_S is None
            continue
        kinds.add(len(crop.noises) > 1)
        assert crop.noise_S is not None and crop.noise_S.dtype == np.int16
        parts = [
            np.resize(np.roll(waves[i], -start), CROP).astype(float)
            for i, start in zip(crop.noises, crop.noise_starts)
        ]
        if len(parts) == 1:
            assert np.array_equal(crop.noise_S, parts[0])
            continue
        total = sum(part / np.sqrt(np.square(part).mean()) for part in parts)
        assert np.abs(crop.noise_S - 32767 * total / np.abs(total).max()).max() < 0.51
    assert kinds == {False, True}


def test_a_speed_makes_a_block_of_new_speakers():
    names = class_names(["a", "b"], SPEEDS)
    assert names == ["a", "b", "a#0.9", "b#0.9", "a#1.1", "b#1.1"]
    assert labels_by_name(names, ["a", "b"], SPEEDS).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert class_names(["a", "b"], [1.0]) == ["a", "b"]


def test_labels_find_their_rows_in_a_head_that_has_more():
    classes = ["x", "b#1.1", "a", "y#0.9", "b", "a#1.1"]
    assert labels_by_name(classes, ["a", "b"], [1.0, 1.1]).tolist() == [[2, 4], [5, 1]]
    with pytest.raises(KeyError, match="c"):
        labels_by_name(classes, ["a", "c"], [1.0])


def test_the_label_is_looked_up_by_speed_and_speaker(make_crops):
    crops = make_crops()
    crops.label_KN = np.array([[10, 20], [11, 21], [12, 22]])
    for position in range(12):
        crop = crops[0, position, position % 6]
        speaker = int(crops.manifest.ids[crop.row][3])
        assert crop.label == 10 * (speaker + 1) + crop.speed
