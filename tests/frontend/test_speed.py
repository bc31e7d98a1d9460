"""Speed against soxr and against tones computed by hand."""

import numpy as np
import pytest
import torch
from batches import S, apply_all, decibels
from refusals import refuses

from speakerlab.core.batch import Draw
from speakerlab.frontend.augment.speed import Resampler, Speed, resampler


def tone(hertz: float, num_samples: int) -> np.ndarray:
    """A tone at 16 kHz, with the peak 10000 of int16."""
    time_S = np.arange(num_samples)
    phase_S = 2 * np.pi * hertz * time_S / 16000
    return 10000 * np.sin(phase_S)


def change(
    wave_BS: np.ndarray,
    speeds: list[int],
    of: tuple[float, ...],
    num: int = S,
) -> torch.Tensor:
    """Apply to each row the speed of that number in `of`; 0 is no change."""
    drawn = {}
    for row, speed in enumerate(speeds):
        if speed:
            drawn[row] = {"speed": Draw({}, speed)}
    augmentation = Speed(speeds=of, num_samples=num)
    parts = {"speed": augmentation}
    return apply_all(parts, wave_BS, drawn, num_samples=num)


@pytest.mark.parametrize(
    ("old_rate", "new_rate"), [(9, 10), (11, 10), (16000, 8000), (8000, 16000), (7, 3)]
)
def test_the_filters_are_those_of_torchaudio(old_rate, new_rate):
    """Trainings of earlier versions, which took them from there, can be repeated."""
    transforms = pytest.importorskip("torchaudio.transforms")
    expected = transforms.Resample(
        old_rate,
        new_rate,
        resampling_method="sinc_interp_kaiser",
        lowpass_filter_width=13,
        rolloff=1.0,
        beta=7.0,
    )
    ours = Resampler(old_rate, new_rate)
    assert torch.equal(ours.kernel, expected.kernel)
    assert ours.width == expected.width


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_is_within_60_db_of_soxr(speed):
    soxr = pytest.importorskip("soxr")
    hertz = np.array([500, 1000, 2000, 3000, 4000, 5000, 5500, 6000])
    num_samples = round(48000 * speed)
    time_S = np.arange(num_samples) / 16000
    phase_BS = 2 * np.pi * hertz[:, None] * time_S + 0.3
    tone_BS = 0.5 * np.sin(phase_BS)

    tensor_BS = torch.from_numpy(tone_BS).float()
    resampled_BS = resampler(speed)(tensor_BS).double()
    source_rate = 16000 * speed
    expected_SB = soxr.resample(tone_BS.T, source_rate, 16000, quality="HQ")
    # The ends of a tone that begins at once are no tone.
    middle = slice(2000, -2000)
    ours = resampled_BS.numpy()[:, middle]
    theirs = expected_SB.T[:, middle]
    assert ours.shape == (8, 44000)
    assert theirs.shape == (8, 44000)
    for frequency, our_S, their_S in zip(hertz, ours, theirs):
        error_power = np.square(our_S - their_S).mean()
        signal_power = np.square(their_S).mean()
        error_db = decibels(error_power / signal_power)
        assert error_db < -60, f"{frequency} Hz"


def test_speed_changes_pitch_and_keeps_the_right_samples():
    num_slow = round(S * 0.9)
    num_fast = round(S * 1.1)
    wave_BS = np.zeros((2, num_fast), np.int16)
    slow_S, fast_S = wave_BS
    slow_S[:num_slow] = tone(1000, num_slow)
    fast_S[:] = tone(1000, num_fast)
    speeds = (1.0, 0.9, 1.1)
    changed_BS = change(wave_BS, [1, 2], speeds).numpy()
    for changed_S, hertz in zip(changed_BS, (900, 1100)):
        expected_S = tone(hertz, S) / 32768
        error_S = np.abs(changed_S - expected_S)
        error_S = error_S[50:-50]  # without the ends
        assert error_S.max() < 1e-3


@pytest.mark.parametrize("num_samples", [401, 7999, 8005, 16003, 16017, 48001])
def test_length_is_exact_for_every_speed(num_samples):
    speeds = (1.0, 0.9, 1.1, 0.5)
    # The number of each row's speed, and the fastest of these.
    for numbers, fastest in (
        ([0, 1, 2, 3], 1.1),
        ([3, 1], 0.9),
    ):
        num_rows = len(numbers)
        num_read = round(num_samples * fastest)
        wave_BS = np.full((num_rows, num_read), 8192, np.int16)
        changed_BS = change(wave_BS, numbers, speeds, num_samples)
        assert changed_BS.shape == (num_rows, num_samples)
        # No row's end is left unwritten.
        error_BS = changed_BS[:, 50:-50] - 0.25
        assert error_BS.abs().max() < 1e-3


@pytest.mark.parametrize("speed", [0.0, -1.0, 0.91234])
def test_a_speed_without_a_small_ratio_is_refused(speed):
    with refuses("augment", speed):
        Speed(num_samples=S, speeds=(1.0, speed))
