"""Reading audio: exact samples, nothing but the range asked for, one line for what is broken."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
from refusals import refuses

from speakerlab.data import audio

RATE = 16000


def noise(num_samples: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(-32768, 32768, (num_samples, *shape), dtype=np.int16)


def decode(path: Path) -> int:
    """Read a file to its end; return the number of samples."""
    with audio.stream(path) as (_, blocks):
        return sum(map(len, blocks))


@pytest.fixture(params=["wav", "flac"])
def clip(request, tmp_path: Path):
    """(path, its samples): 3 s of full-range 16-bit noise."""
    path, wave_S = tmp_path / f"clip.{request.param}", noise(3 * RATE)
    audio.write(path, wave_S, RATE)
    return path, wave_S


@pytest.mark.parametrize("first", [0, 1, 4095, 4096, 20001, 47999])
@pytest.mark.parametrize("count", [1, 777, 20000])
def test_a_range_is_the_slice_bit_for_bit(clip, first, count):
    path, wave_S = clip
    count = min(count, 48000 - first)
    read_S = audio.read(path, first, count)
    assert read_S.dtype == np.int16 and read_S.flags.c_contiguous
    assert np.array_equal(read_S, wave_S[first : first + count])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts no bytes here")
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_only_the_range_is_read(tmp_path: Path, suffix):
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    path = tmp_path / f"long{suffix}"
    audio.write(path, noise(60 * RATE), RATE)  # 1.9 MB
    counting = -bytes_read() + bytes_read()
    before = bytes_read()
    audio.read(path, 30 * RATE, RATE)  # 32 kB
    assert bytes_read() - before - counting < 200_000
    assert path.stat().st_size > 1_800_000


def test_24_bit_keeps_the_upper_16(tmp_path: Path):
    wave_S = noise(1001).astype(np.int32) << 16
    soundfile.write(tmp_path / "a.wav", wave_S, RATE, subtype="PCM_24")
    assert np.array_equal(audio.read(tmp_path / "a.wav"), wave_S >> 16)
    # an odd number of bytes, which libsndfile remarks upon, is no fault
    assert decode(tmp_path / "a.wav") == 1001


def test_float_is_scaled_rounded_and_clipped(tmp_path: Path):
    values = np.array([0.0, 0.5, -1.0, 1.0, 1.5, -2.0, 0.6 / 32768], dtype=np.float32)
    soundfile.write(tmp_path / "a.wav", values, RATE, subtype="FLOAT")
    assert audio.read(tmp_path / "a.wav").tolist() == [0, 16384, -32768, 32767, 32767, -32768, 1]


def test_float_of_another_scale_is_refused(tmp_path: Path):
    soundfile.write(tmp_path / "a.wav", np.array([0.0, 2.1], dtype=np.float32), RATE, "FLOAT")
    with refuses(str(tmp_path / "a.wav"), 2.1):
        audio.read(tmp_path / "a.wav")


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_first_channel_of_stereo(tmp_path: Path, suffix):
    wave_SC = noise(8000, 2)
    soundfile.write(tmp_path / f"a{suffix}", wave_SC, RATE, subtype="PCM_16")
    assert audio.read_info(tmp_path / f"a{suffix}").num_channels == 2
    assert np.array_equal(audio.read(tmp_path / f"a{suffix}", 100, 50), wave_SC[100:150, 0])
    with audio.stream(tmp_path / f"a{suffix}") as (_, blocks):
        assert next(blocks).base is None  # the other channel is not kept in memory


def test_a_file_without_seeking_is_decoded(tmp_path: Path):
    soundfile.write(tmp_path / "a.wav", noise(3200), RATE, subtype="GSM610")
    assert decode(tmp_path / "a.wav") == len(audio.read(tmp_path / "a.wav")) == 3200


def test_more_than_there_is(clip):
    path, wave_S = clip
    with refuses(str(path), "1000 of 2000"):
        audio.read(path, 47000, 2000)
    with refuses(str(path), "cannot be decoded"):
        audio.read(path, 48001, 10)
    assert np.array_equal(audio.read(path, 40000), wave_S[40000:])
    assert decode(path) == 48000


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_cut_flac_is_found(tmp_path: Path, share):
    path = tmp_path / "a.flac"
    audio.write(path, noise(3 * RATE), RATE)
    os.truncate(path, int(path.stat().st_size * share))
    assert audio.read_info(path).num_samples == 48000  # the header still promises all
    with refuses(str(path), "; copy it again"):
        decode(path)


def test_cut_wav_is_found(tmp_path: Path):
    path = tmp_path / "a.wav"
    audio.write(path, noise(RATE), RATE)
    os.truncate(path, 44 + 20000)
    assert audio.read_info(path).num_samples == 10000  # libsndfile says nothing
    with refuses(str(path), "20000 of 32000 bytes"):
        decode(path)


@pytest.mark.parametrize("promised", [0xFFFFFFFF, 0x7FFFFFFF - 36, 0x7FFF0000])
def test_wav_of_unknown_length_is_whole(tmp_path: Path, promised):
    """What ffmpeg and sox write into a pipe, where they cannot go back to the header."""
    path, wave_S = tmp_path / "a.wav", noise(RATE)
    audio.write(path, wave_S, RATE)
    content = bytearray(path.read_bytes())
    assert content[36:40] == b"data"
    content[40:44] = struct.pack("<I", promised)
    path.write_bytes(content)
    assert decode(path) == 16000
    assert np.array_equal(audio.read(path), wave_S)


def test_mp3_to_listen_to_is_small_and_as_long():
    time_S = np.arange(5 * RATE) / RATE
    wave_S = audio.to_int16(0.3 * np.sin(2 * np.pi * 440 * time_S))
    mp3, flac = (audio.encode(wave_S, RATE, kind) for kind in ("MP3", "FLAC"))
    assert len(mp3) < 0.2 * wave_S.nbytes
    with audio.stream(mp3) as (rate, blocks):
        again_S = np.concatenate(list(blocks)).astype(float)
        assert rate == RATE
    assert len(again_S) == len(wave_S)
    assert np.corrcoef(again_S, wave_S)[0, 1] > 0.99
    assert np.array_equal(audio.from_flac(flac), wave_S)  # which loses nothing
