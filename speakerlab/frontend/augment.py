"""Speed, room, noise and telephone, applied to a whole batch on the model's device.

In: a `Batch`: int16 rows and everything drawn for them.
Out: wave_BS, float32, S samples each, in [-1, 1] but for what rooms and noise add.
Letters: B rows of the batch, S samples, K entries of a bank, L samples of a room, R rows with a
room, N rows with a noise, V recordings that the noises are made of, P rows with the telephone's
band, C rows with a codec.
"""

from collections.abc import Callable, Sequence

import numpy as np
import scipy.fft
import torch
from torch import Tensor, nn

from speakerlab.core.batch import SILENCE_POWER, Batch
from speakerlab.core.regions import region
from speakerlab.frontend.banks import LEAD_SECONDS, noise_bank, room_bank
from speakerlab.frontend.channel import INT16_SCALE, Channel
from speakerlab.frontend.fbank import fp32_island
from speakerlab.frontend.resampling import resampler

CPU_ROWS = 8  # rows at a time on a CPU: more fall out of a core's cache
KEPT_ROOMS = 200  # spectra of so many rooms, a quarter of a megabyte each, are kept on a CPU

Stage = Callable[[Tensor, Batch], Tensor]


def _chunks(rows: Tensor) -> Sequence[Tensor]:
    """Rows to process together: all on a GPU, few on a CPU; nothing where there are none."""
    if not len(rows):
        return ()
    return rows.split(CPU_ROWS) if rows.device.type == "cpu" else (rows,)


def babble(voice_VS: Tensor, noise_of_V: Tensor, num_noises: int) -> Tensor:
    """(N, S): the recordings of each noise summed, brought to equal power where they are several.

    What is silent stays out of a sum. A noise of one recording is that recording, bit for bit.
    """
    power_V = voice_VS.square().mean(1)
    gain_V = torch.where(power_V < SILENCE_POWER, 0.0, power_V.rsqrt())
    count_N = power_V.new_zeros(num_noises).index_add_(0, noise_of_V, torch.ones_like(power_V))
    gain_V = torch.where(count_N[noise_of_V] > 1, gain_V, 1.0)
    noise_NS = voice_VS.new_zeros(num_noises, voice_VS.shape[1])
    return noise_NS.index_add_(0, noise_of_V, gain_V[:, None] * voice_VS)


class Augment(nn.Module):
    """Speed, then room, then noise, then telephone; without any of them, int16 to float32.

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
        telephone: bool = False,
        codec: bool = False,
        sample_rate: int = 16000,
    ) -> None:
        """`num_samples` is S, a crop's length; `rooms` are float vectors, `noises` int16.

        `noises` is empty where batches bring their noise along; `telephone` and `codec` say what
        the channel must be able to do.
        """
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
        self.kept_spectra: Tensor | None = None
        self.channel = Channel(
            num_samples=num_samples, sample_rate=sample_rate, telephone=telephone, codec=codec
        )
        self.register_buffer("silent_count", torch.zeros(2, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """(B, S) float32. A row that nothing was drawn for is its samples / 32768, bit for bit."""
        wave_BS = batch.wave_BS
        with fp32_island(wave_BS.device):
            for name, stage in self.stages().items():
                with region(f"step/front end/{name}"):
                    wave_BS = stage(wave_BS, batch)
        return wave_BS

    def stages(self) -> dict[str, Stage]:
        """What is done, by name and in its order; each may write into the wave it is given."""
        return {
            "speed": self._change_speed,
            "room": self._put_in_rooms,
            "noise": self._add_noises,
            "telephone": self._pass_channel,
        }

    def _change_speed(self, read_BS: Tensor, batch: Batch) -> Tensor:
        """Every row from the int16 samples read for its speed to S samples of float32."""
        assert len(batch.speed_rows) == len(self.resamplers), "a list of rows for each speed"
        assert sum(map(len, batch.speed_rows)) == len(read_BS), "each row has one speed"
        wave_BS = read_BS.new_empty((len(read_BS), self.num_samples), dtype=torch.float32)
        for all_rows, length, resample in zip(batch.speed_rows, self.read_samples, self.resamplers):
            for rows in _chunks(all_rows):
                read = read_BS[:, :length].index_select(0, rows)
                assert read.shape[1] == length, "rows are as long as their speed needs"
                played = resample(read.float().div_(INT16_SCALE))
                # Rounding gives a sample too many now and then, at half speed or less one too few.
                if played.shape[1] != self.num_samples:
                    played = nn.functional.pad(played, (0, self.num_samples - played.shape[1]))
                wave_BS.index_copy_(0, rows, played)
        return wave_BS

    def _put_in_rooms(self, wave_BS: Tensor, batch: Batch) -> Tensor:
        for rows, room_R in zip(_chunks(batch.room_rows), _chunks(batch.room_R)):
            wet_RS = self._reverberate(wave_BS.index_select(0, rows), room_R)
            wave_BS.index_copy_(0, rows, wet_RS)
        return wave_BS

    def _add_noises(self, wave_BS: Tensor, batch: Batch) -> Tensor:
        if len(batch.noise_rows):
            noise_NS = self._scaled_noise(wave_BS.index_select(0, batch.noise_rows), batch)
            wave_BS.index_add_(0, batch.noise_rows, noise_NS)
        return wave_BS

    def _pass_channel(self, wave_BS: Tensor, batch: Batch) -> Tensor:
        for rows in _chunks(batch.telephone_rows):
            wave_BS.index_copy_(0, rows, self.channel.keep_band(wave_BS.index_select(0, rows)))
        for rows, codec_C in zip(_chunks(batch.codec_rows), _chunks(batch.codec_C)):
            wave_BS.index_copy_(0, rows, self.channel.code(wave_BS.index_select(0, rows), codec_C))
        return wave_BS

    def _reverberate(self, wave_RS: Tensor, room_R: Tensor) -> Tensor:
        """Convolution with each row's room, without the delay of the direct sound."""
        spectrum = torch.fft.rfft(wave_RS, n=self.num_fft)
        spectrum *= self._room_spectra(room_R)
        wet = torch.fft.irfft(spectrum, n=self.num_fft)
        return wet[:, self.room_lead : self.room_lead + self.num_samples]

    def _room_spectra(self, room_R: Tensor) -> Tensor:
        """(R, bins) spectra of these rooms; those of a small bank are kept on a CPU."""
        if self.room_KL.device.type != "cpu" or len(self.room_KL) > KEPT_ROOMS:
            return torch.fft.rfft(self.room_KL.index_select(0, room_R), n=self.num_fft)
        spectra = self.kept_spectra
        if spectra is None:
            self.kept_spectra = spectra = torch.fft.rfft(self.room_KL, n=self.num_fft)
        return spectra.index_select(0, room_R)

    def _scaled_noise(self, wave_NS: Tensor, batch: Batch) -> Tensor:
        """(N, S) to add: at an exact ratio of mean powers over the crop; 0 where either is silent.

        `wave_NS` is overwritten.
        """
        noise_NS = self._noise(batch)
        speech_power_N = wave_NS.square_().mean(1)  # in place: on a CPU new memory is what costs
        noise_power_N = noise_NS.square().mean(1)
        speech_silent_N = speech_power_N < SILENCE_POWER
        noise_silent_N = noise_power_N < SILENCE_POWER
        self.silent_count += torch.stack([speech_silent_N.sum(), noise_silent_N.sum()])
        gain_N = (speech_power_N / noise_power_N / 10 ** (batch.snr_db_N / 10)).sqrt()
        gain_N = torch.where(speech_silent_N | noise_silent_N, 0.0, gain_N)
        return noise_NS.mul_(gain_N[:, None])

    def _noise(self, batch: Batch) -> Tensor:
        """(N, S) float32, at whatever level: as the workers cut it, or cut from the bank here."""
        if len(batch.noise_NS):
            return batch.noise_NS.float().div_(INT16_SCALE)
        assert len(self.noise_length_K), "a bank, or noise that came with the batch"
        start_V = batch.noise_start_V % self.noise_length_K[batch.noise_V]
        start_V = start_V + self.noise_offset_K[batch.noise_V]
        stretches = self.noise_bank.unfold(0, self.num_samples, 1)  # a view, one row per start
        voice_VS = stretches.index_select(0, start_V).float().div_(INT16_SCALE)
        num_noises = len(batch.noise_rows)
        if len(voice_VS) == num_noises:
            return voice_VS
        return babble(voice_VS, batch.noise_of_V, num_noises)
