"""Encoding and decoding: length, delay, bit rate, band and level."""

import numpy as np
import pytest
from scipy.signal import lfilter

from speakerlab.data import audio
from speakerlab.data.codecs import CODECS, reencode

KINDS = ("mp3:16k", "mp3:32k", "mp3:40k", "opus:6k", "opus:16k", "gsm")


def make_speech(
    num_samples: int, *, rate: int = 16000, peak: float = 12000
) -> np.ndarray:
    """wave_S, int16: noise with the tilt and the syllables of speech, the same at every rate."""
    time_S = np.arange(num_samples) / rate
    rng = np.random.default_rng(0)
    noise_S = rng.standard_normal(num_samples)
    tilted_S = lfilter([1], [1, -0.95], noise_S)
    syllables_S = 0.2 + np.abs(np.sin(7 * time_S))
    wave_S = tilted_S * syllables_S
    gain = peak / np.abs(wave_S).max()
    wave_S = np.rint(wave_S * gain)
    return wave_S.astype(np.int16)


def lag_of(after_S: np.ndarray, before_S: np.ndarray) -> int:
    """Return by how many samples `after_S` is late: the peak of the cross-correlation."""
    # twice the length, so that the circular correlation does not wrap around
    size = 2 * len(after_S)
    after_F = np.fft.rfft(after_S.astype(float), size)
    before_F = np.fft.rfft(before_S.astype(float), size)
    product_F = after_F * before_F.conj()
    correlation_S = np.fft.irfft(product_F)
    peak = int(np.argmax(correlation_S))

    # negative lags are in the second half
    return peak if peak < len(after_S) else peak - size


def share_above(hertz: float, wave_S: np.ndarray) -> float:
    amplitude_F = np.abs(np.fft.rfft(wave_S.astype(float)))
    power_F = amplitude_F**2
    first = int(hertz * len(wave_S) / 16000)
    share = power_F[first:].sum() / power_F.sum()
    return float(share)


def snr_db(after_S: np.ndarray, before_S: np.ndarray) -> float:
    error_S = after_S.astype(float) - before_S
    energy = np.square(before_S.astype(float)).sum()
    error_energy = np.square(error_S).sum()
    return 10 * np.log10(energy / error_energy)


@pytest.mark.parametrize("codec", KINDS)
@pytest.mark.parametrize(
    ("num_samples", "rate"),
    [(16001, 16000), (8000, 8000), (44100, 44100)],
)
def test_the_length_stays_and_nothing_is_delayed(codec, num_samples, rate):
    wave_S = make_speech(num_samples, rate=rate)
    coded_S = reencode(wave_S, codec, sample_rate=rate)
    assert coded_S.dtype == np.int16
    assert len(coded_S) == num_samples
    assert abs(lag_of(coded_S, wave_S)) <= 1
    assert not np.array_equal(coded_S, wave_S)
    again_S = reencode(wave_S, codec, sample_rate=rate)
    assert np.array_equal(coded_S, again_S)


@pytest.mark.parametrize("codec", KINDS)
@pytest.mark.parametrize("num_samples", [1, 400])
def test_short_and_silent_waves_pass(codec, num_samples):
    silence_S = np.zeros(num_samples, np.int16)
    coded_S = reencode(silence_S, codec, sample_rate=16000)
    assert len(coded_S) == num_samples
    # -60 dB
    assert np.abs(coded_S).max() <= 32

    speech_S = make_speech(num_samples)
    coded_S = reencode(speech_S, codec, sample_rate=16000)
    assert len(coded_S) == num_samples


@pytest.mark.parametrize(
    ("codec", "kbps"),
    [
        ("mp3:16k", 16),
        ("mp3:32k", 32),
        ("mp3:64k", 64),
        ("opus:8k", 8),
        ("opus:32k", 32),
        ("gsm", 13.2),
    ],
)
def test_the_bit_rate_is_that_of_the_name(codec, kbps):
    rate, kind, options = CODECS[codec]
    wave_S = make_speech(20 * rate, rate=rate)
    file = audio.encode(wave_S, rate, kind, **options)
    actual_kbps = len(file) * 8 / 20 / 1000
    # Opus chooses frame by frame
    assert actual_kbps == pytest.approx(kbps, rel=0.15)


def test_gsm_leaves_nothing_above_4_khz_and_more_bits_are_closer():
    wave_S = make_speech(32000)
    gsm_S = reencode(wave_S, "gsm", sample_rate=16000)
    share_of_gsm = share_above(4200, gsm_S)
    assert share_above(4200, wave_S) > 100 * share_of_gsm

    for codecs in (
        ("mp3:16k", "mp3:32k", "mp3:96k"),
        ("opus:6k", "opus:16k", "opus:64k"),
    ):
        snrs = []
        for codec in codecs:
            coded_S = reencode(wave_S, codec, sample_rate=16000)
            snrs.append(snr_db(coded_S, wave_S))
        low, middle, high = snrs
        assert low + 3 < middle < high - 3


@pytest.mark.parametrize("codec", KINDS)
def test_what_exceeds_full_scale_is_clipped_not_wrapped(codec):
    time_S = np.arange(16000) / 16000
    sine_S = np.sin(2 * np.pi * 200 * time_S + 0.1)
    square_S = 32767 * np.sign(sine_S)
    square_S = square_S.astype(np.int16)
    coded_S = reencode(square_S, codec, sample_rate=16000)
    has_same_sign_S = np.sign(coded_S) == np.sign(square_S)
    assert np.mean(has_same_sign_S) > 0.95
