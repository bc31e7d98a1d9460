"""The telephone's band on tones, and the codec against libsndfile's."""

import numpy as np
import pytest
import soundfile
import torch

from speakerlab.frontend.channel import Channel, through_g711

S = 16001  # odd on purpose
EVERY_LEVEL = np.arange(-32768, 32768, dtype=np.int16)


def tones(hertz: list[float], *, rate: int = 16000) -> torch.Tensor:
    time = np.arange(S) / rate
    return torch.tensor(np.sin(2 * np.pi * np.array(hertz)[:, None] * time + 0.3)).float()


def gain_db(after_BS: torch.Tensor, before_BS: torch.Tensor) -> list[float]:
    middle = slice(1000, -1000)  # the ends of a tone that begins at once are no tone
    power = after_BS[:, middle].square().mean(1) / before_BS[:, middle].square().mean(1)
    return (10 * power.log10()).tolist()


@pytest.mark.parametrize(("law", "subtype"), [(0, "ULAW"), (1, "ALAW")])
def test_every_sample_is_what_libsndfile_decodes(tmp_path, law, subtype):
    soundfile.write(tmp_path / "x.wav", EVERY_LEVEL, 8000, subtype=subtype)
    theirs = soundfile.read(tmp_path / "x.wav", dtype="int16")[0].astype(np.int64)
    wave_BS = torch.from_numpy(EVERY_LEVEL / 32768).float()[None]
    ours = (through_g711(wave_BS, torch.tensor([law]))[0] * 32768).numpy()
    assert np.array_equal(ours, np.rint(ours))  # integers, of 16 bits
    # Zero itself has two codes; which is taken is a sign's matter.
    assert np.array_equal(ours[EVERY_LEVEL != 0], theirs[EVERY_LEVEL != 0])
    assert len(np.unique(ours)) == 256 - (law == 0)  # mu-law has a zero of either sign


def test_rows_may_have_different_laws():
    wave_BS = torch.from_numpy(EVERY_LEVEL / 32768).float().repeat(2, 1)
    both = through_g711(wave_BS, torch.tensor([1, 0]))
    assert torch.equal(both[:1], through_g711(wave_BS[:1], torch.tensor([1])))
    assert torch.equal(both[1:], through_g711(wave_BS[1:], torch.tensor([0])))
    assert not torch.equal(both[0], both[1])


def test_amplitudes_beyond_full_scale_are_clipped():
    loud = torch.tensor([[2.0, -2.0, 1.0]])
    top = through_g711(loud, torch.tensor([0]))
    assert (top * 32768).tolist() == [[32124.0, -32124.0, 32124.0]]  # the largest of mu-law


@pytest.mark.parametrize("rate", [8000, 16000])
def test_the_band_is_the_telephones(rate):
    channel = Channel(num_samples=S, sample_rate=rate, telephone=True)
    inside = tones([400, 1000, 2500, 3300], rate=rate)
    edges = tones([300, 3400], rate=rate)
    outside = tones([50, 150, 200, 3500, 3800], rate=rate)
    assert all(abs(db) < 0.05 for db in gain_db(channel.keep_band(inside), inside))
    assert all(abs(db + 6) < 0.1 for db in gain_db(channel.keep_band(edges), edges))
    assert max(gain_db(channel.keep_band(outside), outside)) < -50


def test_the_band_does_not_delay():
    channel = Channel(num_samples=S, telephone=True)
    wave_PS = tones([1000, 2000])
    error = (channel.keep_band(wave_PS) - wave_PS)[:, 1000:-1000]
    assert error.abs().max() < 5e-3


def test_the_codec_keeps_what_is_below_4_khz_and_nothing_above():
    channel = Channel(num_samples=S, codec=True)
    wave_CS = 0.25 * tones([500, 2000, 3000, 5000, 7000])
    coded = channel.code(wave_CS, torch.tensor([0, 1, 0, 0, 0]))
    assert coded.shape == wave_CS.shape
    for row in range(3):  # some 38 dB is what G.711 has for a tone
        error = (coded - wave_CS)[row, 1000:-1000].square().mean()
        assert 30 < 10 * float((wave_CS[row].square().mean() / error).log10()) < 45
    assert max(gain_db(coded[3:], wave_CS[3:])) < -50
    spectrum = torch.fft.rfft(coded * torch.hann_window(S)).abs().square()
    above = int(4400 / 8000 * spectrum.shape[1])
    assert (spectrum[:, above:].sum(1) < 1e-5 * spectrum[:, :above].sum(1))[:3].all()


def test_silence_stays_silent():
    channel = Channel(num_samples=S, telephone=True, codec=True)
    zeros = torch.zeros(2, S)
    assert channel.keep_band(zeros).abs().max() == 0
    coded = channel.code(zeros, torch.tensor([0, 1]))
    assert coded.isfinite().all()
    assert coded.abs().max() <= 12 / 32768  # A-law has no zero: 8 is its smallest value


def test_other_rates_are_resampled_or_refused():
    wave_CS = 0.25 * tones([500], rate=8000)
    assert (
        Channel(num_samples=S, sample_rate=8000, codec=True)
        .code(wave_CS, torch.tensor([0]))
        .equal(through_g711(wave_CS, torch.tensor([0])))
    )
    Channel(num_samples=S, sample_rate=6000)  # asked for nothing
    with pytest.raises(ValueError, match="augment: a telephone has 8000 Hz, got crops of 6000 Hz"):
        Channel(num_samples=S, sample_rate=6000, codec=True)
