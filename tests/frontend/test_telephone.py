"""The telephone's band and codec on tones, and the codec against libsndfile's."""

import numpy as np
import pytest
import soundfile
import torch
from batches import codec_draw, make_batch
from refusals import refuses

from speakerlab.core.batch import Draws
from speakerlab.frontend.augment.codec import LOWEST_OCTAVES, OFFSETS, Codec, through_g711
from speakerlab.frontend.augment.telephone import Telephone

S = 16001  # odd on purpose
EVERY_LEVEL = np.arange(-32768, 32768, dtype=np.int16)


def keep_band(wave_RS: torch.Tensor, *, rate: int = 16000) -> torch.Tensor:
    telephone = Telephone(telephone_prob=1, num_samples=S, sample_rate=rate)
    return telephone.apply(wave_RS, Draws(torch.arange(len(wave_RS)), {}))


def code(wave_RS: torch.Tensor, law_R: list[int], *, rate: int = 16000) -> torch.Tensor:
    named = {row: {"codec": codec_draw(law)} for row, law in enumerate(law_R)}
    (draws,) = make_batch(np.zeros((len(law_R), 1), np.int16), named).draws["codec"]
    return Codec(codec_prob=1, sample_rate=rate).apply(wave_RS, draws)


def g711(wave_RS: torch.Tensor, law_R: list[int]) -> torch.Tensor:
    offset_R1, lowest_R1 = (torch.tensor(of)[law_R, None] for of in (OFFSETS, LOWEST_OCTAVES))
    return through_g711(wave_RS, offset_R1, lowest_R1)


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
    ours = (g711(wave_BS, [law])[0] * 32768).numpy()
    assert np.array_equal(ours, np.rint(ours))  # integers, of 16 bits
    # Zero itself has two codes; which is taken is a sign's matter.
    assert np.array_equal(ours[EVERY_LEVEL != 0], theirs[EVERY_LEVEL != 0])
    assert len(np.unique(ours)) == 256 - (law == 0)  # mu-law has a zero of either sign


def test_rows_may_have_different_laws():
    wave_BS = torch.from_numpy(EVERY_LEVEL / 32768).float().repeat(2, 1)
    both = g711(wave_BS, [1, 0])
    assert torch.equal(both[:1], g711(wave_BS[:1], [1]))
    assert torch.equal(both[1:], g711(wave_BS[1:], [0]))
    assert not torch.equal(both[0], both[1])


def test_amplitudes_beyond_full_scale_are_clipped():
    loud = torch.tensor([[2.0, -2.0, 1.0]])
    top = g711(loud, [0])
    assert (top * 32768).tolist() == [[32124.0, -32124.0, 32124.0]]  # the largest of mu-law


@pytest.mark.parametrize("rate", [8000, 16000])
def test_the_band_is_the_telephones(rate):
    inside = tones([400, 1000, 2500, 3300], rate=rate)
    edges = tones([300, 3400], rate=rate)
    outside = tones([50, 150, 200, 3500, 3800], rate=rate)
    assert all(abs(db) < 0.05 for db in gain_db(keep_band(inside, rate=rate), inside))
    assert all(abs(db + 6) < 0.1 for db in gain_db(keep_band(edges, rate=rate), edges))
    assert max(gain_db(keep_band(outside, rate=rate), outside)) < -50


def test_the_band_does_not_delay():
    wave_RS = tones([1000, 2000])
    error = (keep_band(wave_RS) - wave_RS)[:, 1000:-1000]
    assert error.abs().max() < 5e-3


def test_the_codec_keeps_what_is_below_4_khz_and_nothing_above():
    wave_RS = 0.25 * tones([500, 2000, 3000, 5000, 7000])
    coded = code(wave_RS, [0, 1, 0, 0, 0])
    assert coded.shape == wave_RS.shape
    for row in range(3):  # some 38 dB is what G.711 has for a tone
        error = (coded - wave_RS)[row, 1000:-1000].square().mean()
        assert 30 < 10 * float((wave_RS[row].square().mean() / error).log10()) < 45
    assert max(gain_db(coded[3:], wave_RS[3:])) < -50
    spectrum = torch.fft.rfft(coded * torch.hann_window(S)).abs().square()
    above = int(4400 / 8000 * spectrum.shape[1])
    assert (spectrum[:, above:].sum(1) < 1e-5 * spectrum[:, :above].sum(1))[:3].all()


def test_silence_stays_silent():
    assert keep_band(torch.zeros(2, S)).abs().max() == 0
    coded = code(torch.zeros(2, S), [0, 1])
    assert coded.isfinite().all()
    assert coded.abs().max() <= 12 / 32768  # A-law has no zero: 8 is its smallest value


def test_other_rates_are_resampled_or_refused():
    wave_RS = 0.25 * tones([500], rate=8000)
    assert code(wave_RS, [0], rate=8000).equal(g711(wave_RS, [0]))
    with refuses("augment", 8000, 6000):
        Codec(codec_prob=1, sample_rate=6000)
    with refuses("augment", 8000, 6000):
        Telephone(telephone_prob=1, num_samples=S, sample_rate=6000)
