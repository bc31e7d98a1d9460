"""Lossy codecs: samples are encoded and decoded again, in memory, by libsndfile.

`gsm` is the full-rate codec of GSM phones (ETSI GSM 06.10), which like narrow-band AMR, its
successor, models the voice and codes 8 kHz at about 13 kb/s. Letters: S samples.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from speakerlab.data import audio

# Bit rates of MPEG-2 at 16 kHz.
MP3_KBPS = (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
OPUS_KBPS = range(6, 257)
# Samples that LAME (576) and a decoder (529) add in front. From 40 kb/s on, a file has a header
# with this number, and libsndfile removes them (measured with all of MP3_KBPS).
MP3_DELAY = 576 + 529


def _mp3(kbps: int) -> dict[str, Any]:
    # The inverse of libsndfile's formula, which maps the level 0 to 160 kb/s and 1 to 8 kb/s.
    level = (160 - kbps) / 152
    return {
        "subtype": "MPEG_LAYER_III",
        "bitrate_mode": "CONSTANT",
        "compression_level": level,
    }


def _opus(kbps: int) -> dict[str, Any]:
    # As for MP3, but from 256 to 6 kb/s.
    level = (256 - kbps) / 250
    return {"subtype": "OPUS", "compression_level": level}


class Codec(NamedTuple):
    """How libsndfile encodes with a codec."""

    sample_rate: int  # that the codec works at
    file_format: str
    options: Mapping[str, Any]  # of the encoder


def _list_codecs() -> dict[str, Codec]:
    codecs: dict[str, Codec] = {}
    for kbps in MP3_KBPS:
        codecs[f"mp3:{kbps}k"] = Codec(16000, "MP3", _mp3(kbps))
    for kbps in OPUS_KBPS:
        codecs[f"opus:{kbps}k"] = Codec(16000, "OGG", _opus(kbps))
    codecs["gsm"] = Codec(8000, "AIFF", {"subtype": "GSM610"})
    return codecs


CODECS: Mapping[str, Codec] = _list_codecs()


def check_codec(name: str) -> str:
    """Return the name of a codec; raise ValueError, with text to follow the name, for others."""
    if name not in CODECS:
        rates = ", ".join(map(str, MP3_KBPS))
        raise ValueError(
            f"is no codec; use gsm, opus:6k to opus:256k, or mp3 at {rates}k"
        )
    return name


def reencode(wave_S: np.ndarray, codec: str, *, sample_rate: int) -> np.ndarray:
    """Encode and decode int16 samples; return equally many, without the codec's delay.

    Deterministic on one machine and version of libsndfile.
    """
    codec_rate, file_format, options = CODECS[codec]
    input_S = _resample(wave_S, sample_rate, codec_rate)
    content = audio.encode(
        input_S,
        codec_rate,
        file_format,
        **options,
    )
    with audio.stream(content) as (_, blocks):
        decoded_S = np.concatenate(list(blocks))

    # Only MP3 below 40 kb/s is so much longer after decoding: it still begins with the delay.
    num_added = len(decoded_S) - len(input_S)
    if num_added >= MP3_DELAY:
        decoded_S = decoded_S[MP3_DELAY:]

    # Resampling and codecs may change the length by a few samples.
    output_S = _resample(decoded_S, codec_rate, sample_rate)
    output_S = output_S[: len(wave_S)]
    num_missing = len(wave_S) - len(output_S)
    return np.pad(output_S, (0, num_missing))


def _resample(wave_S: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    if rate == new_rate:
        return wave_S
    import soxr

    float_S = wave_S.astype(np.float32) / audio.FULL_SCALE
    resampled_S = soxr.resample(float_S, rate, new_rate)
    return audio.to_int16(resampled_S)
