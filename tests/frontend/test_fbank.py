"""Fbank against torchaudio's Kaldi port in double precision, and what a batch must keep."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from refusals import refuses
from torch import Tensor

from speakerlab.frontend.fbank import CPU_FRAMES, Fbank


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def oracle(wave_S: Tensor, *, window: str, scale: float, **more) -> Tensor:
    """Double precision throughout: torchaudio makes its mel weights in the default type."""
    kaldi = pytest.importorskip("torchaudio.compliance.kaldi")
    with default_dtype(torch.float64):
        return kaldi.fbank(
            scale * wave_S.double()[None], num_mel_bins=80, dither=0.0, window_type=window, **more
        )


def speech_like(num_samples: int, *, seed: int) -> Tensor:
    """A buzz with a moving pitch, louder and softer, over a noise floor 60 dB below it."""
    rng = np.random.default_rng(seed)
    time = np.arange(num_samples) / 16000
    phase = 2 * np.pi * (120 * time + 3 * np.sin(2 * np.pi * 1.5 * time))
    buzz = sum(np.cos(h * phase) / h for h in range(1, 40))
    wave = 0.1 * buzz * (0.55 + 0.45 * np.sin(2 * np.pi * 3 * time))
    return torch.from_numpy(wave + 1e-4 * rng.standard_normal(num_samples)).float()


def centred(feats_TF: Tensor) -> Tensor:
    return feats_TF - feats_TF.mean(0)


def energies(fbank: Fbank, wave_BS: Tensor, *, at_once: bool) -> Tensor:
    """Log mel energies, also as a GPU computes them; the mean stays."""
    if not at_once:
        return fbank(wave_BS)
    wave_BS = fbank.scale * wave_BS if fbank.is_kaldi else fbank._prepared(wave_BS)
    frames_BTL = wave_BS.unfold(1, fbank.frame_length, fbank.frame_shift)
    return fbank._log_mel_at_once(frames_BTL)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("scale", [1.0, 32768.0])
@pytest.mark.parametrize("window", ["povey", "hamming"])
def test_double_precision_equals_kaldi(window, scale, at_once):
    wave_S = speech_like(16123, seed=1)
    fbank = Fbank(window=window, scale=scale, mean_norm=False)
    ours = energies(fbank, wave_S.double()[None], at_once=at_once)[0]
    theirs = oracle(wave_S, window=window, scale=scale)
    assert ours.dtype == torch.float64 and ours.shape == (99, 80)
    assert (ours - theirs).abs().max() < 1e-9


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("scale", [1.0, 32768.0])
@pytest.mark.parametrize("window", ["povey", "hamming"])
def test_single_precision_is_near_the_truth(window, scale, at_once):
    wave_S = speech_like(48000, seed=2)
    fbank = Fbank(window=window, scale=scale, mean_norm=False)
    ours = energies(fbank, wave_S[None], at_once=at_once)[0]
    assert ours.dtype == torch.float32
    truth = centred(oracle(wave_S, window=window, scale=scale))
    assert (centred(ours) - truth).abs().max() < 1e-3


def htk_mel(hertz) -> np.ndarray:
    return 2595 * np.log10(1 + np.asarray(hertz) / 700)


def tfmel(wave_S: np.ndarray) -> np.ndarray:
    """Log energies (T, 72) in float64, written from the description of the features."""
    wave_S = (wave_S - wave_S.mean()) / (wave_S.std() + 1e-8)
    wave_S = np.pad(wave_S - 0.97 * np.concatenate([wave_S[1:2], wave_S[:-1]]), 80)
    frames_TL = np.lib.stride_tricks.sliding_window_view(wave_S, 400)[::160]
    power_TK = np.abs(np.fft.rfft(frames_TL * np.hamming(400), 512)[:, :256]) ** 2
    mel_K, corners_M = (
        htk_mel(8000 * np.arange(256) / 255),
        np.linspace(htk_mel(20), htk_mel(7600), 74),
    )
    weight_KF = np.stack([np.interp(mel_K, corners_M[i : i + 3], [0, 1, 0]) for i in range(72)], 1)
    return np.log((power_TK.clip(1e-8) @ weight_KF).clip(1e-8) + 1e-8)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("quiet", [1.0, 0.0])
def test_features_of_redimnet2(at_once, quiet):
    fbank = Fbank(
        kind="tfmel", num_mel_bins=72, window="hamming", high_freq=7600.0, mean_norm=False
    )
    wave_S = speech_like(16123, seed=5).double() + 0.1  # a constant is removed
    wave_S[8000:12000] *= quiet
    ours = energies(fbank, wave_S[None], at_once=at_once)[0]
    assert ours.shape == (fbank.num_frames(16123), 72) == (100, 72)
    np.testing.assert_allclose(ours.numpy(), tfmel(wave_S.numpy()), rtol=0, atol=1e-9)
    assert (energies(fbank, 0.5 * wave_S[None], at_once=at_once)[0] - ours).abs().max() < 1e-5
    assert (fbank.min_samples, fbank.num_frames(239), fbank.num_frames(240)) == (240, 0, 1)


def test_other_rate_bins_and_band_equal_kaldi():
    kaldi = pytest.importorskip("torchaudio.compliance.kaldi")
    wave_S = speech_like(8000, seed=3).double()
    fbank = Fbank(
        sample_rate=8000, num_mel_bins=40, low_freq=100.0, high_freq=-400.0, mean_norm=False
    )
    with default_dtype(torch.float64):
        theirs = kaldi.fbank(
            wave_S[None],
            sample_frequency=8000.0,
            num_mel_bins=40,
            low_freq=100.0,
            high_freq=-400.0,
            dither=0.0,
        )
    assert (fbank(wave_S[None])[0] - theirs).abs().max() < 1e-9


@pytest.mark.parametrize("num_samples", [80, 239, 240, 399, 400, 16079, 16080])
def test_frames_over_the_ends_equal_kaldi(num_samples):
    wave_S = speech_like(num_samples, seed=3).double()
    fbank = Fbank(high_freq=-400.0, snip_edges=False, mean_norm=False)
    ours_TF = fbank(wave_S[None])[0]
    assert len(ours_TF) == fbank.num_frames(num_samples) == (num_samples + 80) // 160
    if num_samples >= 400:
        more = {"high_freq": -400.0, "snip_edges": False}
        theirs_TF = oracle(wave_S, window="povey", scale=1.0, **more)
    else:  # torchaudio's port takes none shorter than a frame
        reflected_S = np.pad(wave_S.numpy(), (120, 400), mode="symmetric")
        theirs_TF = Fbank(high_freq=-400.0, mean_norm=False)(torch.tensor(reflected_S)[None])[0]
    assert (ours_TF - theirs_TF[: len(ours_TF)]).abs().max() < 1e-9
    with refuses("fbank", 79, 80):
        fbank(wave_S[None, :79])


def test_a_batch_equals_its_rows():
    fbank = Fbank()
    wave_BS = torch.stack([speech_like(20000, seed=seed) for seed in range(11)])
    singly = torch.cat([fbank(wave_BS[i : i + 1]) for i in range(11)])
    assert (fbank(wave_BS) - singly).abs().max() < 1e-5


def test_a_long_wave_cut_into_tiles_loses_nothing():
    wave_S = speech_like(160 * (2 * CPU_FRAMES + 100), seed=4).double()
    ours = Fbank(mean_norm=False)(wave_S[None])[0]
    assert ours.shape[0] == 2 * CPU_FRAMES + 98
    assert (ours - oracle(wave_S, window="povey", scale=1.0)).abs().max() < 1e-9


def test_mean_is_removed_from_each_utterance():
    wave_BS = torch.stack([speech_like(16000, seed=5), 0.01 * speech_like(16000, seed=6)])
    plain = Fbank(mean_norm=False)(wave_BS)
    normed = Fbank()(wave_BS)
    assert normed.mean(1).abs().max() < 1e-5
    assert (normed - (plain - plain.mean(1, keepdim=True))).abs().max() < 1e-6


def test_silence_is_the_floor_and_finite():
    feats = Fbank(mean_norm=False)(torch.zeros(2, 16000))
    assert torch.allclose(feats, torch.tensor(-15.942385))  # log of float32's epsilon
    assert Fbank()(torch.zeros(2, 16000)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("num_samples", "num_frames"), [(400, 1), (559, 1), (560, 2), (48000, 298), (399, 0), (0, 0)]
)
def test_number_of_frames(num_samples, num_frames):
    fbank = Fbank()
    assert fbank.num_frames(num_samples) == num_frames
    if num_frames:
        assert fbank(torch.rand(3, num_samples)).shape == (3, num_frames, 80)


def test_shorter_than_a_frame_is_refused_in_one_line():
    assert Fbank().min_samples == 400
    with refuses("fbank", 400, 399):
        Fbank()(torch.zeros(1, 399))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"low_freq": 9000.0}, "9000 to 8000 Hz"),
        ({"high_freq": 8001.0}, "20 to 8001 Hz"),
        ({"frame_shift_ms": 0.01}, "25 ms every 0.01 ms"),
        ({"kind": "tfmel", "snip_edges": False}, "tfmel"),
        ({"num_mel_bins": 0}, "num_mel_bins must be 1 to 256, got 0"),
        ({"num_mel_bins": 300}, "num_mel_bins must be 1 to 256, got 300"),
    ],
)
def test_impossible_settings_are_refused(args, message):
    with refuses("fbank", message):
        Fbank(**args)


def test_dither_is_for_training_and_follows_the_default_generator():
    fbank = Fbank(scale=32768.0, dither=1.0, mean_norm=False)
    silence_BS = torch.zeros(4, 48000)
    torch.manual_seed(7)
    first = fbank(silence_BS)
    torch.manual_seed(7)
    assert torch.equal(fbank(silence_BS), first)
    assert not torch.equal(fbank(silence_BS), first)
    assert torch.equal(fbank.eval()(silence_BS), Fbank(mean_norm=False)(silence_BS))
    # White noise of deviation 1 in the widest band: the gains of mel, pre-emphasis and window.
    mel_K = fbank.get_buffer("mel_KF")[:, 79].double()
    gain_K = 1 + 0.97**2 - 2 * 0.97 * torch.cos(torch.arange(257).double() * torch.pi / 256)
    expected = (mel_K * gain_K).sum() * fbank.get_buffer("window_L").double().square().sum()
    assert abs(first[..., 79].double().exp().mean() / expected - 1) < 0.05


def test_autocast_does_not_reach_it():
    wave_BS = speech_like(16000, seed=8)[None]
    plain = Fbank()(wave_BS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(Fbank()(wave_BS), plain)
    assert torch.equal(Fbank().bfloat16()(wave_BS), plain)


def test_exports_with_any_batch_and_length():
    fbank = Fbank().eval()
    assert fbank.state_dict() == {}
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(fbank, (torch.zeros(2, 16000),), dynamic_shapes=(free,))
    wave_BS = speech_like(20 * CPU_FRAMES * 160, seed=9).reshape(10, -1)
    # Not an FFT, but a matrix product: both are rounded relative to the loudest bin of a frame, and
    # the floor of this wave is 60 dB below it.
    assert (program.module()(wave_BS) - fbank(wave_BS)).abs().max() < 1e-3
