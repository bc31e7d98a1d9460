"""Changes of the sampling rate by an exact ratio. In: wave_BS, float32. Out: the same, resampled.

Letters: B rows of the batch, S samples.
"""

from fractions import Fraction

from torch import nn

MAX_RATIO = 1000  # a resampler holds a filter per output phase


def resampler(speed: float) -> nn.Module:
    """Return a module that plays a wave `speed` times as fast, a ratio of small integers."""
    ratio = Fraction(str(speed)).limit_denominator()
    if not (ratio > 0 and max(ratio.numerator, ratio.denominator) <= MAX_RATIO):
        raise ValueError(
            f"augment: speed {speed} must be positive, with at most three digits; use e.g. 0.9"
        )
    return resampler_between(ratio.numerator, ratio.denominator)


def resampler_between(old_rate: int, new_rate: int) -> nn.Module:
    """Return a module from one sampling rate to another, without a delay."""
    if old_rate == new_rate:
        return nn.Identity()
    from torchaudio.transforms import Resample

    # Within -70 dB of soxr HQ up to 6 kHz, and no slower than the narrow default (-18 dB).
    resample = Resample(
        old_rate,
        new_rate,
        resampling_method="sinc_interp_kaiser",
        lowpass_filter_width=13,
        rolloff=1.0,
        beta=7.0,
    )
    kernel = resample.get_buffer("kernel")
    del resample.kernel  # torchaudio would put it into state dicts
    resample.register_buffer("kernel", kernel, persistent=False)
    return resample
