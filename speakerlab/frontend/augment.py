"""Speed, room and noise, applied to a whole batch on the model's device.

In: a `Batch`: int16 rows and everything drawn for them.
Out: wave_BS, float32, S samples each, in [-1, 1] but for what rooms and noise add.
Letters: B rows of the batch, S samples, K entries of a bank, L samples of a room, R rows with a
room, N rows with a noise.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import scipy.fft
import torch
from torch import Tensor, nn

from speakerlab.batch import Batch
from speakerlab.frontend.fbank import fp32_island

INT16_SCALE = 32768
LEAD_SECONDS = 0.005  # what a room keeps before its direct peak
ROOM_SECONDS = 1.0  # and how long it is in all
SILENCE_POWER = 1e-6  # -60 dBFS: an SNR to or of less than this means nothing
CPU_ROWS = 8  # rows at a time on a CPU: more fall out of a core's cache
MAX_RATIO = 1000  # a resampler holds a filter per output phase


def bank_bytes(
    *,
    num_samples: int,
    room_lengths: Sequence[int] = (),
    noise_lengths: Sequence[int] = (),
    sample_rate: int = 16000,
) -> int:
    """Device memory that `Augment` will take for rooms and noises of these lengths, in samples."""
    rooms = 4 * len(room_lengths) * _room_width(room_lengths, sample_rate=sample_rate)
    noise_samples = sum(noise_lengths) + len(noise_lengths) * (num_samples - 1)
    return rooms + 2 * noise_samples + 16 * len(noise_lengths)


def resampler(speed: float) -> nn.Module:
    """Plays a wave `speed` times as fast, by an exact ratio of integers; the identity at 1.

    Raises ValueError for a speed that is not such a ratio of small numbers.
    """
    ratio = Fraction(str(speed)).limit_denominator()
    if not (ratio > 0 and max(ratio.numerator, ratio.denominator) <= MAX_RATIO):
        raise ValueError(
            f"augment: a speed must be positive and have at most three digits, got {speed}; "
            "use one such as 0.9 or 1.1"
        )
    if ratio == 1:
        return nn.Identity()
    from torchaudio.transforms import Resample

    # Within -70 dB of soxr HQ up to 6 kHz, and no slower than the narrow default (-18 dB).
    resample = Resample(
        ratio.numerator,
        ratio.denominator,
        resampling_method="sinc_interp_kaiser",
        lowpass_filter_width=13,
        rolloff=1.0,
        beta=7.0,
    )
    kernel = resample.get_buffer("kernel")
    del resample.kernel  # torchaudio would put it into state dicts
    resample.register_buffer("kernel", kernel, persistent=False)
    return resample


def room_bank(rooms: Sequence[np.ndarray], *, sample_rate: int) -> Tensor:
    """(K, L) float32 impulse responses of unit energy, the direct peak of each at the same sample.

    A room is cut from 5 ms before its largest sample, taken to be the direct sound, to 1 s in all.
    Raises ValueError for a room that is empty, silent or not a vector.
    """
    lead = round(LEAD_SECONDS * sample_rate)
    width = _room_width([len(room) for room in rooms], sample_rate=sample_rate)
    bank_KL = np.zeros((len(rooms), width), dtype=np.float32)
    for index, room in enumerate(rooms):
        room_S = np.asarray(room, dtype=np.float64)
        if room_S.ndim != 1 or not (np.isfinite(room_S).all() and room_S.any()):
            raise ValueError(
                f"augment: room {index} is not a vector of finite samples that sound, got shape "
                f"{room_S.shape}; remove it or choose one channel"
            )
        peak = int(np.abs(room_S).argmax())
        kept_S = np.pad(room_S, (max(0, lead - peak), 0))[max(0, peak - lead) :][:width]
        bank_KL[index, : len(kept_S)] = kept_S / np.sqrt(np.square(kept_S).sum())
    return torch.from_numpy(bank_KL)


def noise_bank(noises: Sequence[np.ndarray], *, num_samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """All noises in a row, (total,) int16; where each begins and how long it is, (K,) int64 both.

    Each is followed by its own beginning, so that S samples from any start are one plain stretch:
    on a CPU an index for every sample would cost more than all the rest of the noise.
    """
    for index, noise in enumerate(noises):
        if noise.ndim != 1 or noise.dtype != np.int16 or not len(noise):
            raise ValueError(
                f"augment: noise {index} is not a vector of int16 samples, got {noise.dtype} of "
                f"shape {noise.shape}; read one channel as int16"
            )
    lengths = np.array([len(noise) for noise in noises], dtype=np.int64)
    looped = lengths + num_samples - 1
    offsets = np.cumsum(looped) - looped
    bank = np.empty(int(looped.sum()), dtype=np.int16)
    for noise, offset, length in zip(noises, offsets, looped):
        bank[offset : offset + length] = np.resize(noise, length)
    return torch.from_numpy(bank), torch.from_numpy(offsets), torch.from_numpy(lengths)


def _chunks(rows: Tensor) -> Sequence[Tensor]:
    """Rows to process together: all on a GPU, few on a CPU; nothing where there are none."""
    if not len(rows):
        return ()
    return rows.split(CPU_ROWS) if rows.device.type == "cpu" else (rows,)


def _room_width(room_lengths: Sequence[int], *, sample_rate: int) -> int:
    lead = round(LEAD_SECONDS * sample_rate)
    return min(round(ROOM_SECONDS * sample_rate), lead + max(room_lengths, default=0))


class Augment(nn.Module):
    """Speed, then room, then noise; without any of them, int16 to float32.

    The banks are buffers that enter no state dict; keep this module out of what DDP wraps, which
    would broadcast them. `silent_count`, int64 [speech, noise], counts the rows that were to get
    noise but got none because the one or the other (or both) was below -60 dBFS.
    """

    room_KL: Tensor
    noise_bank: Tensor
    noise_offset_K: Tensor
    noise_length_K: Tensor
    silent_count: Tensor

    def __init__(
        self,
        *,
        num_samples: int,
        speeds: Sequence[float] = (1.0,),
        rooms: Sequence[np.ndarray] = (),
        noises: Sequence[np.ndarray] = (),
        sample_rate: int = 16000,
    ) -> None:
        """`num_samples` is S, a crop's length; `rooms` are float vectors, `noises` int16."""
        super().__init__()
        self.num_samples = num_samples
        self.read_samples = [round(num_samples * speed) for speed in speeds]
        self.resamplers = nn.ModuleList(resampler(speed) for speed in speeds)
        self.room_lead = round(LEAD_SECONDS * sample_rate)
        room_KL = room_bank(rooms, sample_rate=sample_rate)
        self.num_fft = scipy.fft.next_fast_len(num_samples + room_KL.shape[1] - 1, real=True)
        bank, offset_K, length_K = noise_bank(noises, num_samples=num_samples)
        self.register_buffer("room_KL", room_KL, persistent=False)
        self.register_buffer("noise_bank", bank, persistent=False)
        self.register_buffer("noise_offset_K", offset_K, persistent=False)
        self.register_buffer("noise_length_K", length_K, persistent=False)
        self.register_buffer("silent_count", torch.zeros(2, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """(B, S) float32. A row that nothing was drawn for is its samples / 32768, bit for bit."""
        with fp32_island(batch.wave_BS.device):
            wave_BS = self._change_speed(batch)
            for rows, room_R in zip(_chunks(batch.room_rows), _chunks(batch.room_R)):
                wet_RS = self._reverberate(wave_BS.index_select(0, rows), room_R)
                wave_BS.index_copy_(0, rows, wet_RS)
            if len(batch.noise_rows):
                noisy_NS = self._add_noise(wave_BS.index_select(0, batch.noise_rows), batch)
                wave_BS.index_copy_(0, batch.noise_rows, noisy_NS)
            return wave_BS

    def _change_speed(self, batch: Batch) -> Tensor:
        """Every row from the samples read for its speed to S samples of float32."""
        assert len(batch.speed_rows) == len(self.resamplers), "a list of rows for each speed"
        assert sum(map(len, batch.speed_rows)) == len(batch.wave_BS), "each row has one speed"
        shape = (len(batch.wave_BS), self.num_samples)
        wave_BS = batch.wave_BS.new_empty(shape, dtype=torch.float32)
        for all_rows, length, resample in zip(batch.speed_rows, self.read_samples, self.resamplers):
            for rows in _chunks(all_rows):
                read = batch.wave_BS[:, :length].index_select(0, rows)
                assert read.shape[1] == length, "rows are as long as their speed needs"
                played = resample(read.float() / INT16_SCALE)
                # Rounding gives a sample too many now and then, at half speed or less one too few.
                fit = nn.functional.pad(played, (0, self.num_samples - played.shape[1]))
                wave_BS.index_copy_(0, rows, fit)
        return wave_BS

    def _reverberate(self, wave_RS: Tensor, room_R: Tensor) -> Tensor:
        """Convolution with each row's room, without the delay of the direct sound."""
        room_RL = self.room_KL.index_select(0, room_R)
        spectrum = torch.fft.rfft(wave_RS, n=self.num_fft)
        spectrum *= torch.fft.rfft(room_RL, n=self.num_fft)
        wet = torch.fft.irfft(spectrum, n=self.num_fft)
        return wet[:, self.room_lead : self.room_lead + self.num_samples]

    def _add_noise(self, wave_NS: Tensor, batch: Batch) -> Tensor:
        """Noise at an exact ratio of mean powers over the crop; none where either is silent."""
        start_N = batch.noise_start_N % self.noise_length_K[batch.noise_N]
        start_N = start_N + self.noise_offset_K[batch.noise_N]
        stretches = self.noise_bank.unfold(0, self.num_samples, 1)  # a view, one row per start
        noise_NS = stretches.index_select(0, start_N).float() / INT16_SCALE
        speech_power_N = wave_NS.square().mean(1)
        noise_power_N = noise_NS.square().mean(1)
        speech_silent_N = speech_power_N < SILENCE_POWER
        noise_silent_N = noise_power_N < SILENCE_POWER
        self.silent_count += torch.stack([speech_silent_N.sum(), noise_silent_N.sum()])
        gain_N = (speech_power_N / noise_power_N / 10 ** (batch.snr_db_N / 10)).sqrt()
        gain_N = torch.where(speech_silent_N | noise_silent_N, 0.0, gain_N)
        return wave_NS + gain_N[:, None] * noise_NS
