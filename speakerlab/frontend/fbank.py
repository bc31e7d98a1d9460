"""Log mel filter-bank energies as Kaldi computes them, for a whole batch at once.

In: wave_BS, float32 in [-1, 1].
Out: feats_BTF, float32, by default with each utterance's mean removed.
Letters: B rows of the batch, S samples, T frames, L samples of a frame, K bins of the power
spectrum, C = 2K real and imaginary parts in turn, F mel bins.

The computation and its order are those of `compute-fbank-feats` (Povey et al., "The Kaldi speech
recognition toolkit", ASRU 2011), or those of WeSpeaker's front end `tfmel`, which ReDimNet2 takes
(github.com/PalabraAI/redimnet2, layers/features_tf.py): it scales each wave to mean 0 and variance
1, pre-emphasises it as a whole, pads it by half a shift on both sides, keeps the DC of a frame, and
takes the last bin but one for the Nyquist frequency.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import fp32_island

Kind = Literal["kaldi", "tfmel"]
Window = Literal["povey", "hamming"]

LOG_FLOOR = torch.finfo(torch.float32).eps  # Kaldi's floor, also in float64
TINY = 1e-8  # the floor of tfmel's energies, and what it adds to them and to the deviation
# Frames at a time on a CPU: more fall out of a core's cache and take up to 5x as long.
CPU_FRAMES = 1200
MAX_RATE, MAX_FRAME = 1_000_000, 1 << 15  # Hz, samples: more is a mistake
BANDS = 2  # parts of the mel bins on a CPU; the spectrum of each is narrower than the whole


def mel(hertz: Tensor) -> Tensor:
    """Return frequencies in Hz on Kaldi's mel scale."""
    return 1127.0 * torch.log1p(hertz / 700.0)


def mel_matrix(
    num_mel_bins: int,
    *,
    num_fft: int,
    sample_rate: int,
    low_freq: float,
    high_freq: float,
    nyquist_bin: int,
) -> Tensor:
    """Return weights (K, F) in float64: triangles in mel, K = num_fft / 2 + 1.

    nyquist_bin: the bin that is taken for the Nyquist frequency, num_fft / 2 in Kaldi.
    The triangles share their corners: each begins at the peak of the one before. The bin at the
    Nyquist frequency has no weight, as in Kaldi. Raises ValueError for an impossible band or
    number, and where a triangle is too narrow to contain any bin.
    """
    if not 1 <= num_mel_bins <= num_fft // 2:
        raise ValueError(f"fbank: num_mel_bins must be 1 to {num_fft // 2}, got {num_mel_bins}")
    if not 0 <= low_freq < high_freq <= sample_rate / 2:
        raise ValueError(
            f"fbank: the band {low_freq:g} to {high_freq:g} Hz is not within 0 to "
            f"{sample_rate / 2:g} Hz; change low_freq or high_freq"
        )
    ends = mel(torch.tensor([low_freq, high_freq], dtype=torch.float64))
    step = (ends[1] - ends[0]) / (num_mel_bins + 1)
    left_F = ends[0] + step * torch.arange(num_mel_bins, dtype=torch.float64)
    hertz_K = torch.arange(num_fft // 2, dtype=torch.float64) * (sample_rate / 2 / nyquist_bin)
    rise_KF = (mel(hertz_K)[:, None] - left_F) / step
    weight_KF = torch.minimum(rise_KF, 2.0 - rise_KF).clamp_min(0.0)
    if not weight_KF.any(0).all():
        raise ValueError(f"fbank: some of {num_mel_bins} mel bins are empty; use fewer")
    return F.pad(weight_KF, (0, 0, 0, 1))


def frame_window(window: Window, *, length: int) -> Tensor:
    """Return a window (L,) in float64; Kaldi's "povey" is a Hann window raised to 0.85."""
    make, power = {"hamming": (torch.hamming_window, 1), "povey": (torch.hann_window, 0.85)}[window]
    return make(length, periodic=False, dtype=torch.float64).pow(power)


def mel_bands(mel_KF: Tensor) -> list[tuple[slice, slice]]:
    """Return (bins of the spectrum, mel bins) of each part; its other weights are zero."""
    bands = []
    for part_F in torch.arange(mel_KF.shape[1]).chunk(BANDS):
        mels = slice(int(part_F[0]), int(part_F[-1]) + 1)
        bins = mel_KF[:, mels].any(1).nonzero()
        bands.append((slice(int(bins[0]), int(bins[-1]) + 1), mels))
    return bands


def dft_matrix(*, length: int, num_fft: int) -> Tensor:
    """Return (L, C) in float64: a frame times it is its spectrum.

    The angle is taken modulo a turn in integers, so that every entry is exact to rounding.
    """
    turns_LK = torch.arange(length)[:, None] * torch.arange(num_fft // 2 + 1) % num_fft
    angle_LK = turns_LK.double() * (2 * torch.pi / num_fft)
    return torch.stack([angle_LK.cos(), -angle_LK.sin()], dim=2).flatten(1)


class Fbank(nn.Module):
    """Log mel filter bank of Kaldi, or of `tfmel`; the same in training, extraction and export."""

    def __init__(
        self,
        *,
        kind: Kind = "kaldi",
        sample_rate: int = 16000,
        num_mel_bins: int = 80,
        frame_length_ms: float = 25.0,
        frame_shift_ms: float = 10.0,
        window: Window = "povey",
        scale: float = 1.0,
        dither: float = 0.0,
        preemphasis: float = 0.97,
        low_freq: float = 20.0,
        high_freq: float = 0.0,
        mean_norm: bool = True,
        snip_edges: bool = True,
    ) -> None:
        """Multiply the wave by `scale` first: 1.0 for [-1, 1], 32768 for Kaldi's 16-bit range.

        `dither` is the deviation of the noise added, after `scale`, in train mode only; the noise
        is one stream over the wave, where Kaldi draws it for each of the overlapping frames.
        `high_freq` at or below zero counts from the Nyquist frequency. With `snip_edges: false`,
        for the kind "kaldi" only, there are S / shift frames, rounded, over the wave reflected at
        both ends.
        """
        super().__init__()
        if not 1 <= sample_rate <= MAX_RATE:
            raise ValueError(f"fbank: sample_rate must be 1 to {MAX_RATE} Hz, got {sample_rate}")
        self.frame_length = int(sample_rate * frame_length_ms / 1000)
        self.frame_shift = int(sample_rate * frame_shift_ms / 1000)
        self.is_kaldi = kind == "kaldi"
        self.snip_edges = snip_edges
        if not (self.is_kaldi or snip_edges):
            raise ValueError("fbank: snip_edges must be true for tfmel, which pads the wave itself")
        self.padding = 0 if self.is_kaldi else self.frame_shift // 2  # samples on both sides
        self.min_samples = self.frame_length - 2 * self.padding
        if not snip_edges:
            self.min_samples = self.frame_shift - self.frame_shift // 2
        if not (1 < self.frame_length <= MAX_FRAME and self.min_samples > 1 and self.frame_shift):
            raise ValueError(
                f"fbank: frames of {frame_length_ms:g} ms every {frame_shift_ms:g} ms are too "
                "short or too long; change frame_length_ms or frame_shift_ms"
            )
        self.num_fft = 1 << (self.frame_length - 1).bit_length()
        self.sample_rate, self.num_mel_bins = sample_rate, num_mel_bins
        self.scale, self.dither, self.preemphasis = scale, dither, preemphasis
        self.mean_norm = mean_norm
        window_L = frame_window(window, length=self.frame_length)
        mel_KF = mel_matrix(
            num_mel_bins,
            num_fft=self.num_fft,
            sample_rate=sample_rate,
            low_freq=low_freq,
            high_freq=high_freq if high_freq > 0 else sample_rate / 2 + high_freq,
            nyquist_bin=self.num_fft // 2 - (not self.is_kaldi),
        )
        self.bands = mel_bands(mel_KF)
        # Factor of the sample before; the first has none. tfmel has pre-emphasised the wave.
        before_L = -preemphasis * self.is_kaldi * window_L
        here_L = torch.cat([window_L[:1] + before_L[:1], window_L[1:]])
        self.in_full_precision = {
            "window_L": window_L,
            "mel_KF": mel_KF,
            "here_L": here_L,
            "before_L": before_L,
            "dft_LC": dft_matrix(length=self.frame_length, num_fft=self.num_fft),
            "mel_CF": mel_KF.repeat_interleave(2, 0),
        }
        for name, value in self.in_full_precision.items():
            self.register_buffer(name, value.float(), persistent=False)

    def num_frames(self, num_samples: int) -> int:
        """Return the frames of `num_samples`: only those that fit completely."""
        return max(0, 1 + (num_samples - self.min_samples) // self.frame_shift)

    def forward(self, wave_BS: Tensor) -> Tensor:
        """Return features (B, T, F) of waves (B, S): float64 for float64 waves, else float32."""
        if wave_BS.shape[-1] < self.min_samples:
            raise ValueError(
                f"fbank: {wave_BS.shape[-1]} samples are less than one frame of "
                f"{self.min_samples}; give a longer recording"
            )
        with fp32_island(wave_BS):
            wave_BS = wave_BS if wave_BS.dtype == torch.float64 else wave_BS.float()
            if self.scale != 1.0:
                wave_BS = wave_BS * self.scale
            if self.training and self.dither > 0:
                wave_BS = wave_BS + self.dither * torch.randn_like(wave_BS)
            if not self.is_kaldi:
                wave_BS = self._prepared(wave_BS)
            if not self.snip_edges:
                wave_BS = self._reflected(wave_BS)
            frames_BTL = wave_BS.unfold(1, self.frame_length, self.frame_shift)
            if torch.compiler.is_compiling() or frames_BTL.device.type != "cpu":
                return self.normalise(self._log_mel_at_once(frames_BTL))
            # On a CPU rows, or parts of long ones, in turn.
            num_rows, num_frames, _ = frames_BTL.shape
            feats_BTF = frames_BTL.new_empty(num_rows, num_frames, self.num_mel_bins)
            rows = max(1, CPU_FRAMES // num_frames)
            for row in range(0, num_rows, rows):
                for frame in range(0, num_frames, CPU_FRAMES):
                    tile = slice(row, row + rows), slice(frame, frame + CPU_FRAMES)
                    feats_BTF[tile] = self._log_mel(frames_BTL[tile])
            return self.normalise(feats_BTF)

    def normalise(self, feats_BTF: Tensor) -> Tensor:
        """Subtract the mean over the frames in place, if `mean_norm`."""
        return feats_BTF.sub_(feats_BTF.mean(1, keepdim=True)) if self.mean_norm else feats_BTF

    def _prepared(self, wave_BS: Tensor) -> Tensor:
        """Return waves normalised, pre-emphasised and padded as `tfmel` does."""
        std_B1, mean_B1 = torch.std_mean(wave_BS, dim=1, correction=0, keepdim=True)
        wave_BS = (wave_BS - mean_B1) / (std_B1 + TINY)
        before_BS = torch.cat([wave_BS[:, 1:2], wave_BS[:, :-1]], dim=1)  # reflected at the start
        return F.pad(wave_BS - self.preemphasis * before_BS, (self.padding, self.padding))

    def _reflected(self, wave_BS: Tensor) -> Tensor:
        """Return waves with the samples before and after them that Kaldi's frames have."""
        num_samples, left = wave_BS.shape[1], self.frame_length // 2 - self.frame_shift // 2
        end = num_samples + self.frame_length - left - self.min_samples
        index = torch.arange(-left, end, device=wave_BS.device)
        index %= torch.full_like(index, 2 * num_samples)  # ONNX takes no symbolic scalar here
        return wave_BS.index_select(1, torch.minimum(index, 2 * num_samples - 1 - index))

    def _log(self, mel_BTF: Tensor) -> Tensor:
        """Return the logarithm of energies, which it changes."""
        if self.is_kaldi:
            return mel_BTF.clamp_min_(LOG_FLOOR).log_()
        return mel_BTF.clamp_(TINY, 1 / TINY).add_(TINY).log_()

    def _constant(self, name: str, like: Tensor) -> Tensor:
        """Return a buffer; its exact values where it is of another precision than `like`."""
        found = self.get_buffer(name)
        return found if found.dtype == like.dtype else self.in_full_precision[name].to(like)

    def _log_mel(self, frames_BTL: Tensor) -> Tensor:
        """Return energies (B, T, F): remove DC, pre-emphasis, window, power, mel, log."""
        window_L, mel_KF = (self._constant(name, frames_BTL) for name in ("window_L", "mel_KF"))
        # In place, in the memory that the FFT needs: the speed is that of memory, not of sums.
        padded_BTN = frames_BTL.new_empty(*frames_BTL.shape[:2], self.num_fft)
        padded_BTN[..., self.frame_length :] = 0
        inside_BTL = padded_BTN[..., : self.frame_length]
        inside_BTL.copy_(frames_BTL)
        if self.is_kaldi:
            inside_BTL.sub_(frames_BTL.mean(2, keepdim=True))
            before_BTL = self.preemphasis * inside_BTL
            inside_BTL[..., 1:].sub_(before_BTL[..., :-1])
            inside_BTL[..., :1].sub_(before_BTL[..., :1])
        inside_BTL.mul_(window_L)
        spectrum_BTK = torch.fft.rfft(padded_BTN, n=self.num_fft)
        squares_BTK2 = torch.view_as_real(spectrum_BTK).square_()
        power_BTK = squares_BTK2[..., 0] + squares_BTK2[..., 1]
        if not self.is_kaldi:
            power_BTK.clamp_(TINY, 1 / TINY)
        parts = []
        for bins, mels in self.bands:  # without the products with most of the zeros
            parts.append(power_BTK[..., bins] @ mel_KF[bins, mels])
        return self._log(torch.cat(parts, dim=2))

    def _log_mel_at_once(self, frames_BTL: Tensor) -> Tensor:
        """Return the same, as accurately, by few operations: for GPUs and exported models.

        The latter multiply by a matrix, because few runtimes have the FFT.
        """
        if self.is_kaldi:
            frames_BTL = frames_BTL - frames_BTL.mean(2, keepdim=True)
        before_BTL = F.pad(frames_BTL[..., :-1], (1, 0))
        here_L, before_L = (self._constant(name, frames_BTL) for name in ("here_L", "before_L"))
        windowed_BTL = torch.addcmul(frames_BTL * here_L, before_BTL, before_L)
        if torch.compiler.is_compiling():  # true while exporting, too
            squares_BTC = (windowed_BTL @ self._constant("dft_LC", frames_BTL)).square()
        else:
            spectrum_BTK = torch.fft.rfft(windowed_BTL, n=self.num_fft)
            squares_BTC = torch.view_as_real(spectrum_BTK).flatten(2).square()
        if self.is_kaldi:
            return self._log(squares_BTC @ self._constant("mel_CF", frames_BTL))
        power_BTK = squares_BTC.unflatten(2, (-1, 2)).sum(3).clamp(TINY, 1 / TINY)
        return self._log(power_BTK @ self._constant("mel_KF", frames_BTL))
