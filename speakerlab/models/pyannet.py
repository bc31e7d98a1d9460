"""PyanNet: which of up to three local speakers speak, frame by frame, from the waveform.

In: feats_BT1, the samples of the front end `wave` at 16 kHz. Out: log_prob_BFC, log-probabilities
of the sets of speakers (losses/powerset.py). Four stages: band-pass filters whose two cutoff
frequencies are learned, two convolutions with pooling, a bidirectional LSTM, linear layers.

H. Bredin and A. Laurent, "End-to-end speaker segmentation for overlap-aware resegmentation",
Interspeech 2021, arXiv 2104.04045; with the powerset output A. Plaquet and H. Bredin, "Powerset
multi-class cross entropy loss for neural speaker diarization", Interspeech 2023, arXiv 2310.13025.
Band-pass filters: M. Ravanelli and Y. Bengio, "Speaker recognition from raw waveform with SincNet",
SLT 2018, arXiv 1808.00158; their odd halves: M. Pariente et al., "Filterbank design for end-to-end
speech separation", ICASSP 2020, arXiv 1910.10400.
Names and shapes are those of pyannote/segmentation-3.0, without the constants of its filters.
Letters: B rows of the batch, T samples, F output frames, C sets of speakers, K filters, L samples
of a filter, H those before its middle.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speakerlab.core.full_precision import autocast_off, widened
from speakerlab.core.powerset import NUM_SETS

SAMPLE_RATE = 16000  # of the filters
# Kernels and strides of the convolutions and poolings, in turn.
KERNELS = (251, 3, 5, 3, 5, 3)
STRIDES = (10, 3, 1, 3, 1, 3)
# The lowest cutoff and the narrowest band that a filter can learn, in Hz.
MIN_HZ = 50.0


def grid(kernels: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the samples from a frame to the next, and those that a frame depends on."""
    hop = 1
    field = 1
    for kernel, stride in zip(kernels, strides):
        field += (kernel - 1) * hop
        hop *= stride
    return hop, field


class BandPass(nn.Module):
    """Filters given by two cutoff frequencies, a cosine and a sine for each band.

    Parameters in Hz: low_hz_ (K / 2, 1), and band_hz_, the widths.
    """

    window_: Tensor
    n_: Tensor

    def __init__(self, *, num_filters: int, length: int) -> None:
        super().__init__()
        # At first, the bands lie side by side, equally wide on the mel scale.
        highest_hz = SAMPLE_RATE / 2 - 2 * MIN_HZ
        end_hz = torch.tensor([30.0, highest_hz])
        lowest_mel, highest_mel = 2595 * torch.log10(1 + end_hz / 700)
        num_edges = num_filters // 2 + 1
        share = torch.linspace(0, 1, num_edges)
        edge_mel = lowest_mel + share * (highest_mel - lowest_mel)
        edge_hz = 700 * (10 ** (edge_mel / 2595) - 1)
        low_hz = edge_hz[:-1]
        band_hz = edge_hz.diff()
        self.low_hz_ = nn.Parameter(low_hz[:, None].clone())
        self.band_hz_ = nn.Parameter(band_hz[:, None])

        # A filter is symmetric around its middle: the half before it is computed.
        half = length // 2
        window_L = torch.hamming_window(length, periodic=False, dtype=torch.float64)
        window_H = window_L[:half].float()
        time_H = torch.arange(-half, 0.0) / SAMPLE_RATE
        radian_H = 2 * torch.pi * time_H
        self.register_buffer("window_", window_H, persistent=False)
        self.register_buffer("n_", radian_H, persistent=False)

    def forward(self) -> Tensor:
        """Return the filters, (K, 1, L)."""
        low_hz = MIN_HZ + self.low_hz_.abs()
        high_hz = low_hz + MIN_HZ + self.band_hz_.abs()
        high_hz = high_hz.clamp(MIN_HZ, SAMPLE_RATE / 2)
        width_hz = high_hz - low_hz
        # The impulse response of an ideal band-pass is a difference of two low-passes.
        low_KH = low_hz * self.n_
        high_KH = high_hz * self.n_
        half_H = self.n_ / 2
        even_KH = (high_KH.sin() - low_KH.sin()) / half_H * self.window_
        odd_KH = (low_KH.cos() - high_KH.cos()) / half_H * self.window_
        # In the middle, the limit of the even filter, and the zero of the odd one.
        even_K1 = 2 * width_hz
        odd_K1 = torch.zeros_like(width_hz)
        even_KL = torch.cat([even_KH, even_K1, even_KH.flip(1)], dim=1)
        odd_KL = torch.cat([odd_KH, odd_K1, -odd_KH.flip(1)], dim=1)
        filter_KL = torch.cat([even_KL / even_K1, odd_KL / even_K1])
        return filter_KL[:, None]


class BandPassConv(nn.Module):
    """Convolution with `BandPass` filters."""

    def __init__(self, *, num_filters: int, length: int, stride: int) -> None:
        super().__init__()
        self.filterbank = BandPass(num_filters=num_filters, length=length)
        self.stride = stride

    def forward(self, wave_B1T: Tensor) -> Tensor:
        # In half precision, sines of large arguments would be wrong.
        with autocast_off(wave_B1T):
            filters = self.filterbank()
        return F.conv1d(wave_B1T, filters, stride=self.stride)


class SincNet(nn.Module):
    """Band-pass filters and two convolutions, each with pooling and instance norm."""

    def __init__(self, *, num_filters: int, channels: int) -> None:
        super().__init__()
        self.wav_norm1d = nn.InstanceNorm1d(1, affine=True)
        first = BandPassConv(
            num_filters=num_filters, length=KERNELS[0], stride=STRIDES[0]
        )
        self.conv1d = nn.ModuleList(
            [
                first,
                nn.Conv1d(num_filters, channels, KERNELS[2]),
                nn.Conv1d(channels, channels, KERNELS[4]),
            ]
        )
        self.norm1d = nn.ModuleList(
            nn.InstanceNorm1d(size, affine=True)
            for size in (num_filters, channels, channels)
        )

    def forward(self, wave_B1T: Tensor) -> Tensor:
        x = self.wav_norm1d(wave_B1T)
        for stage, (conv, norm) in enumerate(zip(self.conv1d, self.norm1d)):
            x = conv(x)
            # The phase within a band does not matter.
            if stage == 0:
                x = x.abs()
            x = F.leaky_relu(norm(F.max_pool1d(x, kernel_size=3)))
        return x


class PyanNet(nn.Module):
    """SincNet, a bidirectional LSTM and linear layers; the defaults are segmentation-3.0.

    dropout: between the layers of the LSTM. feat_dim: 1, as the front end `wave` has it.
    """

    sample_rate = SAMPLE_RATE
    hop_samples, field_samples = grid(KERNELS, STRIDES)
    min_samples = field_samples + hop_samples  # instance norm needs two output frames

    def __init__(
        self,
        *,
        feat_dim: int = 1,
        num_filters: int = 80,
        channels: int = 60,
        lstm_layers: int = 4,
        lstm_dim: int = 128,
        linear_layers: int = 2,
        linear_dim: int = 128,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if feat_dim != 1:
            raise ValueError(
                f"frontend: pyannet takes samples, not {feat_dim} features; set"
                " frontend.name=wave"
            )
        if num_filters < 2 or num_filters % 2:
            raise ValueError(
                f"model.args.num_filters: must be even, got {num_filters}; correct it"
            )
        if not 0 <= dropout < 1:
            raise ValueError(
                f"model.args.dropout: must be from 0 to below 1, got {dropout:g};"
                " correct it"
            )
        self.feat_dim = feat_dim
        self.num_sets = NUM_SETS
        self.sincnet = SincNet(num_filters=num_filters, channels=channels)
        self.lstm = nn.LSTM(
            channels,
            lstm_dim,
            num_layers=lstm_layers,
            bidirectional=True,
            batch_first=True,
            # Torch warns of dropout in a single layer, which has no layer after it.
            dropout=dropout if lstm_layers > 1 else 0.0,
        )
        sizes = [2 * lstm_dim, *[linear_dim] * linear_layers]
        self.linear = nn.ModuleList(
            nn.Linear(size, next_size) for size, next_size in zip(sizes, sizes[1:])
        )
        self.classifier = nn.Linear(sizes[-1], NUM_SETS)

    def num_frames(self, num_samples: int) -> int:
        """Return the number of output frames; 0 for fewer samples than `field_samples`."""
        return max(0, (num_samples - self.field_samples) // self.hop_samples + 1)

    def forward(self, feats_BT1: Tensor) -> Tensor:
        """Return log_prob_BFC of at least `min_samples` samples."""
        x_BCF = self.sincnet(feats_BT1.transpose(1, 2))
        x_BFC, _ = self.lstm(x_BCF.transpose(1, 2))
        for linear in self.linear:
            x_BFC = F.leaky_relu(linear(x_BFC))
        logit_BFC = self.classifier(x_BFC)
        return widened(logit_BFC).log_softmax(dim=2)
