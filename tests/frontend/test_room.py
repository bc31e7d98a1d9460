"""Rooms against a convolution by hand."""

import numpy as np
import pytest
import scipy.signal
import torch
from batches import S, apply_one, decaying_room, int16_noise
from refusals import refuses

from speakerlab.core.batch import Draw
from speakerlab.frontend.augment.room import Room


@pytest.mark.parametrize(
    ("num_samples", "delay"), [(6000, 0), (6000, 30), (6000, 80), (6000, 700), (40000, 20000)]
)
def test_room_equals_a_convolution_by_hand(num_samples, delay):
    impulses = -3.0 * decaying_room(num_samples, seed=4, delay=delay)
    wave_BS = int16_noise(2, S, seed=5)
    room = Room(room_prob=1, rooms=[np.ones(5), impulses], num_samples=S)
    out_BS = apply_one(room, wave_BS, {1: Draw({"room": 1})}).numpy()
    begin = max(0, delay - 80)  # 5 ms before the peak
    kept = impulses[begin : delay - 80 + 16000]  # to 1 s in all
    kept = kept / np.sqrt(np.square(kept).sum())
    full = scipy.signal.fftconvolve(wave_BS[1] / 32768, kept)
    expected = np.pad(full, (0, S))[delay - begin :][:S]
    assert np.abs(out_BS[1] - expected).max() < 1e-6


def test_a_room_of_one_impulse_is_the_identity():
    impulse = np.zeros(3000)
    impulse[1234] = 0.25
    wave_BS = int16_noise(1, S, seed=6)
    room = Room(room_prob=1, rooms=[impulse], num_samples=S)
    out_BS = apply_one(room, wave_BS, {0: Draw({"room": 0})})
    assert (out_BS - torch.from_numpy(wave_BS) / 32768).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("rooms", "value"), [([np.ones(9), np.zeros(9)], "room 1"), ([np.ones(0)], "room 0")]
)
def test_unusable_rooms_are_refused(rooms, value):
    with refuses("data.rirs", value):
        Room(room_prob=1, rooms=rooms, num_samples=S)
