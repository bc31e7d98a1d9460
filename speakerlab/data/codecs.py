"""Lossy codecs: samples are encoded and decoded again, in memory, by libsndfile.

`gsm` is the full-rate codec of GSM phones (ETSI GSM 06.10), which like narrow-band AMR, its
successor, models the voice and codes 8 kHz at about 13 kb/s. Letters: S samples.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from speakerlab.data import audio

MP3_KBPS = (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)  # of MPEG-2 at 16 kHz
OPUS_KBPS = range(6, 257)
# Samples that LAME (576) and a decoder (529) add in front. A file of 40 kb/s or more has room for a
# header with this number, and libsndfile then removes them.
MP3_DELAY = 576 + 529


def _mp3(kbps: int) -> dict[str, Any]:
    level = (160 - kbps) / 152  # what libsndfile turns into the bit rate again
    return {"subtype": "MPEG_LAYER_III", "bitrate_mode": "CONSTANT", "compression_level": level}


def _opus(kbps: int) -> dict[str, Any]:
    return {"subtype": "OPUS", "compression_level": (256 - kbps) / 250}


# name -> (sample rate at which it codes, format, options of the encoder)
CODECS: Mapping[str, tuple[int, str, Mapping[str, Any]]] = {
    **{f"mp3:{kbps}k": (16000, "MP3", _mp3(kbps)) for kbps in MP3_KBPS},
    **{f"opus:{kbps}k": (16000, "OGG", _opus(kbps)) for kbps in OPUS_KBPS},
    "gsm": (8000, "AIFF", {"subtype": "GSM610"}),
}


def check_codec(name: str) -> str:
    """Return the name of a codec; ValueError, with what follows the name, if it is none."""
    if name not in CODECS:
        rates = ", ".join(map(str, MP3_KBPS))
        raise ValueError(f"is no codec; use gsm, opus:6k to opus:256k, or mp3 at {rates}k")
    return name


def reencode(wave_S: np.ndarray, codec: str, *, sample_rate: int) -> np.ndarray:
    """Return int16 samples after encoding and decoding: as many, without the codec's delay.

    Deterministic on one machine and version of libsndfile.
    """
    rate, kind, options = CODECS[codec]
    coded_S = _resample(wave_S, sample_rate, rate)
    with audio.stream(audio.encode(coded_S, rate, kind, **options)) as (_, blocks):
        decoded_S = np.concatenate(list(blocks))
    if len(decoded_S) >= len(coded_S) + MP3_DELAY:
        decoded_S = decoded_S[MP3_DELAY:]
    back_S = _resample(decoded_S, rate, sample_rate)[: len(wave_S)]
    return np.pad(back_S, (0, len(wave_S) - len(back_S)))


def _resample(wave_S: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    if rate == new_rate:
        return wave_S
    import soxr

    float_S = wave_S.astype(np.float32) / audio.FULL_SCALE
    return audio.to_int16(soxr.resample(float_S, rate, new_rate))
