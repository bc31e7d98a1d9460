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
# a file of this name appears where a file name, or a content, was run
MARKER = "PWNED"
EDGES = [0, 1, 2, 3, 7, 8, 16, 24, 32, 127, 255]
EDGES += [2**15 - 1, 2**15, 2**16 - 1, 2**24]
EDGES += [2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1]
# behind "RIFF" and "fLaC"
WAV_HEADER = range(4, 44, 2)
FLAC_HEADER = range(4, 42, 2)


def clean_wave(rng: Rng) -> np.ndarray:
    speaker = int(rng.integers(100))
    # So many that no two cases are alike: the same recording of two speakers would be refused.
    utterance = int(rng.integers(1_000_000))
    # At 44.1 kHz, too, it is long enough for the recipe of own recordings.
    seconds = 0.9 + 0.3 * rng.random()
    return make_wave(speaker, utterance, seconds)


def encoded(
    wave: np.ndarray,
    form: str = "WAV",
    subtype: str | None = None,
    rate: int = RATE,
):
    """Return the content of a file in any format that libsndfile writes."""
    file = io.BytesIO()
    # libsndfile would not scale integers
    is_float = subtype in ("FLOAT", "DOUBLE")
    if is_float and wave.dtype == np.int16:
        wave = wave / 32768
    soundfile.write(file, wave, rate, format=form, subtype=subtype)
    return file.getvalue()


def wav(rng: Rng) -> bytes:
    return encoded(clean_wave(rng))


def flac(rng: Rng) -> bytes:
    return encoded(clean_wave(rng), "FLAC")


def cut(data: bytes, rng: Rng, first: int, last: int | None = None) -> bytes:
    end = min(last or len(data), len(data))
    size = int(rng.integers(first, end))
    return data[:size]


def flip(data: bytes, rng: Rng, first: int, last: int | None = None) -> bytes:
    """Flip one to eight bits."""
    changed = bytearray(data)
    end = min(last or len(data), len(data))
    num_bits = int(rng.integers(1, 9))
    for _ in range(num_bits):
        at = int(rng.integers(first, end))
        bit = rng.integers(8)
        changed[at] ^= 1 << bit
    return bytes(changed)


def splice(data: bytes, rng: Rng) -> bytes:
    """Take bytes out, put some in, or replace them by zeros."""
    at = int(rng.integers(len(data)))
    size = int(rng.integers(1, 5000))
    inserted = rng.bytes(size) + data[at : at + size]
    middles = [b"", inserted, bytes(size)]
    middle = middles[rng.integers(3)]
    return data[:at] + middle + data[at + size :]


def lying(
    make: Callable[[Rng], bytes],
    at: int,
    order: Literal["little", "big"],
) -> Callable[[Rng], bytes]:
    """Put an edge of two or four bytes over the fields of a header."""

    def lie(rng: Rng) -> bytes:
        data = make(rng)
        size = int(rng.choice([2, 4]))
        edge = EDGES[rng.integers(len(EDGES))]
        value = edge % 2 ** (8 * size)
        field = value.to_bytes(size, order)
        return data[:at] + field + data[at + size :]

    return lie


def extensible(rng: Rng) -> bytes:
    """Return WAVE_FORMAT_EXTENSIBLE with odd inner format, sizes or valid bits."""
    wave = clean_wave(rng).tobytes()
    # the identifier of PCM, or a random one
    inner = b"\1\0\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    if rng.random() < 0.5:
        inner = rng.bytes(16)
    size = int(rng.choice([0, 1, 22, 23, 65535]))
    valid_bits = int(rng.choice([0, 3, 8, 16, 24, 99]))
    fmt = struct.pack(
        "<HHIIHHHHI",
        0xFFFE,  # WAVE_FORMAT_EXTENSIBLE
        1,  # channels
        RATE,
        2 * RATE,  # bytes a second
        2,  # bytes a sample
        16,  # bits a sample
        size,
        valid_bits,
        4,  # the speaker that the channel is for
    )
    fmt += inner
    body = b"WAVEfmt "
    body += struct.pack("<I", len(fmt))
    body += fmt
    body += b"data"
    body += struct.pack("<I", len(wave))
    riff_size = struct.pack("<I", len(body) + len(wave))
    return b"RIFF" + riff_size + body + wave


def odd_chunks(rng: Rng) -> bytes:
    """Return a wav with chunks of absurd sizes, duplicates, or in the wrong order."""
    data = wav(rng)
    size = int(EDGES[rng.integers(len(EDGES))])
    names = [b"LIST", b"fact", b"fmt ", b"data", b"\0\0\0\0"]
    chunk = rng.choice(names) + struct.pack("<I", size)
    content = rng.bytes(min(size, 64))
    return data[:12] + chunk + content + data[12:]


def disguised(
    form: str,
    subtype: str | None = None,
    rate: int = RATE,
) -> Callable[[Rng], bytes]:
    return lambda rng: encoded(clean_wave(rng), form, subtype, rate)


def poisoned(value: float, subtype: str = "FLOAT") -> Callable[[Rng], bytes]:
    def make(rng: Rng) -> bytes:
        wave_S = clean_wave(rng) / 32768
        places = rng.integers(len(wave_S), size=3)
        wave_S[places] = value
        return encoded(wave_S, "WAV", subtype)

    return make


def of_length(num_samples: int, form: str = "WAV") -> Callable[[Rng], bytes]:
    def make(rng: Rng) -> bytes:
        wave_S = clean_wave(rng)
        return encoded(wave_S[:num_samples], form)

    return make


def with_rate(rate: int) -> Callable[[Rng], bytes]:
    """Change the rate in the header only, to one that libsndfile would not write."""

    def make(rng: Rng) -> bytes:
        data = bytearray(wav(rng))
        bytes_per_second = min(2 * rate, 2**32 - 1)
        struct.pack_into("<II", data, 24, rate, bytes_per_second)
        return bytes(data)

    return make


def with_channels(count: int) -> Callable[[Rng], bytes]:
    def make(rng: Rng) -> bytes:
        wave_S = clean_wave(rng)[:6000]
        wave_SC = np.stack([wave_S] * count, 1)
        return encoded(wave_SC)

    return make


def integers_as_float(rng: Rng) -> bytes:
    wave_S = clean_wave(rng).astype(np.float32)
    return encoded(wave_S, "WAV", "FLOAT")


def random_bytes(rng: Rng) -> bytes:
    size = int(rng.integers(1, 9000))
    return rng.bytes(size)


def cut_file(
    make: Callable[[Rng], bytes], first: int, last: int | None = None
) -> Callable[[Rng], bytes]:
    return lambda rng: cut(make(rng), rng, first, last)


def flipped(
    make: Callable[[Rng], bytes], first: int, last: int | None = None
) -> Callable[[Rng], bytes]:
    return lambda rng: flip(make(rng), rng, first, last)


def spliced(make: Callable[[Rng], bytes]) -> Callable[[Rng], bytes]:
    return lambda rng: splice(make(rng), rng)


def fixed(content: bytes) -> Callable[[Rng], bytes]:
    return lambda rng: content


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
    "playlist": (
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.wav\n#EXTINF:1,\nother.wav\n"
    ),
    "concat": b"ffconcat version 1.0\nfile other.wav\n",
    "pickle": b"cos\nsystem\n(S'touch " + MARKER.encode() + b"'\ntR.",
    "lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    ),
    "zeros": bytes(4096),
}
SUBTYPES = (
    "PCM_U8",
    "PCM_24",
    "PCM_32",
    "FLOAT",
    "DOUBLE",
    "ULAW",
    "ALAW",
    "MS_ADPCM",
)
FORMS = ("RF64", "W64", "AIFF", "AU", "CAF", "FLAC", "OGG", "MP3")
IMPOSSIBLE_RATES = (0, 1, 2**31 - 1, 2**32 - 1)
OTHER_RATES = (8000, 44100, 15999)
CONTENTS: dict[str, tuple[Callable[[Rng], bytes], Fate]] = {
    "empty": (fixed(b""), "rejected"),
    "wav cut in RIFF": (cut_file(wav, 1, 12), "rejected"),
    "wav cut in fmt": (cut_file(wav, 12, 36), "rejected"),
    "wav cut in data header": (cut_file(wav, 36, 44), "rejected"),
    "wav cut in data": (cut_file(wav, 44), "rejected"),
    "flac cut in metadata": (cut_file(flac, 1, 80), "rejected"),
    "flac cut in frames": (cut_file(flac, 100), "rejected"),
    "wav bits flipped in header": (flipped(wav, 0, 44), "either"),
    "wav bits flipped in data": (flipped(wav, 44), "kept"),
    "flac bits flipped in metadata": (flipped(flac, 0, 80), "either"),
    "flac bits flipped in frames": (flipped(flac, 100), "either"),
    "wav spliced": (spliced(wav), "either"),
    "flac spliced": (spliced(flac), "either"),
}
for at in WAV_HEADER:
    CONTENTS[f"wav lies at {at}"] = (lying(wav, at, "little"), "either")
for at in FLAC_HEADER:
    CONTENTS[f"flac lies at {at}"] = (lying(flac, at, "big"), "either")
CONTENTS |= {
    "wav extensible": (extensible, "either"),
    "wav odd chunks": (odd_chunks, "either"),
    "ogg bits flipped": (flipped(disguised("OGG"), 0), "either"),
    "mp3 bits flipped": (flipped(disguised("MP3"), 0), "either"),
}
for subtype in SUBTYPES:
    CONTENTS[f"wav {subtype}"] = (disguised("WAV", subtype), "kept")
for form in FORMS:
    CONTENTS[f"{form} as wav"] = (disguised(form), "kept")
CONTENTS |= {
    "NaN": (poisoned(np.nan), "rejected"),
    "infinity": (poisoned(-np.inf), "rejected"),
    "NaN in double": (poisoned(np.nan, "DOUBLE"), "rejected"),
    "huge": (poisoned(3e38), "rejected"),
    "integers as float": (integers_as_float, "rejected"),
    "no samples": (of_length(0), "rejected"),
    "no samples in flac": (of_length(0, "FLAC"), "rejected"),
    "1 sample": (of_length(1), "either"),
    "2 samples in flac": (of_length(2, "FLAC"), "either"),
    "100 samples": (of_length(100), "either"),
}
for rate in IMPOSSIBLE_RATES:
    CONTENTS[f"rate {rate}"] = (with_rate(rate), "rejected")
for rate in OTHER_RATES:
    CONTENTS[f"rate {rate}"] = (with_rate(rate), "kept")
CONTENTS |= {
    "2 channels": (with_channels(2), "kept"),
    "9 channels": (with_channels(9), "kept"),
    "random bytes": (random_bytes, "either"),
    "zip": (zipped, "rejected"),
}
for name, text in TEXTS.items():
    CONTENTS[name] = (fixed(text), "rejected")
