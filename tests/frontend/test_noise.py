"""Noise: exact levels, babble, silence; then what a telephone does to it all."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import S, decaying_room, decibels, int16_noise, make_batch

from speakerlab.frontend.augment import Augment


def test_snr_is_exact():
    wave_BS = int16_noise(4, S, seed=7)
    settings = [(0, 1, 3, 0.0), (1, 0, 8000, 15.0), (3, 1, 29999, -5.0)]
    rooms = [decaying_room(4000, seed=8, delay=50)]
    noises = [int16_noise(20000, seed=9, deviation=500), int16_noise(30000, seed=10)]
    augment = Augment(num_samples=S, rooms=rooms, noises=noises)
    clean_BS = augment(make_batch(wave_BS, rooms=[(3, 0)])).double()
    noisy_BS = augment(make_batch(wave_BS, rooms=[(3, 0)], noises=settings)).double()
    for row, _, _, snr_db in settings:
        added_power = (noisy_BS[row] - clean_BS[row]).square().mean()
        measured_db = decibels(float(clean_BS[row].square().mean() / added_power))
        assert abs(measured_db - snr_db) < 0.01
    assert torch.equal(noisy_BS[2], clean_BS[2])
    assert augment.silent_count.tolist() == [0, 0]


@pytest.mark.parametrize("start", [0, 200, 299, 100 * S])
@pytest.mark.parametrize("length", [300, S - 1, S, S + 1, 20000])
def test_noise_wraps_around_at_its_own_end(length, start):
    noise = int16_noise(length, seed=11)
    neighbours = [np.full(S, 32767, dtype=np.int16), noise, np.full(S, -32768, dtype=np.int16)]
    wave_BS = int16_noise(1, S, seed=12)
    out_BS = Augment(num_samples=S, noises=neighbours)(
        make_batch(wave_BS, noises=[(0, 1, start, 0.0)])
    ).numpy()
    added = out_BS[0] - wave_BS[0] / 32768
    expected = noise[(start + np.arange(S)) % length] / 32768
    gain = np.sqrt(np.square(wave_BS[0] / 32768).mean() / np.square(expected).mean())
    assert np.abs(added - gain * expected).max() < 1e-6


def test_babble_is_of_equal_voices_and_its_snr_is_exact():
    lengths, levels = (9000, 20000, 8500), (300.0, 3000.0, 8000.0)
    voices = [
        int16_noise(length, seed=30 + i, deviation=level)
        for i, (length, level) in enumerate(zip(lengths, levels))
    ]
    wave_BS = int16_noise(3, S, seed=33)
    settings = [(0, (0, 1, 2), (8000, 5, 8499), 13.0), (1, 1, 77, 5.0), (2, (2, 0), (0, 1), -5.0)]
    augment = Augment(num_samples=S, noises=voices)
    clean_BS = torch.from_numpy(wave_BS).double() / 32768
    added_BS = augment(make_batch(wave_BS, noises=settings)).double() - clean_BS
    for row, noises, starts, snr_db in settings:
        measured_db = decibels(float(clean_BS[row].square().mean() / added_BS[row].square().mean()))
        assert abs(measured_db - snr_db) < 0.01
        parts = [
            voices[noise][(start + np.arange(S)) % lengths[noise]].astype(float)
            for noise, start in zip(np.atleast_1d(noises), np.atleast_1d(starts))
        ]
        expected = sum(part / np.sqrt(np.square(part).mean()) for part in parts)
        expected *= np.sqrt(float(added_BS[row].square().mean()) / np.square(expected).mean())
        assert np.abs(added_BS[row].numpy() - expected).max() < 1e-6
    assert augment.silent_count.tolist() == [0, 0]


def test_a_noise_of_one_recording_does_not_depend_on_the_babble_beside_it():
    noises = [int16_noise(9000, seed=34), int16_noise(9000, seed=35)]
    augment = Augment(num_samples=S, noises=noises)
    wave_BS = int16_noise(2, S, seed=36)
    alone = augment(make_batch(wave_BS, noises=[(0, 0, 3, 7.0)]))
    beside = augment(make_batch(wave_BS, noises=[(0, 0, 3, 7.0), (1, (0, 1), (1, 2), 7.0)]))
    assert torch.equal(alone[0], beside[0])


def test_silent_voices_stay_out_and_babble_of_silence_is_counted():
    noises = [int16_noise(9000, seed=37), np.zeros(400, dtype=np.int16), int16_noise(50, seed=38)]
    augment = Augment(num_samples=S, noises=noises)
    wave_BS = int16_noise(3, S, seed=39)
    out_BS = augment(
        make_batch(
            wave_BS,
            noises=[(0, (0, 1), (5, 9), 6.0), (1, (1, 1, 1), (0, 1, 2), 6.0), (2, 0, 5, 6.0)],
        )
    )
    assert out_BS.isfinite().all()
    alone = augment(make_batch(wave_BS, noises=[(0, 0, 5, 6.0)]))
    assert (out_BS[0] - alone[0]).abs().max() < 1e-6
    assert torch.equal(out_BS[1], torch.from_numpy(wave_BS[1]) / 32768)
    assert augment.silent_count.tolist() == [0, 1]


def test_noise_that_came_with_the_batch_is_taken_as_it_is():
    noise = int16_noise(S + 40, seed=40)
    wave_BS = int16_noise(2, S, seed=41)
    here = make_batch(wave_BS, noises=[(1, 0, 30, 4.0)])
    there = replace(here, noise_NS=torch.from_numpy(noise[30 : 30 + S])[None])
    expected = Augment(num_samples=S, noises=[noise])(here)
    assert torch.equal(Augment(num_samples=S)(there), expected)


def test_the_channel_comes_last_and_only_where_it_was_drawn():
    noises = [int16_noise(9000, seed=42)]
    augment = Augment(num_samples=S, noises=noises, telephone=True, codec=True)
    wave_BS = int16_noise(4, S, seed=43)
    settings = [(row, 0, 5, 6.0) for row in range(4)]
    noisy = augment(make_batch(wave_BS, noises=settings))
    out_BS = augment(
        make_batch(wave_BS, noises=settings, telephones=[1, 3], codecs=[(2, 1), (3, 0)])
    )
    banded = augment.channel.keep_band(noisy)
    assert torch.equal(out_BS[0], noisy[0])
    assert (out_BS[1] - banded[1]).abs().max() < 1e-6
    coded = augment.channel.code(noisy[2:3], torch.tensor([1]))
    both = augment.channel.code(banded[3:], torch.tensor([0]))
    for row, expected in ((2, coded), (3, both)):
        # A rounding difference may take a sample over a step of the codec, so no maximum.
        assert (out_BS[row] - expected[0]).square().mean() < 1e-8


def test_silence_gets_no_noise_and_gives_none_and_is_counted():
    wave_BS = int16_noise(4, S, seed=13)
    wave_BS[0] = 0
    wave_BS[1] = np.where(np.arange(S) % 2, 32, -32)  # -60.2 dBFS
    noises = [int16_noise(9000, seed=14), np.zeros(50, dtype=np.int16)]
    augment = Augment(num_samples=S, noises=noises)
    batch = make_batch(
        wave_BS, noises=[(0, 0, 0, 5.0), (1, 0, 0, 5.0), (2, 1, 0, 5.0), (3, 0, 0, 5.0)]
    )
    out_BS = augment(batch)
    assert torch.equal(out_BS[:3], torch.from_numpy(wave_BS[:3]) / 32768)
    assert out_BS.isfinite().all()
    assert augment.silent_count.tolist() == [2, 1]
    augment(make_batch(wave_BS, noises=[(0, 1, 0, 5.0)]))
    assert augment.silent_count.tolist() == [3, 2]


def test_just_above_the_limit_gets_noise():
    wave_BS = np.where(np.arange(S) % 2, 33, -33).astype(np.int16)[None]  # -59.9 dBFS
    augment = Augment(num_samples=S, noises=[wave_BS[0, ::2].copy()])
    out_BS = augment(make_batch(wave_BS, noises=[(0, 0, 0, 0.0)]))
    assert (out_BS - torch.from_numpy(wave_BS) / 32768).abs().min() > 0.9 * 33 / 32768
    assert augment.silent_count.tolist() == [0, 0]
