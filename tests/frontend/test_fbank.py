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


def oracle(wave_S: Tensor, *, window: str, scale: float, **options) -> Tensor:
    """Double precision throughout: torchaudio makes its mel weights in the default type."""
    kaldi = pytest.importorskip("torchaudio.compliance.kaldi")
    with default_dtype(torch.float64):
        return kaldi.fbank(
            scale * wave_S.double()[None],
            num_mel_bins=80,
            dither=0.0,
            window_type=window,
            **options,
        )


def speech_like(num_samples: int, *, seed: int) -> Tensor:
    """A buzz with a moving pitch, louder and softer, over a noise floor 60 dB below it."""
    rng = np.random.default_rng(seed)
    time = np.arange(num_samples) / 16000
    vibrato = 3 * np.sin(2 * np.pi * 1.5 * time)
    phase = 2 * np.pi * (120 * time + vibrato)
    buzz = np.zeros(num_samples)
    for harmonic in range(1, 40):
        buzz += np.cos(harmonic * phase) / harmonic
    loudness = 0.55 + 0.45 * np.sin(2 * np.pi * 3 * time)
    wave = 0.1 * buzz * loudness
    floor = 1e-4 * rng.standard_normal(num_samples)
    return torch.from_numpy(wave + floor).float()


def centred(feats_TF: Tensor) -> Tensor:
    return feats_TF - feats_TF.mean(0)


def energies(fbank: Fbank, wave_BS: Tensor, *, at_once: bool) -> Tensor:
    """Log mel energies, also as a GPU computes them; the mean stays."""
    if not at_once:
        return fbank(wave_BS)
    prepared_BS = fbank._prepared(wave_BS)
    if fbank.is_kaldi:
        prepared_BS = fbank.scale * wave_BS
    frames_BTL = prepared_BS.unfold(1, fbank.frame_length, fbank.frame_shift)
    return fbank._log_mel_at_once(frames_BTL)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("scale", [1.0, 32768.0])
@pytest.mark.parametrize("window", ["povey", "hamming"])
def test_double_precision_equals_kaldi(window, scale, at_once):
    wave_S = speech_like(16123, seed=1)
    fbank = Fbank(window=window, scale=scale, mean_norm=False)
    wave_BS = wave_S.double()[None]
    (ours,) = energies(fbank, wave_BS, at_once=at_once)
    theirs = oracle(wave_S, window=window, scale=scale)
    assert ours.dtype == torch.float64
    assert ours.shape == (99, 80)
    error = (ours - theirs).abs()
    assert error.max() < 1e-9


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("scale", [1.0, 32768.0])
@pytest.mark.parametrize("window", ["povey", "hamming"])
def test_single_precision_is_near_the_truth(window, scale, at_once):
    wave_S = speech_like(48000, seed=2)
    fbank = Fbank(window=window, scale=scale, mean_norm=False)
    (ours,) = energies(fbank, wave_S[None], at_once=at_once)
    theirs = oracle(wave_S, window=window, scale=scale)
    assert ours.dtype == torch.float32
    error = centred(ours) - centred(theirs)
    assert error.abs().max() < 1e-3


def htk_mel(hertz) -> np.ndarray:
    hertz = np.asarray(hertz)
    return 2595 * np.log10(1 + hertz / 700)


def tfmel(wave_S: np.ndarray) -> np.ndarray:
    """Log energies (T, 72) in float64, written from the description of the features."""
    # Normalise, pre-emphasise, and pad by 80 samples (half a frame shift) at each end.
    wave_S = wave_S - wave_S.mean()
    wave_S = wave_S / (wave_S.std() + 1e-8)
    previous_S = np.concatenate([wave_S[1:2], wave_S[:-1]])
    emphasised_S = wave_S - 0.97 * previous_S
    padded_S = np.pad(emphasised_S, 80)

    # Power spectrum of frames of 25 ms every 10 ms.
    frames_NL = np.lib.stride_tricks.sliding_window_view(padded_S, 400)
    frames_TL = frames_NL[::160]
    windowed_TL = frames_TL * np.hamming(400)
    spectrum_TK = np.fft.rfft(windowed_TL, n=512)
    spectrum_TK = spectrum_TK[:, :256]
    power_TK = np.abs(spectrum_TK) ** 2

    # 72 triangles between 74 corners at equal distances in mel.
    hertz_K = 8000 * np.arange(256) / 255
    mel_K = htk_mel(hertz_K)
    lowest, highest = htk_mel([20, 7600])
    corners_M = np.linspace(lowest, highest, 74)
    triangles = []
    for mel_bin in range(72):
        corners_3 = corners_M[mel_bin : mel_bin + 3]
        triangle_K = np.interp(mel_K, corners_3, [0, 1, 0])
        triangles.append(triangle_K)
    weight_KF = np.stack(triangles, 1)

    energy_TF = power_TK.clip(1e-8) @ weight_KF
    energy_TF = energy_TF.clip(1e-8)
    return np.log(energy_TF + 1e-8)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("quiet", [1.0, 0.0])
def test_features_of_redimnet2(at_once, quiet):
    fbank = Fbank(
        kind="tfmel",
        num_mel_bins=72,
        window="hamming",
        high_freq=7600.0,
        mean_norm=False,
    )
    # The features remove a constant.
    wave_S = speech_like(16123, seed=5).double()
    wave_S += 0.1
    wave_S[8000:12000] *= quiet

    (ours,) = energies(fbank, wave_S[None], at_once=at_once)
    assert ours.shape == (100, 72)
    assert fbank.num_frames(16123) == 100
    expected = tfmel(wave_S.numpy())
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-9)

    half_BS = 0.5 * wave_S[None]
    (of_half_the_level,) = energies(fbank, half_BS, at_once=at_once)
    error = of_half_the_level - ours
    assert error.abs().max() < 1e-5

    assert fbank.min_samples == 240
    assert fbank.num_frames(239) == 0
    assert fbank.num_frames(240) == 1


def test_other_rate_bins_and_band_equal_kaldi():
    kaldi = pytest.importorskip("torchaudio.compliance.kaldi")
    wave_S = speech_like(8000, seed=3).double()
    fbank = Fbank(
        sample_rate=8000,
        num_mel_bins=40,
        low_freq=100.0,
        high_freq=-400.0,
        mean_norm=False,
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
    (ours,) = fbank(wave_S[None])
    error = (ours - theirs).abs()
    assert error.max() < 1e-9


@pytest.mark.parametrize("num_samples", [80, 239, 240, 399, 400, 16079, 16080])
def test_frames_over_the_ends_equal_kaldi(num_samples):
    wave_S = speech_like(num_samples, seed=3).double()
    fbank = Fbank(
        high_freq=-400.0,
        snip_edges=False,
        mean_norm=False,
    )
    ours_TF = fbank(wave_S[None])[0]
    assert len(ours_TF) == fbank.num_frames(num_samples)
    assert len(ours_TF) == (num_samples + 80) // 160

    if num_samples >= 400:
        theirs_TF = oracle(
            wave_S,
            window="povey",
            scale=1.0,
            high_freq=-400.0,
            snip_edges=False,
        )
    else:
        # torchaudio's port takes no wave shorter than a frame: reflect the ends here instead.
        reflected_S = np.pad(wave_S.numpy(), (120, 400), mode="symmetric")
        reflected_BS = torch.tensor(reflected_S)[None]
        snipping_fbank = Fbank(high_freq=-400.0, mean_norm=False)
        (theirs_TF,) = snipping_fbank(reflected_BS)
    error_TF = ours_TF - theirs_TF[: len(ours_TF)]
    assert error_TF.abs().max() < 1e-9

    with refuses("fbank", 79, 80):
        fbank(wave_S[None, :79])


@pytest.mark.parametrize("at_once", [False, True])
def test_an_fft_in_float64_makes_up_for_an_offset(at_once):
    wave_BS = speech_like(48000, seed=4)[None] + 0.3
    fbank = Fbank(scale=32768.0, mean_norm=False)
    exact_BTF = energies(fbank, wave_BS.double(), at_once=at_once)
    rough_BTF = energies(fbank, wave_BS, at_once=at_once)
    assert (rough_BTF - exact_BTF).abs().max() > 1e-4

    fbank.fft_in_float64 = True
    ours_BTF = energies(fbank, wave_BS, at_once=at_once)
    assert ours_BTF.dtype == torch.float32
    assert (ours_BTF - exact_BTF).abs().max() < 1e-5


def test_a_batch_equals_its_rows():
    fbank = Fbank()
    waves = [speech_like(20000, seed=seed) for seed in range(11)]
    together_BTF = fbank(torch.stack(waves))
    for wave_S, together_TF in zip(waves, together_BTF, strict=True):
        (alone_TF,) = fbank(wave_S[None])
        error = together_TF - alone_TF
        assert error.abs().max() < 1e-5


def test_a_long_wave_cut_into_tiles_loses_nothing():
    num_frames = 2 * CPU_FRAMES + 98
    num_samples = 160 * (num_frames + 2)
    wave_S = speech_like(num_samples, seed=4).double()
    fbank = Fbank(mean_norm=False)
    (ours,) = fbank(wave_S[None])
    theirs = oracle(wave_S, window="povey", scale=1.0)
    assert ours.shape[0] == num_frames
    error = (ours - theirs).abs()
    assert error.max() < 1e-9


def test_mean_is_removed_from_each_utterance():
    loud_S = speech_like(16000, seed=5)
    faint_S = 0.01 * speech_like(16000, seed=6)
    wave_BS = torch.stack([loud_S, faint_S])
    plain_BTF = Fbank(mean_norm=False)(wave_BS)
    normed_BTF = Fbank()(wave_BS)
    normed_mean_BF = normed_BTF.mean(1)
    assert normed_mean_BF.abs().max() < 1e-5
    mean_B1F = plain_BTF.mean(1, keepdim=True)
    error = normed_BTF - (plain_BTF - mean_B1F)
    assert error.abs().max() < 1e-6


def test_silence_is_the_floor_and_finite():
    silence_BS = torch.zeros(2, 16000)
    log_epsilon = torch.tensor(-15.942385)  # log of float32's epsilon
    plain = Fbank(mean_norm=False)(silence_BS)
    assert torch.allclose(plain, log_epsilon)
    normed = Fbank()(silence_BS)
    assert normed.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("num_samples", "num_frames"),
    [
        (400, 1),
        (559, 1),
        (560, 2),
        (48000, 298),
        (399, 0),
        (0, 0),
    ],
)
def test_number_of_frames(num_samples, num_frames):
    fbank = Fbank()
    assert fbank.num_frames(num_samples) == num_frames
    if num_frames:
        feats_BTF = fbank(torch.rand(3, num_samples))
        assert feats_BTF.shape == (3, num_frames, 80)


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
    dithered = fbank(silence_BS)
    torch.manual_seed(7)
    assert torch.equal(fbank(silence_BS), dithered)
    assert not torch.equal(fbank(silence_BS), dithered)
    undithered = Fbank(mean_norm=False)(silence_BS)
    in_eval_mode = fbank.eval()(silence_BS)
    assert torch.equal(in_eval_mode, undithered)

    # White noise of deviation 1 in the widest band: the gains of mel, pre-emphasis and window.
    mel_KF = fbank.get_buffer("mel_KF")
    mel_K = mel_KF[:, 79].double()
    angle_K = torch.arange(257).double() * torch.pi / 256
    gain_K = 1 + 0.97**2 - 2 * 0.97 * torch.cos(angle_K)
    window_L = fbank.get_buffer("window_L").double()
    window_gain = window_L.square().sum()
    expected = (mel_K * gain_K).sum() * window_gain
    energy_BT = dithered[..., 79].double().exp()
    measured = energy_BT.mean()
    assert abs(measured / expected - 1) < 0.05


def test_autocast_does_not_reach_it():
    wave_BS = speech_like(16000, seed=8)[None]
    plain = Fbank()(wave_BS)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = Fbank()(wave_BS)
    assert torch.equal(under_autocast, plain)
    in_16_bits = Fbank().bfloat16()
    assert torch.equal(in_16_bits(wave_BS), plain)


@pytest.mark.slow
def test_exports_with_any_batch_and_length():
    fbank = Fbank().eval()
    assert fbank.state_dict() == {}
    dynamic = torch.export.Dim.DYNAMIC
    any_size = {0: dynamic, 1: dynamic}
    program = torch.export.export(
        fbank,
        args=(torch.zeros(2, 16000),),
        dynamic_shapes=(any_size,),
    )
    num_samples = 20 * CPU_FRAMES * 160
    wave_S = speech_like(num_samples, seed=9)
    wave_BS = wave_S.reshape(10, -1)
    # Not an FFT, but a matrix product: both are rounded relative to the loudest bin of a frame, and
    # the floor of this wave is 60 dB below it.
    exported = program.module()(wave_BS)
    error = exported - fbank(wave_BS)
    assert error.abs().max() < 1e-3
