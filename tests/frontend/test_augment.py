"""Speed and room against independent references, and rows that must stay untouched."""

from collections.abc import Sequence

import numpy as np
import pytest
import scipy.signal
import torch
from batches import S, decaying_room, decibels, int16_noise, make_batch

from speakerlab.core.batch import Batch
from speakerlab.frontend.augment import Augment
from speakerlab.frontend.banks import bank_bytes
from speakerlab.frontend.resampling import resampler


def test_untouched_rows_are_the_samples_over_32768():
    wave_BS = int16_noise(3, S, seed=1)
    wave_BS[0, :2] = [-32768, 32767]
    augment = Augment(
        num_samples=S,
        speeds=(1.0, 0.9),
        rooms=[decaying_room(4000, seed=1, delay=100)],
        noises=[int16_noise(9000, seed=2)],
    )
    batch = make_batch(
        wave_BS, speeds=[0, 1, 0], num_speeds=2, rooms=[(1, 0)], noises=[(1, 0, 7, 5.0)]
    )
    out_BS = augment(batch)
    assert out_BS.dtype == torch.float32 and out_BS.shape == (3, S)
    plain = torch.from_numpy(wave_BS) / 32768
    assert torch.equal(out_BS[[0, 2]], plain[[0, 2]])
    assert not torch.isclose(out_BS[1], plain[1], atol=0.01).all()


def test_a_batch_without_anything_is_only_scaled():
    wave_BS = int16_noise(2, S + 50, seed=3)  # longer, as padded for a faster row elsewhere
    out_BS = Augment(num_samples=S)(make_batch(wave_BS))
    assert torch.equal(out_BS, torch.from_numpy(wave_BS[:, :S]) / 32768)


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_is_within_60_db_of_soxr(speed):
    soxr = pytest.importorskip("soxr")
    hertz = np.array([500, 1000, 2000, 3000, 4000, 5000, 5500, 6000])
    num_read = round(48000 * speed)
    tones = 0.5 * np.sin(2 * np.pi * hertz[:, None] * np.arange(num_read) / 16000 + 0.3)
    ours = resampler(speed)(torch.from_numpy(tones).float()).double().numpy()[:, 2000:-2000]
    theirs = soxr.resample(tones.T, 16000 * speed, 16000, quality="HQ").T[:, 2000:-2000]
    assert ours.shape == theirs.shape == (8, 44000)
    for tone in range(8):
        error = np.square(ours[tone] - theirs[tone]).mean()
        assert decibels(error / np.square(theirs[tone]).mean()) < -60, f"{hertz[tone]} Hz"


def test_speed_changes_pitch_and_keeps_the_right_samples():
    num_read = round(S * 1.1)
    time = np.arange(num_read)
    wave_BS = np.zeros((2, num_read), dtype=np.int16)
    wave_BS[0, : round(S * 0.9)] = 10000 * np.sin(2 * np.pi * 1000 * time[: round(S * 0.9)] / 16000)
    wave_BS[1] = 10000 * np.sin(2 * np.pi * 1000 * time / 16000)
    augment = Augment(num_samples=S, speeds=(1.0, 0.9, 1.1))
    out_BS = augment(make_batch(wave_BS, speeds=[1, 2], num_speeds=3)).numpy()
    for row, hertz in [(0, 900), (1, 1100)]:
        expected = 10000 / 32768 * np.sin(2 * np.pi * hertz * np.arange(S) / 16000)
        assert np.abs(out_BS[row] - expected)[50:-50].max() < 1e-3


@pytest.mark.parametrize("num_samples", [401, 7999, 8005, 16003, 16017, 48001])
def test_length_is_exact_for_every_speed(num_samples):
    speeds = (0.9, 1.0, 1.1, 0.5)
    wave_BS = np.full((4, round(num_samples * 1.1)), 8192, dtype=np.int16)
    out_BS = Augment(num_samples=num_samples, speeds=speeds)(
        make_batch(wave_BS, speeds=[0, 1, 2, 3], num_speeds=4)
    )
    assert out_BS.shape == (4, num_samples)
    assert (out_BS[:, 50:-50] - 0.25).abs().max() < 1e-3  # no row's end is left unwritten


@pytest.mark.parametrize("speed", [0.0, -1.0, 0.91234])
def test_a_speed_without_a_small_ratio_is_refused(speed):
    with pytest.raises(ValueError, match="augment: a speed must be positive"):
        Augment(num_samples=S, speeds=(1.0, speed))


@pytest.mark.parametrize(
    ("num_samples", "delay"), [(6000, 0), (6000, 30), (6000, 80), (6000, 700), (40000, 20000)]
)
def test_room_equals_a_convolution_by_hand(num_samples, delay):
    room = -3.0 * decaying_room(num_samples, seed=4, delay=delay)
    wave_BS = int16_noise(2, S, seed=5)
    out_BS = Augment(num_samples=S, rooms=[np.ones(5), room])(
        make_batch(wave_BS, rooms=[(1, 1)])
    ).numpy()
    begin = max(0, delay - 80)  # 5 ms before the peak
    kept = room[begin : delay - 80 + 16000]  # to 1 s in all
    kept = kept / np.sqrt(np.square(kept).sum())
    full = scipy.signal.fftconvolve(wave_BS[1] / 32768, kept)
    expected = np.pad(full, (0, S))[delay - begin :][:S]
    assert np.abs(out_BS[1] - expected).max() < 1e-6
    assert np.array_equal(out_BS[0], (wave_BS[0] / 32768).astype(np.float32))


def test_a_room_of_one_impulse_is_the_identity():
    impulse = np.zeros(3000)
    impulse[1234] = 0.25
    wave_BS = int16_noise(1, S, seed=6)
    out_BS = Augment(num_samples=S, rooms=[impulse])(make_batch(wave_BS, rooms=[(0, 0)]))
    assert (out_BS - torch.from_numpy(wave_BS) / 32768).abs().max() < 1e-6


def test_a_batch_equals_its_rows():
    speeds, num_rows = (1.0, 0.9, 1.1), 12
    augment = Augment(
        num_samples=S,
        speeds=speeds,
        rooms=[decaying_room(5000, seed=s, delay=60 * s) for s in range(3)],
        noises=[int16_noise(7000 + 999 * s, seed=s) for s in range(3)],
    )
    wave_BS = int16_noise(num_rows, round(S * 1.1), seed=15)
    speed_B = [row % 3 for row in range(num_rows)]
    room_R = {row: row % 3 for row in range(1, num_rows)}
    noise_N = {row: (row % 3, 13 * row, 2.0 * row - 5) for row in range(3, num_rows)}

    def batch_of(rows: Sequence[int]) -> Batch:
        return make_batch(
            wave_BS[rows],
            speeds=[speed_B[row] for row in rows],
            num_speeds=3,
            rooms=[(i, room_R[row]) for i, row in enumerate(rows) if row in room_R],
            noises=[(i, *noise_N[row]) for i, row in enumerate(rows) if row in noise_N],
        )

    together = augment(batch_of(range(num_rows)))
    singly = torch.cat([augment(batch_of([row])) for row in range(num_rows)])
    assert (together - singly).abs().max() < 1e-6
    assert together[4:].abs().mean() > 0.05


def test_autocast_does_not_reach_it():
    rooms = [decaying_room(900, seed=16, delay=9)]
    augment = Augment(num_samples=S, speeds=(0.9,), rooms=rooms)
    batch = make_batch(int16_noise(2, S, seed=17), rooms=[(0, 0), (1, 0)])
    plain = augment(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(augment(batch), plain)


def test_banks_enter_no_state_dict_and_take_the_bytes_said():
    rooms = [decaying_room(length, seed=18, delay=100) for length in (900, 5000)]
    noises = [int16_noise(length, seed=19) for length in (50, 7000, 9000)]
    augment = Augment(num_samples=S, speeds=(1.0, 1.1), rooms=rooms, noises=noises)
    assert augment.state_dict() == {}
    banks = {name: x for name, x in augment.named_buffers() if name.startswith(("room", "noise"))}
    assert sum(x.nbytes for x in banks.values()) == bank_bytes(
        num_samples=S, room_lengths=[900, 5000], noise_lengths=[50, 7000, 9000]
    )
    assert bank_bytes(num_samples=S) == 0
    # 1 s of float32 a room; int16 and an offset and a length for a noise, looped by S - 1 samples.
    assert bank_bytes(num_samples=48000, room_lengths=[50000]) == 64000
    assert bank_bytes(num_samples=48000, noise_lengths=[160000]) == 2 * 207999 + 16


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"rooms": [np.ones(9), np.zeros(9)]}, "augment: room 1 is not a vector of finite samples"),
        ({"rooms": [np.ones((9, 2))]}, r"augment: room 0 .* got shape \(9, 2\); "),
        ({"rooms": [np.array([1.0, np.nan])]}, "augment: room 0 "),
        ({"rooms": [np.ones(0)]}, "augment: room 0 "),
        ({"noises": [np.ones(9)]}, "augment: noise 0 .* got float64 of shape"),
        ({"noises": [np.zeros(0, dtype=np.int16)]}, "augment: noise 0 "),
    ],
)
def test_unusable_rooms_and_noises_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        Augment(num_samples=S, **args)
