"""The telephone's band and codec on tones, and the codec against libsndfile's."""

import numpy as np
import pytest
import soundfile
import torch
from batches import codec_draw, make_batch
from refusals import refuses

from speakerlab.core.batch import Draws
from speakerlab.frontend.augment.codec import (
    LOWEST_OCTAVES,
    OFFSETS,
    Codec,
    through_g711,
)
from speakerlab.frontend.augment.telephone import Telephone

S = 16001  # odd on purpose
EVERY_LEVEL = np.arange(-32768, 32768, dtype=np.int16)


def keep_band(wave_RS: torch.Tensor, *, rate: int = 16000) -> torch.Tensor:
    telephone = Telephone(
        telephone_prob=1,
        num_samples=S,
        sample_rate=rate,
    )
    all_rows = torch.arange(len(wave_RS))
    draws = Draws(all_rows, {})
    return telephone.apply(wave_RS, draws)


def code(wave_RS: torch.Tensor, law_R: list[int], *, rate: int = 16000) -> torch.Tensor:
    num_rows = len(law_R)
    named_draws = {}
    for row, law in enumerate(law_R):
        named_draws[row] = {"codec": codec_draw(law)}
    # The draws are stacked by a batch, whose waves do not matter.
    placeholder_RS = np.zeros((num_rows, 1), np.int16)
    batch = make_batch(placeholder_RS, named_draws)
    (draws,) = batch.draws["codec"]
    codec = Codec(codec_prob=1, sample_rate=rate)
    return codec.apply(wave_RS, draws)


def g711(wave_RS: torch.Tensor, law_R: list[int]) -> torch.Tensor:
    offset_R1 = torch.tensor(OFFSETS)[law_R, None]
    lowest_R1 = torch.tensor(LOWEST_OCTAVES)[law_R, None]
    return through_g711(wave_RS, offset_R1, lowest_R1)


def every_level() -> torch.Tensor:
    """One wave of all int16 values, as floating point."""
    wave_S = torch.from_numpy(EVERY_LEVEL / 32768).float()
    return wave_S[None]


def tones(hertz: list[float], *, rate: int = 16000) -> torch.Tensor:
    """One row a frequency."""
    time_S = np.arange(S) / rate
    hertz_R1 = np.array(hertz)[:, None]
    phase_RS = 2 * np.pi * hertz_R1 * time_S + 0.3
    tone_RS = np.sin(phase_RS)
    return torch.tensor(tone_RS).float()


def gain_db(after_BS: torch.Tensor, before_BS: torch.Tensor) -> list[float]:
    # Without the ends: a tone that begins at once is no tone there.
    middle = slice(1000, -1000)
    middle_after_BS = after_BS[:, middle]
    middle_before_BS = before_BS[:, middle]
    power_after_B = middle_after_BS.square().mean(1)
    power_before_B = middle_before_BS.square().mean(1)
    ratio_B = power_after_B / power_before_B
    gain_B = 10 * ratio_B.log10()
    return gain_B.tolist()


def gain_of_the_band(hertz: list[float], *, rate: int) -> np.ndarray:
    """Gain in dB of the telephone's band at each frequency."""
    wave_RS = tones(hertz, rate=rate)
    filtered_RS = keep_band(wave_RS, rate=rate)
    return np.array(gain_db(filtered_RS, wave_RS))


@pytest.mark.parametrize(("law", "subtype"), [(0, "ULAW"), (1, "ALAW")])
def test_every_sample_is_what_libsndfile_decodes(tmp_path, law, subtype):
    path = tmp_path / "x.wav"
    soundfile.write(path, EVERY_LEVEL, 8000, subtype=subtype)
    decoded, _rate = soundfile.read(path, dtype="int16")
    theirs = decoded.astype(np.int64)

    coded_BS = 32768 * g711(every_level(), [law])
    ours = coded_BS[0].numpy()
    rounded = np.rint(ours)
    assert np.array_equal(ours, rounded)  # integers, of 16 bits

    # Zero itself has two codes; which is taken is a sign's matter.
    is_nonzero = EVERY_LEVEL != 0
    ours_nonzero = ours[is_nonzero]
    theirs_nonzero = theirs[is_nonzero]
    assert np.array_equal(ours_nonzero, theirs_nonzero)

    # mu-law has a zero of either sign.
    num_levels = 255 if law == 0 else 256
    assert len(np.unique(ours)) == num_levels


def test_rows_may_have_different_laws():
    wave_BS = every_level()
    (mu_law_S,) = g711(wave_BS, [0])
    (a_law_S,) = g711(wave_BS, [1])
    twice_BS = wave_BS.repeat(2, 1)
    first_S, second_S = g711(twice_BS, [1, 0])
    assert torch.equal(first_S, a_law_S)
    assert torch.equal(second_S, mu_law_S)
    assert not torch.equal(first_S, second_S)


def test_amplitudes_beyond_full_scale_are_clipped():
    loud = torch.tensor([[2.0, -2.0, 1.0]])
    clipped = g711(loud, [0]) * 32768
    largest = 32124.0  # of mu-law
    assert clipped.tolist() == [[largest, -largest, largest]]


@pytest.mark.parametrize("rate", [8000, 16000])
def test_the_band_is_the_telephones(rate):
    inside_db = gain_of_the_band([400, 1000, 2500, 3300], rate=rate)
    edges_db = gain_of_the_band([300, 3400], rate=rate)
    outside_db = gain_of_the_band([50, 150, 200, 3500, 3800], rate=rate)
    assert np.abs(inside_db).max() < 0.05
    # Half of the amplitude, -6 dB, at the edges.
    error_db = np.abs(edges_db + 6)
    assert error_db.max() < 0.1
    assert outside_db.max() < -50


def test_the_band_does_not_delay():
    wave_RS = tones([1000, 2000])
    error = keep_band(wave_RS) - wave_RS
    error = error[:, 1000:-1000]  # without the ends
    assert error.abs().max() < 5e-3


def test_the_codec_keeps_what_is_below_4_khz_and_nothing_above():
    wave_RS = 0.25 * tones([500, 2000, 3000, 5000, 7000])
    coded_RS = code(wave_RS, [0, 1, 0, 0, 0])
    assert coded_RS.shape == wave_RS.shape

    error_RS = coded_RS - wave_RS
    error_RS = error_RS[:, 1000:-1000]
    signal_power_R = wave_RS.square().mean(1)
    error_power_R = error_RS.square().mean(1)
    ratio_R = signal_power_R / error_power_R
    snr_db_R = 10 * ratio_R.log10()
    # G.711 has some 38 dB for a tone.
    for snr_db in snr_db_R[:3]:
        assert 30 < snr_db < 45
    gains_db = gain_db(coded_RS, wave_RS)
    for gain_above_db in gains_db[3:]:
        assert gain_above_db < -50

    # The tones below 4 kHz have no images above 4.4 kHz.
    windowed_RS = coded_RS * torch.hann_window(S)
    spectrum_RK = torch.fft.rfft(windowed_RS)
    power_RK = spectrum_RK.abs().square()
    num_bins = power_RK.shape[1]
    boundary = int(4400 / 8000 * num_bins)
    for power_K in power_RK[:3]:
        power_below = power_K[:boundary].sum()
        power_above = power_K[boundary:].sum()
        assert power_above < 1e-5 * power_below


def test_silence_stays_silent():
    silence_RS = torch.zeros(2, S)
    filtered_RS = keep_band(silence_RS)
    assert not filtered_RS.any()
    coded_RS = code(silence_RS, [0, 1])
    assert coded_RS.isfinite().all()
    # A-law has no zero: 8 is its smallest value.
    largest = 12 / 32768
    assert coded_RS.abs().max() <= largest


def test_other_rates_are_resampled_or_refused():
    wave_RS = 0.25 * tones([500], rate=8000)
    coded_RS = code(wave_RS, [0], rate=8000)
    expected_RS = g711(wave_RS, [0])
    assert torch.equal(coded_RS, expected_RS)
    with refuses("augment", 8000, 6000):
        Codec(codec_prob=1, sample_rate=6000)
    with refuses("augment", 8000, 6000):
        Telephone(
            telephone_prob=1,
            num_samples=S,
            sample_rate=6000,
        )
