"""Reading audio: exact samples, nothing but the range asked for, one line for what is broken."""

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from refusals import refuses

from speakerlab.data import audio

RATE = 16000


def noise(num_samples: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = (num_samples, *shape)
    return rng.integers(-32768, 32768, shape, dtype=np.int16)


def decode(path: Path) -> int:
    """Read a file to its end; return the number of samples."""
    with audio.stream(path) as (_, blocks):
        return sum(map(len, blocks))


@pytest.fixture(params=["wav", "flac"])
def clip(request, tmp_path: Path):
    """(path, its samples): 3 s of full-range 16-bit noise."""
    path = tmp_path / f"clip.{request.param}"
    wave_S = noise(3 * RATE)
    audio.write(path, wave_S, RATE)
    return path, wave_S


@pytest.mark.parametrize("first", [0, 1, 4095, 4096, 20001, 47999])
@pytest.mark.parametrize("count", [1, 777, 20000])
def test_a_range_is_the_slice_bit_for_bit(clip, first, count):
    path, wave_S = clip
    count = min(count, 48000 - first)
    read_S = audio.read(path, first, count)
    assert read_S.dtype == np.int16
    assert read_S.flags.c_contiguous
    expected_S = wave_S[first : first + count]
    assert np.array_equal(read_S, expected_S)


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="the kernel counts no bytes here"
)
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_only_the_range_is_read(tmp_path: Path, suffix):
    def bytes_read() -> int:
        # the first line is "rchar: BYTES"
        fields = Path("/proc/self/io").read_text().split()
        return int(fields[1])

    path = tmp_path / f"long{suffix}"
    # 1.9 MB
    wave_S = noise(60 * RATE)
    audio.write(path, wave_S, RATE)
    counting = -bytes_read() + bytes_read()
    before = bytes_read()
    # 32 kB
    audio.read(path, 30 * RATE, RATE)
    num_bytes = bytes_read() - before - counting
    assert num_bytes < 200_000
    assert path.stat().st_size > 1_800_000


def test_24_bit_keeps_the_upper_16(tmp_path: Path):
    path = tmp_path / "a.wav"
    wave_S = noise(1001).astype(np.int32) << 16
    soundfile.write(path, wave_S, RATE, subtype="PCM_24")
    expected_S = wave_S >> 16
    assert np.array_equal(audio.read(path), expected_S)
    # an odd number of bytes, which libsndfile remarks upon, is no fault
    assert decode(path) == 1001


def test_float_is_scaled_rounded_and_clipped(tmp_path: Path):
    path = tmp_path / "a.wav"
    values = [0.0, 0.5, -1.0, 1.0, 1.5, -2.0, 0.6 / 32768]
    wave_S = np.array(values, dtype=np.float32)
    soundfile.write(path, wave_S, RATE, subtype="FLOAT")
    assert audio.read(path).tolist() == [
        0,
        16384,
        -32768,
        32767,
        32767,
        -32768,
        1,
    ]


def test_float_of_another_scale_is_refused(tmp_path: Path):
    path = tmp_path / "a.wav"
    wave_S = np.array([0.0, 2.1], dtype=np.float32)
    soundfile.write(path, wave_S, RATE, "FLOAT")
    with refuses(str(path), 2.1):
        audio.read(path)


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_first_channel_of_stereo(tmp_path: Path, suffix):
    path = tmp_path / f"a{suffix}"
    wave_SC = noise(8000, 2)
    soundfile.write(path, wave_SC, RATE, subtype="PCM_16")
    assert audio.read_info(path).num_channels == 2
    expected_S = wave_SC[100:150, 0]
    assert np.array_equal(audio.read(path, 100, 50), expected_S)
    with audio.stream(path) as (_, blocks):
        # the other channel is not kept in memory
        assert next(blocks).base is None


def test_a_file_without_seeking_is_decoded(tmp_path: Path):
    path = tmp_path / "a.wav"
    soundfile.write(path, noise(3200), RATE, subtype="GSM610")
    assert decode(path) == 3200
    assert len(audio.read(path)) == 3200


def test_more_than_there_is(clip):
    path, wave_S = clip
    with refuses(str(path), "1000 of 2000"):
        audio.read(path, 47000, 2000)
    with refuses(str(path), "0 of 10"):
        audio.read(path, 48001, 10)
    last_S = wave_S[40000:]
    assert np.array_equal(audio.read(path, 40000), last_S)
    assert decode(path) == 48000


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_cut_flac_is_found(tmp_path: Path, share):
    path = tmp_path / "a.flac"
    audio.write(path, noise(3 * RATE), RATE)
    size = path.stat().st_size
    os.truncate(path, int(size * share))
    for read in (decode, audio.read_info, audio.read):
        with refuses(str(path), "; copy it again"):
            read(path)


def test_a_damaged_flac_header_is_read_alike_whole_and_in_part(tmp_path: Path):
    path = tmp_path / "a.flac"
    wave_S = noise(RATE)
    soundfile.write(path, wave_S, RATE)
    content = bytearray(path.read_bytes())
    # This bit marks the last block of the header. Here it is set in the first of several blocks.
    content[4] |= 0x80
    path.write_bytes(content)
    assert np.array_equal(audio.read(path), wave_S)
    assert np.array_equal(audio.read(path, 0, 100), wave_S[:100])
    assert np.array_equal(audio.read(path, 50, 100), wave_S[50:150])
    assert decode(path) == RATE


def test_cut_wav_is_found(tmp_path: Path):
    path = tmp_path / "a.wav"
    audio.write(path, noise(RATE), RATE)
    os.truncate(path, 44 + 20000)
    for read in (decode, audio.read_info, audio.read):
        with refuses(str(path), "20000 of 32000 bytes"):
            read(path)


def test_mp3_to_listen_to_is_small_and_as_long():
    time_S = np.arange(5 * RATE) / RATE
    sine_S = np.sin(2 * np.pi * 440 * time_S)
    wave_S = audio.to_int16(0.3 * sine_S)
    mp3 = audio.encode(wave_S, RATE, "MP3")
    assert len(mp3) < 0.2 * wave_S.nbytes
    with audio.stream(mp3) as (rate, blocks):
        decoded_S = np.concatenate(list(blocks))
        assert rate == RATE
    assert len(decoded_S) == len(wave_S)
    correlation_22 = np.corrcoef(decoded_S.astype(float), wave_S)
    assert correlation_22[0, 1] > 0.99

    # FLAC loses nothing
    flac = audio.encode(wave_S, RATE, "FLAC")
    assert np.array_equal(audio.from_flac(flac), wave_S)
