"""Any audio at the model's rate: exact where nothing changes, one line for what is broken."""

import io
import os
import sys
import threading
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr
import torch
from refusals import refuses
from scipy.signal import correlate
from voices import make_wave

from speakerlab.data import audio
from speakerlab.data.convert import read_wave

RATE = 16000


def tone(hertz: float, rate: int, seconds: float = 1.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(
        np.float32
    )


def write_aac(path: Path, wave_S: np.ndarray, rate: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(wave_S[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_at_the_models_rate_the_samples_are_those_of_stage_5(tmp_path: Path, suffix):
    path = tmp_path / f"a.{suffix}"
    audio.write(path, make_wave(0, 0, 20.0), RATE)  # more than a block
    wave_S = read_wave(path, sample_rate=RATE)
    assert wave_S.dtype == np.float32
    assert len(wave_S) == 320000 > audio.BLOCK_SAMPLES
    assert np.array_equal(wave_S, audio.read(path) / np.float32(32768))


def test_every_way_to_give_a_file(tmp_path: Path):
    path = tmp_path / "a.wav"
    audio.write(path, make_wave(0, 0, 1.0), RATE)
    content = path.read_bytes()
    wanted_S = read_wave(path, sample_rate=RATE)
    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: os.fdopen(writer, "wb").write(content))
    thread.start()
    with path.open("rb") as opened, os.fdopen(reader, "rb") as piped:
        for source in (str(path), content, bytearray(content), io.BytesIO(content), opened, piped):
            assert np.array_equal(read_wave(source, sample_rate=RATE), wanted_S), type(source)
    thread.join()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "int32", "uint8", "float16"])
def test_every_type_means_the_same_amplitudes(dtype):
    values = np.array([0.0, 0.5, -0.5, -1.0, 0.25])
    if dtype == "uint8":
        raw = (128 + 128 * values).astype(np.uint8)
    else:
        scale = {"int16": 2.0**15, "int32": 2.0**31}.get(dtype, 1.0)
        raw = (scale * values).astype(dtype)
    for source in (raw, torch.from_numpy(raw)):
        wave_S = read_wave(source, sample_rate=RATE)
        assert wave_S.dtype == np.float32
        assert wave_S.tolist() == values.tolist()


def test_the_first_channel_of_either_layout(tmp_path: Path):
    wave_SC = np.stack([make_wave(0, 0, 1.0), make_wave(1, 0, 1.0)], axis=1)
    soundfile.write(tmp_path / "a.wav", wave_SC, RATE, subtype="PCM_16")
    wanted_S = wave_SC[:, 0] / np.float32(32768)
    sources = (tmp_path / "a.wav", wave_SC, wave_SC.T, wave_SC[:, :1], wave_SC[:, :1].T)
    for source in (*sources, torch.from_numpy(wave_SC), torch.from_numpy(wave_SC.T)):
        assert np.array_equal(read_wave(source, sample_rate=RATE), wanted_S)
    halved = torch.from_numpy(wave_SC).to(torch.bfloat16) / 32768  # numpy has no such type
    assert np.allclose(read_wave(halved, sample_rate=RATE), wanted_S, rtol=2**-8)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_another_rate_keeps_tones_and_lets_nothing_alias(rate):
    wave_S = read_wave(tone(1000, rate), sample_rate=RATE, source_rate=rate)
    assert abs(len(wave_S) - RATE) <= 1
    middle = slice(1000, 15000)
    assert np.abs(wave_S - tone(1000, RATE)[: len(wave_S)])[middle].max() < 1e-3
    if rate > 2 * 9500:
        high_S = read_wave(tone(9500, rate), sample_rate=RATE, source_rate=rate)
        assert np.abs(high_S[middle]).max() < 1e-3


def test_resampling_in_blocks_is_resampling_at_once(tmp_path: Path):
    wave_S = make_wave(0, 0, 15.0, 44100)
    assert len(wave_S) > 2 * audio.BLOCK_SAMPLES
    audio.write(tmp_path / "a.wav", wave_S, 44100)
    wanted_S = soxr.resample((wave_S / 32768).astype(np.float32), 44100, RATE, quality="HQ")
    from_file = read_wave(tmp_path / "a.wav", sample_rate=RATE)
    assert np.abs(from_file - wanted_S).max() < 1e-6
    from_array = read_wave(wave_S, sample_rate=RATE, source_rate=44100)
    assert np.array_equal(from_array, from_file)


@pytest.mark.parametrize("suffix", ["mp3", "ogg", "m4a", "aac", "aiff", "caf", "au"])
@pytest.mark.parametrize("rate", [16000, 44100])
def test_formats(tmp_path: Path, suffix, rate):
    path, wave_S = tmp_path / f"a.{suffix}", make_wave(0, 0, 2.0, rate)
    if suffix in ("m4a", "aac"):
        write_aac(path, wave_S, rate)
    else:
        soundfile.write(path, wave_S, rate)
    wanted_S = read_wave(wave_S, sample_rate=RATE, source_rate=rate)
    for source in (path, path.read_bytes()):
        read_S = read_wave(source, sample_rate=RATE)
        assert abs(len(read_S) - len(wanted_S)) < 2500  # what a codec puts before and behind
        part_S = wanted_S[4000:20000]
        products = correlate(read_S[2000:24000], part_S, mode="valid", method="fft")
        assert 0.95 < products.max() / (part_S @ part_S) < 1.05  # wherever the codec put it


def test_m4a_without_its_extra_names_it(tmp_path: Path, monkeypatch):
    write_aac(tmp_path / "a.m4a", make_wave(0, 0, 1.0), RATE)
    monkeypatch.setitem(sys.modules, "av", None)  # as if it were not installed
    with refuses(f"{tmp_path}/a.m4a", "pip install av"):
        read_wave(tmp_path / "a.m4a", sample_rate=RATE)


@pytest.mark.parametrize(
    ("source", "kind", "value"),
    [
        (b"hello " * 100, "bytes", "not readable audio"),
        (b"", "bytes", "0 bytes"),
        ([0.0, 0.1], "list", "got list"),
        (np.float32(1), "float32", "got float32"),
        (np.zeros(0, np.float32), "ndarray", "0 samples"),
        (np.zeros((2, 0), np.int16), "ndarray", "0 samples"),
        (np.zeros(99, np.int16), "ndarray", "got 0 in every sample"),
        (np.full(99, 0.5), "ndarray", "got 0.5 in every sample"),
        (np.array([0, np.nan]), "ndarray", "got NaN"),
        (np.array([0, np.inf]), "ndarray", "infinity"),
        (np.array([0, 1234.0]), "ndarray", "got 1234"),
        (np.arange(9), "ndarray", "got int64"),
        (np.zeros((40, 50)), "ndarray", "(40, 50)"),
        (torch.tensor([0.0, np.nan]), "Tensor", "got NaN"),
    ],
)
def test_what_is_no_audio_is_refused(source, kind, value):
    with refuses(f"audio ({kind})", value):
        read_wave(source, sample_rate=RATE)


def test_an_overshoot_is_clipped():
    wave_S = read_wave(np.array([0.0, 1.3, -2.0, 0.5]), sample_rate=RATE)
    assert wave_S.tolist() == [0.0, 1.0, -1.0, 0.5]


def test_paths_and_rates_that_cannot_be_are_refused(tmp_path: Path):
    with refuses("/no/such.wav", "no such file", error=FileNotFoundError):
        read_wave("/no/such.wav", sample_rate=RATE)
    with refuses("/", "a folder"):
        read_wave("/", sample_rate=RATE)
    audio.write(tmp_path / "a.wav", make_wave(0, 0, 1.0), RATE)
    with refuses(f"{tmp_path}/a.wav", 16000, 8000):
        read_wave(tmp_path / "a.wav", sample_rate=RATE, source_rate=8000)
    with refuses("audio (ndarray)", "got 0"):
        read_wave(np.ones(9), sample_rate=RATE, source_rate=0)


def test_a_float_file_with_nan_is_refused(tmp_path: Path):
    values = np.array([0.1, np.nan, 0.2], dtype=np.float32)
    soundfile.write(tmp_path / "b.wav", values, RATE, subtype="FLOAT")
    with refuses(f"{tmp_path}/b.wav", "NaN"):
        read_wave(tmp_path / "b.wav", sample_rate=RATE)
