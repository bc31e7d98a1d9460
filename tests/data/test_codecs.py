"""Encoding and decoding: length, delay, bit rate, band and level."""

import numpy as np
import pytest
from scipy.signal import lfilter

from speakerlab.data import audio
from speakerlab.data.codecs import CODECS, reencode

KINDS = ("mp3:16k", "mp3:32k", "mp3:40k", "opus:6k", "opus:16k", "gsm")


def make_speech(num_samples: int, *, rate: int = 16000, peak: float = 12000) -> np.ndarray:
    """wave_S, int16: noise with the tilt and the syllables of speech, the same at every rate."""
    time_S = np.arange(num_samples) / rate
    noise_S = np.random.default_rng(0).standard_normal(num_samples)
    wave_S = lfilter([1], [1, -0.95], noise_S) * (0.2 + np.abs(np.sin(7 * time_S)))
    return np.rint(wave_S * (peak / np.abs(wave_S).max())).astype(np.int16)


def lag_of(after_S: np.ndarray, before_S: np.ndarray) -> int:
    """Return by how many samples `after_S` is late: the peak of the cross-correlation."""
    spectra = [np.fft.rfft(wave_S.astype(float), 2 * len(wave_S)) for wave_S in (after_S, before_S)]
    peak = int(np.argmax(np.fft.irfft(spectra[0] * spectra[1].conj())))
    return peak if peak < len(after_S) else peak - 2 * len(after_S)


def share_above(hertz: float, wave_S: np.ndarray) -> float:
    power_F = np.abs(np.fft.rfft(wave_S.astype(float))) ** 2
    return float(power_F[int(hertz * len(wave_S) / 16000) :].sum() / power_F.sum())


def snr_db(after_S: np.ndarray, before_S: np.ndarray) -> float:
    error_S = after_S.astype(float) - before_S
    return 10 * np.log10(np.square(before_S.astype(float)).sum() / np.square(error_S).sum())


@pytest.mark.parametrize("codec", KINDS)
@pytest.mark.parametrize(("num_samples", "rate"), [(16001, 16000), (8000, 8000), (44100, 44100)])
def test_the_length_stays_and_nothing_is_delayed(codec, num_samples, rate):
    wave_S = make_speech(num_samples, rate=rate)
    coded_S = reencode(wave_S, codec, sample_rate=rate)
    assert coded_S.dtype == np.int16 and len(coded_S) == num_samples
    assert abs(lag_of(coded_S, wave_S)) <= 1 and not np.array_equal(coded_S, wave_S)
    assert np.array_equal(coded_S, reencode(wave_S, codec, sample_rate=rate))


@pytest.mark.parametrize("codec", KINDS)
@pytest.mark.parametrize("num_samples", [1, 400])
def test_short_and_silent_waves_pass(codec, num_samples):
    silent_S = reencode(np.zeros(num_samples, np.int16), codec, sample_rate=16000)
    assert len(silent_S) == num_samples and np.abs(silent_S).max() <= 32  # -60 dB
    assert len(reencode(make_speech(num_samples), codec, sample_rate=16000)) == num_samples


@pytest.mark.parametrize(
    ("codec", "kbps"),
    [("mp3:16k", 16), ("mp3:32k", 32), ("mp3:64k", 64), ("opus:8k", 8), ("opus:32k", 32)]
    + [("gsm", 13.2)],
)
def test_the_bit_rate_is_that_of_the_name(codec, kbps):
    rate, kind, options = CODECS[codec]
    file = audio.encode(make_speech(20 * rate, rate=rate), rate, kind, **options)
    assert len(file) * 8 / 20 / 1000 == pytest.approx(kbps, rel=0.15)  # Opus chooses frame by frame


def test_gsm_leaves_nothing_above_4_khz_and_more_bits_are_closer():
    wave_S = make_speech(32000)
    assert share_above(4200, wave_S) > 100 * share_above(
        4200, reencode(wave_S, "gsm", sample_rate=16000)
    )
    for rates in (("mp3:16k", "mp3:32k", "mp3:96k"), ("opus:6k", "opus:16k", "opus:64k")):
        low, middle, high = (
            snr_db(reencode(wave_S, codec, sample_rate=16000), wave_S) for codec in rates
        )
        assert low + 3 < middle < high - 3


@pytest.mark.parametrize("codec", KINDS)
def test_what_exceeds_full_scale_is_clipped_not_wrapped(codec):
    time_S = np.arange(16000) / 16000
    square_S = (32767 * np.sign(np.sin(2 * np.pi * 200 * time_S + 0.1))).astype(np.int16)
    coded_S = reencode(square_S, codec, sample_rate=16000)
    assert np.mean(np.sign(coded_S) == np.sign(square_S)) > 0.95
