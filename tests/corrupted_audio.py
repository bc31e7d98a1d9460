"""Contents of corrupted recordings, each made from a random generator, with their expected fate.

Letters: S samples.
"""

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Literal

import numpy as np
import soundfile
from voices import RATE, make_wave

Rng = np.random.Generator
Fate = Literal["kept", "rejected", "either"]
MARKER = "PWNED"  # a file of this name appears where a file name, or a content, was run
EDGES = [0, 1, 2, 3, 7, 8, 16, 24, 32, 127, 255, 2**15 - 1, 2**15, 2**16 - 1]
EDGES += [2**24, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1]
WAV_HEADER, FLAC_HEADER = range(4, 44, 2), range(4, 42, 2)  # behind "RIFF" and "fLaC"


def clean_wave(rng: Rng) -> np.ndarray:
    return make_wave(int(rng.integers(100)), int(rng.integers(9)), 0.3 + 0.9 * rng.random())


def encoded(wave: np.ndarray, form: str = "WAV", subtype: str | None = None, rate: int = RATE):
    """Return the content of a file in any format that libsndfile writes."""
    file = io.BytesIO()
    if subtype in ("FLOAT", "DOUBLE") and wave.dtype == np.int16:  # libsndfile would not scale
        wave = wave / 32768
    soundfile.write(file, wave, rate, format=form, subtype=subtype)
    return file.getvalue()


def wav(rng: Rng) -> bytes:
    return encoded(clean_wave(rng))


def flac(rng: Rng) -> bytes:
    return encoded(clean_wave(rng), "FLAC")


def cut(data: bytes, rng: Rng, first: int, last: int | None = None) -> bytes:
    return data[: int(rng.integers(first, min(last or len(data), len(data))))]


def flip(data: bytes, rng: Rng, first: int, last: int | None = None) -> bytes:
    """Flip one to eight bits."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        changed[int(rng.integers(first, min(last or len(data), len(data))))] ^= 1 << rng.integers(8)
    return bytes(changed)


def splice(data: bytes, rng: Rng) -> bytes:
    """Take bytes out, put some in, or replace them by zeros."""
    at, size = int(rng.integers(len(data))), int(rng.integers(1, 5000))
    middle = [b"", rng.bytes(size) + data[at : at + size], bytes(size)][rng.integers(3)]
    return data[:at] + middle + data[at + size :]


def lying(
    make: Callable[[Rng], bytes], at: int, order: Literal["little", "big"]
) -> Callable[[Rng], bytes]:
    """Put an edge of two or four bytes over the fields of a header."""

    def lie(rng: Rng) -> bytes:
        data, size = make(rng), int(rng.choice([2, 4]))
        value = EDGES[rng.integers(len(EDGES))] % 2 ** (8 * size)
        return data[:at] + value.to_bytes(size, order) + data[at + size :]

    return lie


def extensible(rng: Rng) -> bytes:
    """Return WAVE_FORMAT_EXTENSIBLE with odd inner format, sizes or valid bits."""
    wave = clean_wave(rng).tobytes()
    inner = rng.bytes(16) if rng.random() < 0.5 else b"\1\0\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    size, valid = int(rng.choice([0, 1, 22, 23, 65535])), int(rng.choice([0, 3, 8, 16, 24, 99]))
    fmt = struct.pack("<HHIIHHHHI", 0xFFFE, 1, RATE, 2 * RATE, 2, 16, size, valid, 4) + inner
    body = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", len(wave))
    return b"RIFF" + struct.pack("<I", len(body) + len(wave)) + body + wave


def odd_chunks(rng: Rng) -> bytes:
    """Return a wav with chunks of absurd sizes, duplicates, or in the wrong order."""
    data = wav(rng)
    size = int(EDGES[rng.integers(len(EDGES))])
    chunk = rng.choice([b"LIST", b"fact", b"fmt ", b"data", b"\0\0\0\0"]) + struct.pack("<I", size)
    return data[:12] + chunk + rng.bytes(min(size, 64)) + data[12:]


def disguised(form: str, subtype: str | None = None, rate: int = RATE) -> Callable[[Rng], bytes]:
    return lambda rng: encoded(clean_wave(rng), form, subtype, rate)


def poisoned(value: float, subtype: str = "FLOAT") -> Callable[[Rng], bytes]:
    def make(rng: Rng) -> bytes:
        wave_S = clean_wave(rng) / 32768
        wave_S[rng.integers(len(wave_S), size=3)] = value
        return encoded(wave_S, "WAV", subtype)

    return make


def of_length(num_samples: int, form: str = "WAV") -> Callable[[Rng], bytes]:
    return lambda rng: encoded(clean_wave(rng)[:num_samples], form)


def with_rate(rate: int) -> Callable[[Rng], bytes]:
    """Change the rate in the header only, to one that libsndfile would not write."""

    def make(rng: Rng) -> bytes:
        data = bytearray(wav(rng))
        struct.pack_into("<II", data, 24, rate, min(2 * rate, 2**32 - 1))
        return bytes(data)

    return make


def with_channels(count: int) -> Callable[[Rng], bytes]:
    return lambda rng: encoded(np.stack([clean_wave(rng)[:3000]] * count, 1))


def zipped(rng: Rng) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.wav", wav(rng))
    return file.getvalue()


TEXTS = {
    "text": b"this is no audio\n" * 20,
    "html": b"<!doctype html><html><body><h1>404 Not Found</h1></body></html>",
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0" + bytes(100),
    "script": b"#!/bin/sh\ntouch " + MARKER.encode() + b"\n",
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.wav\n#EXTINF:1,\nother.wav\n",
    "concat": b"ffconcat version 1.0\nfile other.wav\n",
    "pickle": b"cos\nsystem\n(S'touch " + MARKER.encode() + b"'\ntR.",
    "lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "zeros": bytes(4096),
}
CONTENTS: dict[str, tuple[Callable[[Rng], bytes], Fate]] = {
    "empty": (lambda rng: b"", "rejected"),
    "wav cut in RIFF": (lambda rng: cut(wav(rng), rng, 1, 12), "rejected"),
    "wav cut in fmt": (lambda rng: cut(wav(rng), rng, 12, 36), "rejected"),
    "wav cut in data header": (lambda rng: cut(wav(rng), rng, 36, 44), "rejected"),
    "wav cut in data": (lambda rng: cut(wav(rng), rng, 44), "rejected"),
    "flac cut in metadata": (lambda rng: cut(flac(rng), rng, 1, 80), "rejected"),
    "flac cut in frames": (lambda rng: cut(flac(rng), rng, 100), "rejected"),
    "wav bits flipped in header": (lambda rng: flip(wav(rng), rng, 0, 44), "either"),
    "wav bits flipped in data": (lambda rng: flip(wav(rng), rng, 44), "kept"),
    "flac bits flipped in metadata": (lambda rng: flip(flac(rng), rng, 0, 80), "either"),
    "flac bits flipped in frames": (lambda rng: flip(flac(rng), rng, 100), "either"),
    "wav spliced": (lambda rng: splice(wav(rng), rng), "either"),
    "flac spliced": (lambda rng: splice(flac(rng), rng), "either"),
    **{f"wav lies at {at}": (lying(wav, at, "little"), "either") for at in WAV_HEADER},
    **{f"flac lies at {at}": (lying(flac, at, "big"), "either") for at in FLAC_HEADER},
    "wav extensible": (extensible, "either"),
    "wav odd chunks": (odd_chunks, "either"),
    "ogg bits flipped": (lambda rng: flip(disguised("OGG")(rng), rng, 0), "either"),
    "mp3 bits flipped": (lambda rng: flip(disguised("MP3")(rng), rng, 0), "either"),
    **{
        f"wav {subtype}": (disguised("WAV", subtype), "kept")
        for subtype in ("PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "MS_ADPCM")
    },
    **{
        f"{form} as wav": (disguised(form), "kept")
        for form in ("RF64", "W64", "AIFF", "AU", "CAF", "FLAC", "OGG", "MP3")
    },
    "NaN": (poisoned(float("nan")), "rejected"),
    "infinity": (poisoned(float("-inf")), "rejected"),
    "NaN in double": (poisoned(float("nan"), "DOUBLE"), "rejected"),
    "huge": (poisoned(3e38), "rejected"),
    "integers as float": (
        lambda rng: encoded(clean_wave(rng).astype(np.float32), "WAV", "FLOAT"),
        "rejected",
    ),
    "no samples": (of_length(0), "rejected"),
    "no samples in flac": (of_length(0, "FLAC"), "rejected"),
    "1 sample": (of_length(1), "either"),
    "2 samples in flac": (of_length(2, "FLAC"), "either"),
    "100 samples": (of_length(100), "either"),
    **{f"rate {rate}": (with_rate(rate), "rejected") for rate in (0, 1, 2**31 - 1, 2**32 - 1)},
    **{f"rate {rate}": (with_rate(rate), "kept") for rate in (8000, 44100, 15999)},
    "2 channels": (with_channels(2), "kept"),
    "9 channels": (with_channels(9), "kept"),
    "random bytes": (lambda rng: rng.bytes(int(rng.integers(1, 9000))), "either"),
    "zip": (zipped, "rejected"),
    **{name: (lambda rng, text=text: text, "rejected") for name, text in TEXTS.items()},
}
