"""Speed against soxr and against tones computed by hand."""

import numpy as np
import pytest
import torch
from batches import S, apply_all, decibels
from refusals import refuses

from speakerlab.core.batch import Draw
from speakerlab.frontend.augment.speed import Speed
from speakerlab.frontend.resampling import resampler


def change(wave_BS: np.ndarray, speeds: list[int], of: tuple[float, ...], num: int = S):
    drawn = {row: {"speed": Draw({}, speed)} for row, speed in enumerate(speeds) if speed}
    parts = {"speed": Speed(speeds=of, num_samples=num)}
    return apply_all(parts, wave_BS, drawn, num_samples=num)


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
    out_BS = change(wave_BS, [1, 2], (1.0, 0.9, 1.1)).numpy()
    for row, hertz in [(0, 900), (1, 1100)]:
        expected = 10000 / 32768 * np.sin(2 * np.pi * hertz * np.arange(S) / 16000)
        assert np.abs(out_BS[row] - expected)[50:-50].max() < 1e-3


@pytest.mark.parametrize("num_samples", [401, 7999, 8005, 16003, 16017, 48001])
def test_length_is_exact_for_every_speed(num_samples):
    speeds = (1.0, 0.9, 1.1, 0.5)
    for rows, longest in (([0, 1, 2, 3], 1.1), ([3, 1], 0.9)):
        wave_BS = np.full((len(rows), round(num_samples * longest)), 8192, dtype=np.int16)
        out_BS = change(wave_BS, rows, speeds, num_samples)
        assert out_BS.shape == (len(rows), num_samples)
        assert (out_BS[:, 50:-50] - 0.25).abs().max() < 1e-3  # no row's end is left unwritten


@pytest.mark.parametrize("speed", [0.0, -1.0, 0.91234])
def test_a_speed_without_a_small_ratio_is_refused(speed):
    with refuses("augment", speed):
        Speed(num_samples=S, speeds=(1.0, speed))
