"""What a pretrained encoder hears: waves, normalised, or log mel features of its own kind.

Each class computes what a feature extractor of `transformers` computes, but batched and on the
device of the waves. Its constructor takes the values of `preprocessor_config.json` by their names
there; a value that would change the result and is missing is refused, never guessed.

Nothing is padded: all rows of a batch have one length, so an encoder needs no attention mask, and
a row has the same result in a batch as alone.

Letters: B rows, S samples, T frames of the encoder, U frames of 10 ms, F mel bins, K bins of a
spectrum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speakerlab.core.full_precision import autocast_off, where_float64_exists
from speakerlab.frontend.fbank import Fbank

FULL_SCALE = 32768.0  # features of w2v-BERT are those of 16-bit samples
# Added to a variance before its root, in all of these extractors.
VARIANCE_FLOOR = 1e-7


def normalised(x: Tensor, *, correction: int) -> Tensor:
    """Return `x` with mean 0 and variance 1 over dimension 1.

    correction: as in `torch.var`, 1 to divide the sum of squares of n values by n - 1, 0 by n.
    """
    # Not torch.var_mean: on a CPU, it takes eight times as long.
    mean = x.mean(1, keepdim=True)
    centred = x - mean
    sum_of_squares = centred.square().sum(1, keepdim=True)
    num_values = x.shape[1] - correction
    variance = sum_of_squares / num_values
    deviation = (variance + VARIANCE_FLOOR).sqrt()
    return centred / deviation


class EncoderInput(nn.Module):
    """Base class: from waves to the input of an encoder.

    sample_rate: in Hz. min_samples: of the shortest wave, which has one frame of the encoder.
    frame_shift: samples between two frames of the encoder.
    """

    sample_rate: int
    min_samples: int
    frame_shift: int
    max_seconds = float("inf")  # the encoder has positions for so much speech

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames that the encoder makes of `num_samples`."""
        later_samples = num_samples - self.min_samples
        return max(0, later_samples // self.frame_shift + 1)

    def samples_used(self, num_samples: int) -> int:
        """Return how many of the samples the input depends on."""
        return num_samples

    def shape(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape of the input of one wave of `num_samples`."""
        raise NotImplementedError

    def forward(self, wave_BS: Tensor) -> Tensor:
        """Return the input of the encoder, in float32, for waves in [-1, 1]."""
        with autocast_off(wave_BS):
            return self.compute(wave_BS.float())

    def compute(self, wave_BS: Tensor) -> Tensor:
        """Compute the input in full precision."""
        raise NotImplementedError


class Waves(EncoderInput):
    """Waves (B, S) for wav2vec 2.0, HuBERT and WavLM: transformers' `Wav2Vec2FeatureExtractor`.

    do_normalize: subtract the mean of each wave and divide by its deviation, as Large models want
    and Base models do not. kernels, strides: of the encoder's convolutions.
    """

    def __init__(
        self,
        *,
        sampling_rate: int,
        do_normalize: bool,
        kernels: Sequence[int],
        strides: Sequence[int],
    ) -> None:
        super().__init__()
        self.sample_rate = sampling_rate
        self.do_normalize = do_normalize
        # A frame of each convolution spans its kernel, in frames of the convolution before it. For
        # example, with kernels 10 and 3 and strides 5 and 2: a frame of the first takes 10 samples,
        # every 5; one of the second takes 10 + 2 * 5 = 20 samples, every 10.
        self.frame_shift = 1
        self.min_samples = 1
        for kernel, stride in zip(kernels, strides):
            self.min_samples += (kernel - 1) * self.frame_shift
            self.frame_shift *= stride

    def samples_used(self, num_samples: int) -> int:
        """Return how many of the samples the waves depend on: all, if they are normalised."""
        if self.do_normalize:
            return num_samples
        later_frames = self.num_frames(num_samples) - 1
        return self.min_samples + later_frames * self.frame_shift

    def shape(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape of a wave, (S,)."""
        return (num_samples,)

    def compute(self, wave_BS: Tensor) -> Tensor:
        """Return the waves, normalised if the encoder wants it."""
        if not self.do_normalize:
            return wave_BS
        return normalised(wave_BS, correction=0)


class StackedFbank(EncoderInput):
    """Kaldi's features of w2v-BERT 2.0 (B, T, 2 F): transformers' `SeamlessM4TFeatureExtractor`.

    Mean 0 and variance 1 in each mel bin of each utterance, then two frames side by side. (Where
    an utterance has an odd frame left, transformers pads it and masks it; here it is left out.)
    """

    def __init__(self, *, sampling_rate: int, num_mel_bins: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.fbank = Fbank(
            sample_rate=sampling_rate,
            num_mel_bins=num_mel_bins,
            scale=FULL_SCALE,
            mean_norm=False,
        )
        self.fbank.fft_in_float64 = True
        self.sample_rate = sampling_rate
        self.frame_shift = stride * self.fbank.frame_shift
        later_frames = stride - 1
        self.min_samples = (
            self.fbank.min_samples + later_frames * self.fbank.frame_shift
        )

    def samples_used(self, num_samples: int) -> int:
        """Return how many of the samples lie in a frame of 10 ms."""
        later_frames = self.fbank.num_frames(num_samples) - 1
        return self.fbank.min_samples + later_frames * self.fbank.frame_shift

    def shape(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape of the features of a wave, (T, 2 F)."""
        num_values = self.stride * self.fbank.num_mel_bins
        return (self.num_frames(num_samples), num_values)

    def compute(self, wave_BS: Tensor) -> Tensor:
        """Return normalised features of `stride` frames side by side."""
        # In float32, the rounding of the FFT in bins that are almost empty would be an error of
        # 2e-3 in read speech, and of 0.6 in speech with an offset.
        feats_BUF = where_float64_exists(self.fbank, wave_BS)
        # The odd frame counts here, as in transformers.
        feats_BUF = normalised(feats_BUF, correction=1)

        # Of each `stride` frames the first, the second, ...; an odd frame at the end is left out.
        # For example, of 5 frames with stride 2: the frames 0 and 2 beside the frames 1 and 3.
        num_frames = feats_BUF.shape[1]
        side_by_side: list[Tensor] = []
        for index in range(self.stride):
            later_frames = self.stride - 1 - index
            end = num_frames - later_frames
            every_stride_BTF = feats_BUF[:, index : end : self.stride]
            side_by_side.append(every_stride_BTF)
        return torch.cat(side_by_side, dim=2)


class WhisperMel(EncoderInput):
    """Log mel features of Whisper (B, F, U): transformers' `WhisperFeatureExtractor`, not padded.

    Whisper was trained on 30 s, with silence after shorter speech; here, as in WeSpeaker's recipe,
    the encoder hears the speech alone and takes the first of its positions. chunk_length: seconds
    of speech that it has positions for.
    """

    def __init__(
        self,
        *,
        sampling_rate: int,
        feature_size: int,
        n_fft: int,
        hop_length: int,
        chunk_length: int,
        do_normalize: bool = False,
    ) -> None:
        super().__init__()
        if do_normalize:
            raise ValueError("do_normalize: Whisper takes waves as they are")
        from transformers.audio_utils import mel_filter_bank

        self.sample_rate = sampling_rate
        self.n_fft = n_fft
        self.hop_length = hop_length
        self.max_seconds = float(chunk_length)
        # The second convolution of the encoder keeps every second frame.
        self.frame_shift = 2 * hop_length
        # The wave is reflected at both ends by half a window, which must be shorter than the wave.
        self.min_samples = n_fft // 2 + 1
        mel_KF = mel_filter_bank(
            num_frequency_bins=n_fft // 2 + 1,
            num_mel_filters=feature_size,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=sampling_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        mel_FK = torch.tensor(mel_KF.T, dtype=torch.float32)
        self.register_buffer("mel_FK", mel_FK, persistent=False)
        window_L = torch.hann_window(n_fft)
        self.register_buffer("window_L", window_L, persistent=False)

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames that the encoder makes of `num_samples`."""
        num_features = num_samples // self.hop_length
        return (num_features + 1) // 2

    def shape(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape of the features of a wave, (F, U)."""
        num_mel_bins = len(self.get_buffer("mel_FK"))
        return (num_mel_bins, num_samples // self.hop_length)

    def compute(self, wave_BS: Tensor) -> Tensor:
        """Return log10 energies, at most 80 dB below the loudest, moved to about [-1, 1]."""
        spectrum_BKU = torch.stft(
            wave_BS,
            self.n_fft,
            self.hop_length,
            window=self.get_buffer("window_L"),
            return_complex=True,
        )
        # The last frame lies at the very end of the wave.
        squares_BKU2 = torch.view_as_real(spectrum_BKU[..., :-1]).square()
        # A sum over an axis of two values takes ten times as long on a CPU.
        real_BKU, imaginary_BKU = squares_BKU2.unbind(-1)
        power_BKU = real_BKU + imaginary_BKU
        energy_BFU = self.get_buffer("mel_FK") @ power_BKU
        log_BFU = energy_BFU.clamp_min(1e-10).log10()
        # 8 in log10 of energies are 80 dB.
        loudest_B11 = log_BFU.amax(dim=(1, 2), keepdim=True)
        quietest_B11 = loudest_B11 - 8.0
        log_BFU = torch.maximum(log_BFU, quietest_B11)
        return (log_BFU + 4.0) / 4.0
