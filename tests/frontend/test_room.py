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
    ("num_samples", "delay"),
    [
        (6000, 0),
        (6000, 30),
        (6000, 80),
        (6000, 700),
        (40000, 20000),
    ],
)
def test_room_equals_a_convolution_by_hand(num_samples, delay):
    impulses = -3.0 * decaying_room(num_samples, seed=4, delay=delay)
    wave_BS = int16_noise(2, S, seed=5)
    rooms = [np.ones(5), impulses]
    room = Room(room_prob=1, rooms=rooms, num_samples=S)
    draws = {1: Draw({"room": 1})}
    out_BS = apply_one(room, wave_BS, draws)

    # The response from 5 ms before its peak, 1 s in all, of unit energy.
    begin = max(0, delay - 80)
    end = delay - 80 + 16000
    response = impulses[begin:end]
    energy = np.square(response).sum()
    response = response / np.sqrt(energy)

    clean_S = wave_BS[1] / 32768
    convolved = scipy.signal.fftconvolve(clean_S, response)
    padded = np.pad(convolved, (0, S))
    peak = delay - begin  # the wave is not delayed
    expected_S = padded[peak : peak + S]
    error_S = np.abs(out_BS[1].numpy() - expected_S)
    assert error_S.max() < 1e-6


def test_a_room_of_one_impulse_is_the_identity():
    impulse = np.zeros(3000)
    impulse[1234] = 0.25
    wave_BS = int16_noise(1, S, seed=6)
    room = Room(room_prob=1, rooms=[impulse], num_samples=S)
    draws = {0: Draw({"room": 0})}
    out_BS = apply_one(room, wave_BS, draws)
    clean_BS = torch.from_numpy(wave_BS) / 32768
    error = out_BS - clean_BS
    assert error.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("rooms", "value"),
    [
        ([np.ones(9), np.zeros(9)], "room 1"),
        ([np.ones(0)], "room 0"),
    ],
)
def test_unusable_rooms_are_refused(rooms, value):
    with refuses("data.rirs", value):
        Room(room_prob=1, rooms=rooms, num_samples=S)
